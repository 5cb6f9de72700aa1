"""Whether a training whose ranks have ended goes on from its last checkpoint, and what the user is told about it."""

import logging
from dataclasses import replace
from pathlib import Path

from hetrain.launch.failures import RankError
from hetrain.launch.job import Job
from hetrain.launch.quiet import show_our_own

logger = logging.getLogger(__name__)


class Restarts:
    """The restarts of one launch, at most launch.max_restarts of them.

    What was trained after the last checkpoint is trained again and counted once: the run equals an uninterrupted one.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._most = job.config.launch.max_restarts if job.verb == "train" else 0
        self._made = 0
        self._from: Path | None = None  # the checkpoint of the restart before
        self._summary_before = self._summary_written()

    def after(self, error: RankError) -> Job:
        """The job that the ranks are started with again after `error`, which is raised where they are not."""
        if not self._most or not error.may_pass or self._has_ended():
            raise error
        if self._made == self._most:
            raise RankError(f"{error}\n  launch.max_restarts={self._most}: no restart is left.", error.exit_code)
        from hetrain.training.run_folder import start_of  # imports torch, and is seldom needed

        start, step = start_of(self._job.config)
        since = self._job.restarts + 1 if self._made and start == self._from else 1
        self._made, self._from = self._made + 1, start
        self._job = replace(self._job, restarts=since)
        where = f"from step {step}, the last checkpoint" if start is not None else "from step 0: there is no checkpoint"
        show_our_own()
        logger.warning("%s; restart %d of %d goes on %s", error.what, self._made, self._most, where)
        return self._job

    def _has_ended(self) -> bool:
        """Whether this launch has trained to the end: a process may die while all others say good-bye."""
        if self._summary_written() == self._summary_before:
            return False
        from hetrain.training.run_folder import has_ended

        return has_ended(self._folder)

    @property
    def _folder(self) -> Path:
        return Path(self._job.config.runs) / str(self._job.config.name)

    def _summary_written(self) -> int | None:
        """When summary.json was written; None where there is none, as in a run that goes on."""
        try:
            return (self._folder / "summary.json").stat().st_mtime_ns
        except FileNotFoundError:
            return None
