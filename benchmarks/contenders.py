"""The near end of what is measured: each contender gives windows on demand and is idle in between."""

import json
import resource
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from quiet import Stopwatch, Window
from worker import ANSWER

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Cell:
    """What is compared: one model at one batch size."""

    model: str  # wdl | deepfm | dcn | dcn_v1 | dlrm
    batch_size: int
    dim: int
    threads: int


class Contender(Protocol):
    name: str

    def window(self, seconds: float) -> Window: ...
    def close(self) -> None: ...


class Worker:
    """A contender in a process that is kept: set-up is paid once and counts in no window."""

    def __init__(self, name: str, command: list[str], cell: Cell, data: Path) -> None:
        self.name = name
        options = ["--data", str(data), "--model", cell.model, "--batch-size", str(cell.batch_size)]
        options += ["--dim", str(cell.dim), "--threads", str(cell.threads)]
        self._log = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            [*command, *options], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, cwd=HERE
        )
        self._answer()

    def _answer(self) -> dict:
        for line in self._process.stdout:
            if line.startswith(ANSWER):
                return json.loads(line.removeprefix(ANSWER))
        self._process.wait()
        self._log.seek(0)
        raise SystemExit(f"{self.name} ended with code {self._process.returncode}:\n{self._log.read()[-3000:]}")

    def window(self, seconds: float) -> Window:
        self._process.stdin.write(json.dumps({"seconds": seconds}) + "\n")
        self._process.stdin.flush()
        return Window(**self._answer())

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._log.close()


class HetrainTrain:
    """`hetrain train` as a user runs it: every window is a whole run in its own process.

    Its rate is the summary's examples_per_s; the foreign share is that of the whole run, start and evaluation too.
    """

    def __init__(self, mode: str, cell: Cell, data: Path, examples: int, runs: Path, extra: list[str]) -> None:
        self.name = f"hetrain_{mode}"
        self._examples, self._runs, self._count = examples, runs, 0
        self._rate: float | None = None
        model = ["model=dcn", "model.cross=v1"] if cell.model == "dcn_v1" else [f"model={cell.model}"]
        self._overrides = [
            "data=criteo",
            f"data.path={data}",
            f"runs={runs}",
            *model,
            f"model.embedding_dim={cell.dim}",
        ]
        self._overrides += [f"consistency={mode}", f"train.batch_size={cell.batch_size}"]
        self._overrides += ["launch.nproc=1", f"launch.threads={cell.threads}", *extra]

    def window(self, seconds: float) -> Window:
        if self._rate is None:
            self._rate = self._run(1).rate
        return self._run(max(1, round(seconds * self._rate / self._examples)))

    def _run(self, epochs: int) -> Window:
        self._count += 1
        name = f"{self.name}_{self._count}"
        command = [sys.executable, "-m", "hetrain", "train", *self._overrides, f"train.epochs={epochs}", f"name={name}"]
        watch = Stopwatch(_children_cpu_s)
        done = subprocess.run(command, cwd=HERE.parent, capture_output=True, text=True, check=False)
        whole = watch.stop(0)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\nended with code {done.returncode}:\n{done.stderr[-3000:]}")
        summary = json.loads((self._runs / name / "summary.json").read_text())
        seconds = summary["examples"] / summary["examples_per_s"]
        return Window(summary["examples"], seconds, None, whole.foreign)

    def close(self) -> None:
        """Nothing is kept between windows."""


def _children_cpu_s() -> float:
    """CPU seconds of all descendants that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def torch_worker(contender: str, cell: Cell, data: Path) -> Worker:
    return Worker(contender, [sys.executable, "torch_worker.py", contender], cell, data)


def deepctr_worker(python: str, cell: Cell, data: Path) -> Worker:
    return Worker("deepctr_fit", [python, "deepctr_worker.py"], cell, data)
