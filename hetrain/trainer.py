"""The loop: step, log, evaluate, save, stop. It knows no consistency mode, only the Engine protocol."""

import gc
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from signal import Signals
from typing import Any

import torch

from hetrain import checkpoint
from hetrain.checkpoint import Loaded
from hetrain.config import CheckpointConfig, TrainConfig
from hetrain.data.batch import Batch
from hetrain.data.fingerprint import Fingerprint
from hetrain.data.reader import Reader
from hetrain.engine import Engine, StepOutput
from hetrain.engine.accord import Accord, Met
from hetrain.evaluate import Metrics, compute_metrics, evaluate
from hetrain.ranks import Ranks
from hetrain.telemetry import Traffic
from hetrain.telemetry.interface import interface_of, reports_for_host
from hetrain.telemetry.pace import Pace
from hetrain.telemetry.run_log import RunLog
from hetrain.training import summary
from hetrain.training.loss_guard import Guard
from hetrain.training.meter import Meter
from hetrain.training.run_lock import RunLock
from hetrain.training.slow_down import SlowDown
from hetrain.training.stop_signal import StopSignal


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
class Setup:
    """What the trainer works with; build.py makes it from a config."""

    engine: Engine
    reader: Reader  # at its first batch, or where `start_from` left it
    accord: Accord  # of this reader and `stop`
    stop: StopSignal
    splits: dict[str, Callable[[], Iterable[Batch]]]  # validation and test, those that exist
    ranks: Ranks
    device: torch.device
    folder: Path
    lock: RunLock | None  # rank 0's hold on the folder, until the run ends
    make_folder_anew: Callable[[], RunLock]  # on rank 0, where it was removed meanwhile
    log: RunLog
    traffic: Traffic
    train: TrainConfig
    checkpoint: CheckpointConfig
    log_every: int
    about: dict[str, Any]  # model, mode, staleness, ...: goes into the summary as it is
    settings: dict[str, Any]  # flat config
    data: Fingerprint
    slow: SlowDown
    resumed: Loaded | None = None
    restarts: int = 0  # of the processes since the checkpoint taken up was written


class Trainer:
    """Trains to the end of the data or of max_steps, to early stopping or to a signal. Every method is collective."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.checkpoints = setup.folder / "checkpoints"
        self.step = 0
        self.best = Best()
        self.validation: Metrics | None = None  # of the newest evaluation
        self.test: Metrics | None = None  # of the newest evaluation, where there is nothing to validate on
        self.weights_step: int | None = None  # when the final numbers are not those of the last step
        self.before: dict[str, Any] = {}  # totals of earlier sittings of this run
        self.last_saved = self.last_evaluated = -1
        if setup.resumed is not None:
            self.step = self.last_saved = setup.resumed.step
            self.best = self._earlier_best(setup.resumed)
            self.before = setup.resumed.meta.get("totals", {})
        self.guard = Guard(setup.ranks.rank, setup.reader.schema.dense)
        self.meter = Meter(setup.ranks, self.before.get("examples", 0), setup.accord.total)
        self.pace = Pace()  # of this sitting
        self.interface = interface_of(os.environ)
        self.started = self.resumed_at = time.perf_counter()
        self.train_s = 0.0  # seconds in training steps, evaluation and saving left out

    def run(self) -> dict[str, Any]:
        """Train, then evaluate on the test split. Returns the summary, which rank 0 writes as summary.json.

        Its `interrupted` says that a signal, named by `stop_reason`, ended training: the run can go on from there.
        """
        self.setup.log.open(self.step)
        try:
            with self.setup.stop:
                gc.freeze()  # what set-up made stays: no later collection goes through it again
                self.resumed_at = time.perf_counter()
                if self.interface is not None:
                    self.interface.start()
                reason = self._train()
                self.setup.stop.settle()
                result = self._interrupted(reason) if isinstance(reason, Signals) else self._finished(reason)
            if self.setup.ranks.first:
                summary.write(self.setup.folder, result)
            return result
        finally:
            self.setup.log.close()
            if self.setup.lock is not None:
                self.setup.lock.release()

    def _earlier_best(self, resumed: Loaded) -> Best:
        """The best so far, where its weights are among our own checkpoints; another run's are out of our hands."""
        best = Best(**resumed.meta["early_stopping"] or {})
        kept = (checkpoint.step_folder(self.checkpoints, best.step) / checkpoint.META).is_file()
        return best if kept and resumed.path.parent.resolve() == self.checkpoints.resolve() else Best()

    def _train(self) -> str | Signals:
        """Step until something ends training; says what."""
        setup, cfg = self.setup, self.setup.train
        batches = self.guard.watch(setup.reader)
        if self._stops_early():  # a process died after the checkpoint that this goes on from
            return "early stopping"
        setup.accord.start(self.step, self._next_due, epochs=cfg.eval_every is None)
        while cfg.max_steps is None or self.step < cfg.max_steps:
            step, epoch = self.step, setup.accord.epoch
            met = self._until_met(batches)
            if met.ended:
                return "end of data"
            if met.signal:
                return met.signal
            due = setup.accord.epoch > epoch if cfg.eval_every is None else self._passed(step, cfg.eval_every)
            improved = self._evaluate() if due else False
            every = setup.checkpoint.every
            if improved or (due if every is None else self._passed(step, every)):
                self._save()
            if self._stops_early():
                return "early stopping"
        return "max_steps"

    def _stops_early(self) -> bool:
        patience = self.setup.train.patience
        return patience is not None and self.best.since >= patience

    def _until_met(self, batches: Iterator[Batch]) -> Met:
        """Step until all ranks are together."""
        while True:
            out = self.setup.slow.step(self.step + 1, partial(self.setup.engine.step, batches))
            if out is not None:
                self._count(out)
            met = self.setup.accord.meet(out)
            if met is not None:
                self.step = self.setup.accord.step
                return met

    def _count(self, out: StepOutput) -> None:
        """Take note of a step of this rank."""
        setup, before = self.setup, self.step
        setup.accord.count(out)
        self.step = setup.accord.step
        setup.reader.trained()
        self.guard.check(self.step, out)
        self.meter.add(out)
        self.pace.add(self._train_seconds(), setup.accord.examples)
        if self._passed(before, setup.log_every):
            self._log()

    def _passed(self, before: int, every: int) -> bool:
        """Whether a multiple of `every` lies in the steps after `before` up to now."""
        return self.step // every > before // every

    def _next_due(self, step: int) -> int | None:
        """The next step after `step` at which ranks evaluate, save or end."""
        cfg, every = self.setup.train, self.setup.checkpoint.every
        due = [(step // n + 1) * n for n in (cfg.eval_every, every) if n is not None]
        if cfg.max_steps is not None and cfg.max_steps > step:
            due.append(cfg.max_steps)
        return min(due, default=None)

    def _finished(self, reason: str) -> dict[str, Any]:
        """The end of a whole run: last evaluation, checkpoint, flush, test."""
        setup = self.setup
        if self.last_evaluated != self.step and "validation" in setup.splits:
            self._evaluate()
        # Saved before the flush: with held-back updates still apart, a longer run can go on from here bit for bit.
        self._save()
        setup.engine.finish()
        with self._paused():
            if setup.train.patience is not None and self.best.step not in (0, self.step):
                best = checkpoint.step_folder(self.checkpoints, self.best.step)
                checkpoint.load(setup.engine, best, setup.ranks)
                self.weights_step = self.best.step
                setup.log.say(f"took the weights of step {self.best.step}, the best on validation")
            tested = self.test if self.last_evaluated == self.step else None
            test = tested or self._metrics_of("test")
        result = self._summary(reason, test)
        numbers = {k: result[k] for k in ("auc", "logloss", "examples_per_s") if result[k] is not None}
        setup.log.hyperparameters(setup.settings, numbers)
        if self.weights_step is None and self.best.step not in (0, self.step):
            best_run = f"hetrain eval run={setup.folder} checkpoint=best"
            setup.log.say(f"validation was best at step {self.best.step} (auc {self.best.auc:.5f}): {best_run}")
        setup.log.say(f"{summary.in_words(result)} -> {setup.folder}")
        return result

    def _interrupted(self, signal: Signals) -> dict[str, Any]:
        self._save()
        self.setup.log.say(f"stopped by a signal, step {self.step} is saved: start again with the same name to go on")
        return self._summary(signal.name, None) | {"interrupted": True}

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """Time and bytes inside are not training's. Not to be nested."""
        if self.setup.device.type == "cuda":
            torch.cuda.synchronize(self.setup.device)
        self.train_s = self._train_seconds()
        self.resumed_at = math.inf
        with ExitStack() as aside:
            aside.enter_context(self.setup.traffic.set_aside())
            if self.interface is not None:
                aside.enter_context(self.interface.paused())
            yield
        self.resumed_at = time.perf_counter()

    def _train_seconds(self) -> float:
        return self.train_s + max(time.perf_counter() - self.resumed_at, 0.0)

    def _log(self) -> None:
        self.setup.log.train(self.step, self.meter.values(self._train_seconds(), self.setup.reader.wait_s))

    def _evaluate(self) -> bool:
        """Evaluate on validation; whether it is the best so far.

        Without validation rows: on test, where train.eval_every asks for it, and nothing is chosen by that.
        """
        with self._paused():
            self.validation = self._metrics_of("validation")
            if "validation" not in self.setup.splits and self.setup.train.eval_every is not None:
                self.test = self._metrics_of("test")
        self.last_evaluated = self.step
        return self.validation is not None and self.best.better(self.validation.auc, self.step)

    def _metrics_of(self, split: str) -> Metrics | None:
        if split not in self.setup.splits:
            return None
        metrics = evaluate(self.setup.engine, self.setup.splits[split](), self.setup.ranks)
        self.setup.log.evaluation(self.step, split, metrics.as_dict())
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
            "settings": self.setup.settings,
            "data": self.setup.data,
        }
        path = checkpoint.step_folder(self.checkpoints, self.step)
        with self._paused():
            self.setup.ranks.together(self._keep_folder)
            checkpoint.save(self.setup.engine, path, self.setup.ranks, reader=self.setup.accord.position(), about=about)
            checkpoint.prune(self.checkpoints, self.setup.checkpoint.keep, self.setup.ranks)
        self.last_saved = self.step

    def _keep_folder(self) -> None:
        """Begin the run's folder anew where it was removed, so that what is saved there can be found and evaluated."""
        setup = self.setup
        if setup.lock is None or not setup.lock.lost:
            return
        setup.lock.release()
        setup.lock = setup.make_folder_anew()
        setup.log.open(self.step)
        setup.log.say(
            f"{setup.folder} was removed while the run went on: it begins anew with step {self.step}, without the "
            "metrics and checkpoints of the steps before"
        )

    def _totals(self) -> dict[str, Any]:
        """Counters of the whole run so far, over all ranks and sittings; time is the workers'. Collective."""
        setup = self.setup
        works = float(setup.ranks.computes)  # a server's day is waiting
        mine = {
            "wait_data_s": works * setup.reader.wait_s,
            "wait_comm_s": works * (self.meter.wait_comm_s + setup.accord.waited_s),
            "rank_seconds": works * self._train_seconds(),
            "bytes": setup.traffic.bytes,
            "bytes_aside": setup.traffic.aside,
            "clipped_values": setup.traffic.clipped,
            "kernel_bytes": self._kernel_bytes(),
        }
        reports = setup.ranks.gather(mine)
        now = summary.merge(reports)
        now |= {
            "train_s": now["rank_seconds"] / setup.ranks.roles.workers,
            "examples": setup.accord.examples,
            "seconds": time.perf_counter() - self.started,
            "restarts": setup.restarts,
        }
        totals = summary.merge([self.before, now])
        sittings = [*reports, *([self.before] if self.before else [])]
        if any(sitting.get("kernel_bytes") is None for sitting in sittings):  # a part of a sum would mislead
            totals["kernel_bytes"] = None
        return totals

    def _kernel_bytes(self) -> int | None:
        """What this host's interface sent in training, told by one of its ranks; None where that cannot be known."""
        if not reports_for_host(os.environ):
            return 0
        return None if self.interface is None else self.interface.sent

    def _summary(self, reason: str, test: Metrics | None) -> dict[str, Any]:
        """summary.json. Quality is the test split's, or validation's where there is no test."""
        report = summary.merge(self.setup.ranks.gather(self.setup.engine.report()))
        shown = test or self.validation or compute_metrics(torch.empty(0), torch.empty(0))
        return {
            **self.setup.about,
            "world_size": self.setup.ranks.world_size,
            "steps": self.step,
            **shown.as_dict(),
            **summary.describe(self._totals(), report),
            **self.setup.ranks.gather(self.pace.values())[0],
            "validation": self.validation.as_dict() if self.validation else None,
            "test": test.as_dict() if test else None,
            "best_step": self.best.step or None,
            "weights_step": self.step if self.weights_step is None else self.weights_step,
            "stop_reason": reason,
            "interrupted": False,
            "data": self.setup.data,
        }
