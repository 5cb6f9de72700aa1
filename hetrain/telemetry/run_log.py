"""What a run leaves and shows while it goes on: metrics.jsonl, TensorBoard, the screen."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from hetrain.durable import write_text


class Screen(Protocol):
    """What the user sees while a run goes on."""

    def train(self, step: int, values: Mapping[str, float]) -> None:
        """Show the figures of a log step."""
        ...

    def say(self, text: str) -> None:
        """Show one line."""
        ...

    def close(self) -> None:
        """Leave the screen as it was found."""
        ...


class RunLog:
    """metrics.jsonl, TensorBoard and the screen of one run. On ranks other than 0 every method does nothing."""

    def __init__(self, folder: Path, screen: Screen, *, first: bool, tensorboard: bool) -> None:
        self._folder, self._screen, self._first, self._tensorboard = folder, screen, first, tensorboard
        self._board: Any = None
        self._file: Any = None

    def open(self, step: int) -> None:
        """Start, or go on after `step`: lines of later steps were written by a run that did not get to save them.

        May be called again, where the folder is another one by now.
        """
        if not self._first:
            return
        self._close_files()
        path = self._folder / "metrics.jsonl"
        if path.exists():
            kept = [line for line in path.read_text().splitlines() if _step_of(line) <= step]
            write_text(path, "".join(line + "\n" for line in kept))
        self._file = path.open("a", buffering=1)
        if self._tensorboard:
            # a second or so to import: only when asked for
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(self._folder / "tb"), purge_step=step + 1 if step else None)

    def train(self, step: int, values: Mapping[str, float]) -> None:
        """Figures of a log step."""
        if self._first:
            self._write(step, "train", values)
            self._screen.train(step, values)

    def evaluation(self, step: int, split: str, values: Mapping[str, float | int | None]) -> None:
        """Metrics of an evaluation; None where one is not defined."""
        if not self._first:
            return
        self._write(step, split, values)
        if values["auc"] is None:
            self._screen.say(f"step {step}: {split} has no AUC: its {values['examples']} examples are of one class")
        else:
            numbers = "  ".join(f"{k} {v:.5f}" for k, v in values.items() if isinstance(v, float))
            self._screen.say(f"step {step}: {split}  {numbers}")

    def say(self, text: str) -> None:
        """One line for the user."""
        if self._first:
            self._screen.say(text)

    def hyperparameters(self, settings: Mapping[str, Any], results: Mapping[str, float]) -> None:
        """TensorBoard's HParams entry of the run: flat settings and final numbers."""
        if self._board is not None:
            plain = {k: v if isinstance(v, int | float | bool) else str(v) for k, v in settings.items()}
            self._board.add_hparams(plain, dict(results), run_name=".")

    def close(self) -> None:
        """Flush and close everything; may be called twice."""
        if self._first:
            self._screen.close()
        self._close_files()

    def _close_files(self) -> None:
        for writer in (self._file, self._board):
            if writer is not None:
                writer.close()
        self._file = self._board = None

    def _write(self, step: int, kind: str, values: Mapping[str, float | int | None]) -> None:
        known = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        self._file.write(json.dumps({"step": step, "kind": kind, **known}) + "\n")
        if self._board is not None:
            for key, value in known.items():
                if value is not None:
                    self._board.add_scalar(f"{kind}/{key}", value, step)


def _step_of(line: str) -> float:
    """The step of a metrics.jsonl line; infinity for a line cut off by a crash."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf
