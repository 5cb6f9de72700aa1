"""`-m`: one training per combination of swept values, each in its folder, and one table at the end."""

import csv
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hetrain.cli.table import show
from hetrain.cli.trainable import check_trainable
from hetrain.config import RunConfig
from hetrain.config.compose import expand, parse
from hetrain.config.swept import compose_together
from hetrain.config.unread import Unread
from hetrain.errors import ConfigError, HetrainError
from hetrain.launch.job import Job
from hetrain.launch.quiet import quiet_third_parties
from hetrain.launch.rank_environment import read_environment
from hetrain.launch.start import launch
from hetrain.launch.versions import check_versions
from hetrain.launch.worker import perform, run_rank

VERB = "train"  # what is swept
FIGURES = ("auc", "logloss", "examples/s", "bytes", "hit rate", "staleness")


@dataclass
class SweepJob:
    """One combination of the swept values and what became of it."""

    number: int
    swept: dict[str, str]
    config: RunConfig | None = None  # None: it cannot run
    folder: Path | None = None
    passed_over: list[Unread] = field(default_factory=list)  # swept settings that mean nothing in this job
    error: HetrainError | None = None
    state: str = "not started"  # or finished, interrupted, failed


def run(verb: str, overrides: Sequence[str], folders: Sequence[Path]) -> int:
    """Run all jobs one after another, whatever becomes of each; 0 when all of them finished.

    A job whose config cannot run is named before the first one starts. When no job's config can, its error is raised.
    """
    import os

    if read_environment(os.environ) is not None:
        raise ConfigError("-m starts its own processes and cannot run under torchrun or srun.")
    jobs = _jobs(overrides, folders)
    if all(job.config is None for job in jobs) and jobs[0].error is not None:
        raise jobs[0].error
    check_versions()
    quiet_third_parties()
    for job in jobs:
        if job.error is not None:
            print(f"job {job.number} ({_label(job)}) cannot run: {job.error}", file=sys.stderr)
        for setting in job.passed_over:
            print(f"job {job.number} ({_label(job)}) passes over {setting.named} {setting.why}", file=sys.stderr)
    for job in jobs:
        if job.config is not None:
            print(f"\njob {job.number} of {len(jobs)}: {_label(job)} -> {job.folder}", flush=True)
            stopped = _train(verb, job)
            if stopped:
                break
    else:
        stopped = 0
    _report(jobs)
    failed = [job.error for job in jobs if job.error is not None]
    return stopped or (failed[0].exit_code if failed else 0)


def _jobs(overrides: Sequence[str], folders: Sequence[Path]) -> list[SweepJob]:
    """All jobs with their configs, or the errors why they cannot run."""
    for override in parse(overrides):
        if override.key_or_group == "name" or (override.key_or_group == "runs" and override.is_sweep_override()):
            raise ConfigError(
                f"{override.input_line}: a sweep names the folders of its jobs itself: 0, 1, ... in one of its own.\n"
                "  Leave name out; runs=DIR says where the sweep's folder is made."
            )
    combinations = expand(overrides)
    lines = [dict(line.lstrip("+").partition("=")[::2] for line in lines) for lines in combinations]
    swept = [key for key in lines[0] if len({line[key] for line in lines}) > 1] if lines else []
    jobs = [SweepJob(number, {key: values[key] for key in swept}) for number, values in enumerate(lines)]
    _compose(jobs, combinations, folders)
    runs = next((job.config.runs for job in jobs if job.config is not None), None)
    if runs is not None:
        place = "multirun" if runs == RunConfig().runs else runs
        _claim(Path(place) / time.strftime("%Y-%m-%d_%H-%M-%S"), jobs)
    return jobs


def _compose(jobs: Sequence[SweepJob], combinations: Sequence[Sequence[str]], folders: Sequence[Path]) -> None:
    """Every job's config, or why it cannot run."""
    for job, made in zip(jobs, compose_together(combinations, folders, VERB, check_trainable), strict=True):
        job.config, job.error, job.passed_over = made.config, made.error, made.passed_over
        job.state = "not started" if made.error is None else "failed"


def _claim(parent: Path, jobs: Sequence[SweepJob]) -> None:
    """Make the sweep's folder; a second sweep started in the same second gets the next free name."""
    parent.parent.mkdir(parents=True, exist_ok=True)
    name, tries = parent, 1
    while True:
        try:
            name.mkdir()
            break
        except FileExistsError:
            tries += 1
            name = parent.with_name(f"{parent.name}_{tries}")
    for job in jobs:
        if job.config is not None:
            job.config = replace(job.config, runs=str(name), name=str(job.number))
            job.folder = name / str(job.number)


def _train(verb: str, job: SweepJob) -> int:
    """Run one job; 0, or the exit code when a signal stopped it (and the sweep with it)."""
    assert job.config is not None
    try:
        stopped = launch(Job(verb, job.config), perform, run_rank, own_process=True)
        job.state = "interrupted" if stopped and not _has_ended(job) else "finished"
        return stopped
    except KeyboardInterrupt:  # before the launcher took over signals
        job.state = "interrupted"
        return 130
    except HetrainError as error:
        job.error, job.state = error, "failed"
        print(f"job {job.number} ({_label(job)}) failed: {error}", file=sys.stderr)
        return 0


def _has_ended(job: SweepJob) -> bool:
    """Whether the job got to its end: a signal may come when all is done."""
    summary = _summary(job)
    return summary is not None and not summary.get("interrupted")


def _summary(job: SweepJob) -> dict[str, Any] | None:
    from hetrain.training.run_folder import read_summary  # imports torch

    return None if job.folder is None else read_summary(job.folder)


def _label(job: SweepJob) -> str:
    return " ".join(f"{key}={value}" for key, value in job.swept.items()) or "no swept key"


def _figures(job: SweepJob) -> list[str]:
    """The job's numbers as text, "-" where there is none: an interrupted job's would pass for its final ones."""
    summary = _summary(job) if job.state == "finished" else None
    if summary is None:
        return ["-"] * len(FIGURES)
    cache = summary.get("cache") or {}
    forms = {
        "auc": (summary.get("auc"), "{:.4f}"),
        "logloss": (summary.get("logloss"), "{:.4f}"),
        "examples/s": (summary.get("examples_per_s"), "{:,.0f}"),
        "bytes": ((summary.get("bytes") or {}).get("total"), "{:,.0f}"),
        "hit rate": (cache.get("hit_rate"), "{:.1%}"),
        "staleness": (summary.get("observed_staleness_max"), "{:.0f}"),
    }
    return ["-" if forms[name][0] is None else forms[name][1].format(forms[name][0]) for name in FIGURES]


def _report(jobs: Sequence[SweepJob]) -> None:
    """The table, the failed jobs by name, and the same table as multirun/.../results.csv."""
    head = ["job", *jobs[0].swept, "state", *FIGURES]
    rows = [[str(job.number), *job.swept.values(), job.state, *_figures(job)] for job in jobs]
    print()
    show(head, rows)
    folders = [job.folder.parent for job in jobs if job.folder is not None]
    if folders:
        with (folders[0] / "results.csv").open("w", newline="") as file:
            csv.writer(file).writerows([head, *rows])
        print(f"\nfolders: {folders[0]}/JOB")
    for job in jobs:
        if job.error is not None:
            print(f"failed: job {job.number} ({_label(job)}): {job.error}", file=sys.stderr)
