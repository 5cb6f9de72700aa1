"""The loop: step, log, evaluate, save, stop. It knows no consistency mode, only the Engine protocol."""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hetrain import checkpoint, summary
from hetrain.checkpoint import Loaded
from hetrain.config import CheckpointConfig, TrainConfig
from hetrain.data.batch import Batch
from hetrain.data.reader import Reader
from hetrain.engine import Engine
from hetrain.evaluate import Metrics, compute_metrics, evaluate
from hetrain.guard import Guard
from hetrain.meter import Meter
from hetrain.ranks import Ranks
from hetrain.signals import StopSignal
from hetrain.telemetry import RunLog, Traffic


@dataclass
class Best:
    """Early stopping's memory: the best validation AUC so far and the evaluations since."""

    auc: float = -math.inf
    step: int = 0
    since: int = 0

    def better(self, auc: float, step: int) -> bool:
        """Take note of an evaluation; an AUC that is not defined is never better."""
        if auc > self.auc:
            self.auc, self.step, self.since = auc, step, 0
            return True
        self.since += 1
        return False


@dataclass
class Job:
    """What the trainer works with; build.py makes it from a config."""

    engine: Engine
    reader: Reader  # at its first batch, or where `start_from` left it
    splits: dict[str, Callable[[], Iterable[Batch]]]  # validation and test, those that exist
    ranks: Ranks
    device: torch.device
    folder: Path
    log: RunLog
    traffic: Traffic
    train: TrainConfig
    checkpoint: CheckpointConfig
    log_every: int
    about: dict[str, Any]  # model, mode, staleness, ...: goes into the summary as it is
    settings: dict[str, Any]  # flat config, for TensorBoard
    resumed: Loaded | None = None


class Trainer:
    """Trains one job to its end, to early stopping or to a signal. Every method is collective."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.checkpoints = job.folder / "checkpoints"
        self.step = 0
        self.best = Best()
        self.validation: Metrics | None = None  # of the newest evaluation
        self.before: dict[str, Any] = {}  # totals of earlier sittings of this run
        self.last_saved = self.last_evaluated = -1
        if job.resumed is not None:
            self.step = self.last_saved = job.resumed.step
            self.best = Best(**job.resumed.meta.get("early_stopping") or {})
            self.before = job.resumed.meta.get("totals", {})
        self.guard = Guard(job.ranks.rank, job.reader.schema.dense, self.step)
        self.meter = Meter(job.ranks)
        self.stop = StopSignal(job.ranks)
        self.started = self.resumed_at = time.perf_counter()
        self.train_s = 0.0  # seconds in training steps, evaluation and saving left out

    def run(self) -> dict[str, Any]:
        """Train, then evaluate on the test split. Returns the summary, which rank 0 also writes.

        `interrupted` is true in it when a signal ended training: the run can go on from its last checkpoint.
        """
        self.job.log.open(self.step)
        try:
            with self.stop:
                self.resumed_at = time.perf_counter()
                reason = self._train()
                self.stop.settle()
                result = self._interrupted(reason) if reason.startswith("SIG") else self._finished(reason)
            if self.job.ranks.first:
                summary.write(self.job.folder, result)
            return result
        finally:
            self.job.log.close()

    def _train(self) -> str:
        """Step until something ends training; says what."""
        job, cfg = self.job, self.job.train
        batches = self.guard.watch(job.reader)
        while cfg.max_steps is None or self.step < cfg.max_steps:
            epoch = job.reader.epoch
            out = job.engine.step(batches)
            if out is None:
                return "end of data"
            self.step += 1
            job.reader.trained()
            self.guard.check(self.step, out)
            self.meter.add(out)
            if self.step % job.log_every == 0:
                self._log()
            if signal := self.stop.agreed():
                return signal.name
            due = job.reader.epoch > epoch if cfg.eval_every is None else self.step % cfg.eval_every == 0
            improved = self._evaluate() if due else False
            every = job.checkpoint.every
            if improved or (due if every is None else self.step % every == 0):
                self._save()
            if cfg.patience is not None and self.best.since >= cfg.patience:
                return "early stopping"
        return "max_steps"

    def _finished(self, reason: str) -> dict[str, Any]:
        """The end of a whole run: last evaluation, checkpoint, flush, test."""
        job = self.job
        if self.last_evaluated != self.step:
            self._evaluate()
        # Saved before the flush: with held-back updates still apart, a longer run can go on from here bit for bit.
        self._save()
        job.engine.finish()
        with self._paused():
            if job.train.patience is not None and self.best.step not in (0, self.step):
                best = checkpoint.step_folder(self.checkpoints, self.best.step)
                checkpoint.load(job.engine, best, job.ranks)
                job.log.say(f"took the weights of step {self.best.step}, the best on validation")
            test = self._metrics_of("test")
        result = self._summary(reason, test)
        numbers = {k: result[k] for k in ("auc", "logloss", "examples_per_s") if result[k] is not None}
        job.log.hyperparameters(job.settings, numbers)
        return result

    def _interrupted(self, reason: str) -> dict[str, Any]:
        self._save()
        self.job.log.say(f"{reason}: saved step {self.step}; start again with the same name to go on")
        return self._summary(reason, None)

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """Time and bytes inside are not training's. Not to be nested."""
        if self.job.device.type == "cuda":
            torch.cuda.synchronize(self.job.device)
        self.train_s = self._train_seconds()
        self.resumed_at = math.inf
        with self.job.traffic.set_aside():
            yield
        self.resumed_at = time.perf_counter()

    def _train_seconds(self) -> float:
        return self.train_s + max(time.perf_counter() - self.resumed_at, 0.0)

    def _log(self) -> None:
        self.job.log.train(self.step, self.meter.values(self._train_seconds(), self.job.reader.wait_s))

    def _evaluate(self) -> bool:
        """Evaluate on validation; whether it is the best so far."""
        with self._paused():
            self.validation = self._metrics_of("validation")
        self.last_evaluated = self.step
        return self.validation is not None and self.best.better(self.validation.auc, self.step)

    def _metrics_of(self, split: str) -> Metrics | None:
        if split not in self.job.splits:
            return None
        metrics = evaluate(self.job.engine, self.job.splits[split](), self.job.ranks.group)
        self.job.log.evaluation(self.step, split, metrics.as_dict())
        return metrics

    def _save(self) -> None:
        if self.last_saved == self.step:
            return
        scored = self.validation if self.last_evaluated == self.step else None
        about = {
            "validation": None if scored is None else scored.as_dict(),
            "early_stopping": None if self.best.step == 0 else vars(self.best),
            "totals": self._totals(),
            "versions": summary.versions(),
        }
        path = checkpoint.step_folder(self.checkpoints, self.step)
        with self._paused():
            checkpoint.save(self.job.engine, path, self.job.ranks, reader=self.job.reader.state_dict(), about=about)
            if self.job.ranks.first:
                checkpoint.prune(self.checkpoints, self.job.checkpoint.keep)
        self.last_saved = self.step

    def _totals(self) -> dict[str, Any]:
        """Counters of the whole run so far, over all ranks and sittings. Collective."""
        job, seconds = self.job, self._train_seconds()
        mine = {
            "wait_data_s": job.reader.wait_s,
            "wait_comm_s": self.meter.wait_comm_s,
            "rank_seconds": seconds,
            "bytes": job.traffic.bytes,
            "bytes_aside": job.traffic.aside,
        }
        now = summary.merge(job.ranks.gather(mine))
        now |= {
            "train_s": now["rank_seconds"] / job.ranks.world_size,
            "examples": self.meter.examples,
            "seconds": time.perf_counter() - self.started,
        }
        return summary.merge([self.before, now])

    def _summary(self, reason: str, test: Metrics | None) -> dict[str, Any]:
        """summary.json. Quality is the test split's, or validation's where there is no test."""
        report = summary.merge(self.job.ranks.gather(self.job.engine.report()))
        shown = test or self.validation or compute_metrics(torch.empty(0), torch.empty(0))
        return {
            **self.job.about,
            "world_size": self.job.ranks.world_size,
            "steps": self.step,
            **shown.as_dict(),
            **summary.describe(self._totals(), report),
            "validation": self.validation.as_dict() if self.validation else None,
            "test": test.as_dict() if test else None,
            "best_step": self.best.step or None,
            "stop_reason": reason,
            "interrupted": reason.startswith("SIG"),
        }
