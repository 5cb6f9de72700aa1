"""The configs of a sweep's jobs, made together: what one job reads, the jobs where it means nothing pass over."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hetrain.config.compose import check_drafted, drafted, typed
from hetrain.config.schema import RunConfig
from hetrain.config.unread import Unread, harmless, keys_read, passing_over
from hetrain.errors import ConfigError


@dataclass
class Swept:
    """One job's config, or why it cannot run; `passed_over`: settings that mean nothing in this job."""

    arguments: Sequence[str]
    draft: RunConfig | None = None  # what words and files say, unchecked
    config: RunConfig | None = None
    error: ConfigError | None = None
    passed_over: list[Unread] = field(default_factory=list)


def compose_together(
    combinations: Sequence[Sequence[str]],
    folders: Sequence[Path],
    verb: str,
    check_more: Callable[[RunConfig], None] = lambda cfg: None,
) -> list[Swept]:
    """The config of every combination, checked, so that modes can be compared in one sweep.

    Where a setting means nothing it is passed over, if a job that can run reads it, or can run with that value; where
    none does it is a mistake. check_more: raises ConfigError for what else cannot run.
    """
    jobs = [_drafted(arguments, folders) for arguments in combinations]
    before, able = 0, [job for job in jobs if job.draft is not None]
    while len(able) != before:  # what only a job reads that turned out unable to run is read by none
        before, drafts = len(able), [job.draft for job in able if job.draft is not None]
        read = {key for draft in drafts for key in keys_read(draft, verb)}
        had = {word for draft in drafts for word in harmless(draft, verb)}
        for job in able:
            _decide(job, read | had, folders, verb, check_more)
        able = [job for job in able if job.config is not None]
    return jobs


def _drafted(arguments: Sequence[str], folders: Sequence[Path]) -> Swept:
    try:
        return Swept(arguments, draft=drafted(arguments, folders))
    except ConfigError as error:
        return Swept(arguments, error=error)


def _decide(
    job: Swept,
    taken: Collection[str],
    folders: Sequence[Path],
    verb: str,
    check_more: Callable[[RunConfig], None],
) -> None:
    """Give `job` its config without those KEY or KEY=VALUE of `taken` that mean nothing in it, or its error."""
    assert job.draft is not None
    job.config, job.error, job.passed_over = None, None, []
    try:
        config, passed = passing_over(job.draft, taken, verb, typed(job.arguments))
        check_drafted(config, job.arguments, folders, verb=verb, without={setting.word for setting in passed})
        check_more(config)
        job.config, job.passed_over = config, passed
    except ConfigError as error:
        job.error = error
