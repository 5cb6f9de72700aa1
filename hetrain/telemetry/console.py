"""The screen of a run: a progress bar on a terminal, plain lines when piped."""

import time
from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

PLAIN_EVERY_S = 5.0  # between plain lines, so that a log file of a long run stays readable


def _figures(values: Mapping[str, float]) -> str:
    return (
        f"{values['examples_per_s']:>10,.0f} examples/s  loss {values['loss']:.4f}  "
        f"AUC (newest 33k) {values['auc']:.4f}  "
        f"waiting: data {values['wait_data_share']:.0%}, comm {values['wait_comm_share']:.0%}"
    )


class BarScreen:
    """rich's progress bar; drawn at log steps alone, since a drawing thread would take time from training."""

    def __init__(self, total_steps: int | None, console: Console) -> None:
        columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(20), TimeRemainingColumn())
        self._bar = Progress(*columns, TextColumn("{task.description}"), console=console, auto_refresh=False)
        self._task = self._bar.add_task("", total=total_steps)
        self._bar.start()

    def train(self, step: int, values: Mapping[str, float]) -> None:
        """Move the bar."""
        self._bar.update(self._task, completed=step, description=_figures(values), refresh=True)

    def say(self, text: str) -> None:
        """A line above the bar."""
        self._bar.console.print(text, highlight=False, markup=False)
        self._bar.refresh()

    def close(self) -> None:
        """Stop drawing."""
        self._bar.stop()


class PlainScreen:
    """Lines for files and pipes, at most one every few seconds."""

    def __init__(self, total_steps: int | None, console: Console) -> None:
        self._console = console
        self._of = f"/{total_steps}" if total_steps else ""
        self._last = 0.0

    def train(self, step: int, values: Mapping[str, float]) -> None:
        """A line, unless one came just now."""
        now = time.monotonic()
        if now - self._last >= PLAIN_EVERY_S:
            self._last = now
            self.say(f"step {step}{self._of}  {_figures(values).strip()}")

    def say(self, text: str) -> None:
        """A line."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Nothing is left open."""


def screen(total_steps: int | None, console: Console | None = None) -> BarScreen | PlainScreen:
    """The screen that fits where output goes. `total_steps` None: not known."""
    console = console or Console()
    return BarScreen(total_steps, console) if console.is_terminal else PlainScreen(total_steps, console)
