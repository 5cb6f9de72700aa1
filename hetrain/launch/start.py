"""Starts a run's processes, or joins those that torchrun or Slurm started, and brings back the cause of a failure.

Workers on the CPU are forked from a server that imports torch and TorchRec once, while this process imports the
launcher: two workers are ready in the time of one import.
"""

import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import active_children, forkserver
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from hetrain.errors import ConfigError
from hetrain.launch import failures, last_rank
from hetrain.launch.job import Job
from hetrain.launch.job_folder import job_folder
from hetrain.launch.last_rank import LastRank
from hetrain.launch.rank_environment import (
    RankEnvironment,
    check_machines,
    check_room,
    check_slow_ranks,
    read_environment,
)
from hetrain.launch.restart import Restarts
from hetrain.roles import Roles
from hetrain.stop_signals import catch, restore

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

STOP_FILE = "stop"
SHUTDOWN_S = 30  # for the other ranks to end after one failed

# Does the job on this rank; returns the number of the signal that stopped it, or 0.
Perform = Callable[[Job, RankEnvironment], int]
Worker = Callable[[str], int | None]  # as Perform, for the job in the file at this path


def launch(job: Job, perform: Perform, worker: Worker, own_process: bool = False) -> int:
    """Do `job` on all its processes and return the exit code: 0, or 128 + the signal that stopped it.

    own_process: start a process even for one rank, so that a failed job leaves nothing behind (sweeps).
    Raises RankError with the failing rank's own error.
    """
    # Read when torch is loaded. By default compute threads spin for milliseconds between operations: on a machine that
    # does anything else two threads then wait for each other's time slices. Not to spin at all halves the speed of an
    # idle machine. Some microseconds serve both (docs/decisions.md).
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    environment = read_environment(os.environ)
    restarts = job.config.launch.max_restarts if job.verb == "train" else 0
    if environment is not None:
        if restarts:
            raise ConfigError(
                f"launch.max_restarts={restarts}: expected 0 under torchrun or srun, which alone can start their "
                f"processes again.\n  `torchrun --max-restarts {restarts} ...` does; name=NAME says which run goes on."
            )
        return _here(job, environment, perform)
    if job.config.launch.nproc != 1 or job.config.cluster.servers or own_process or restarts:
        return _local(job, worker)
    return _here(job, RankEnvironment(), perform)


def _here(job: Job, environment: RankEnvironment, perform: Perform) -> int:
    stopped = perform(job, environment)
    return 128 + stopped if stopped else 0


def _local(job: Job, worker: Worker) -> int:
    servers = job.config.cluster.servers
    check_room(job.config.launch, (job.config.launch.nproc or 1) + servers, servers)
    cpu = job.config.launch.device == "cpu" or not Path("/dev/nvidiactl").exists()
    if cpu:  # a forked process cannot use a CUDA library that its parent has touched
        _start_server()
    import torch

    from hetrain.launch.process import no_cuda_device

    workers = job.config.launch.nproc or (0 if cpu else torch.cuda.device_count()) or 2
    roles = Roles(workers + servers, servers)
    if job.config.launch.device == "cuda" and not torch.cuda.is_available():
        raise no_cuda_device()
    if job.verb == "train":
        check_slow_ranks(job.config.launch, roles)
        check_machines(job.config.cluster, roles)
    with job_folder() as name, _stop_forwarded(Path(name)) as stopped:
        settings = _settings(roles.world_size, Path(name), "forkserver" if cpu else "spawn")
        restarts = Restarts(job)
        while True:
            try:
                return _once(job, worker, settings, Path(name), roles, stopped)
            except failures.RankError as error:
                if stopped:
                    raise
                job = restarts.after(error)
                failures.forget(Path(name))
                last_rank.forget(Path(name))


def _once(
    job: Job, worker: Worker, settings: "LaunchConfig", folder: Path, roles: Roles, stopped: Sequence[int]
) -> int:
    """Start all ranks and wait for them; the exit code. Raises RankError. `stopped`: the signals caught so far."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    path = folder / "job.json"
    job.write(path)
    logging.disable(logging.CRITICAL)  # the failing rank's own error is shown in place of the launcher's reports
    try:
        with LastRank(folder, job.config.launch.timeout_s) as last:
            results = elastic_launch(settings, worker)(str(path))
    except ChildFailedError as error:
        if last.killed and not any(folder.glob("rank*.json")):
            raise failures.not_ended(last.killed, roles, job.config.launch.timeout_s, _complete(job)) from None
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        told = any(folder.glob("rank*.json"))
        if told or not stopped:
            raise failures.cause(folder, roles, codes, _goes_on(job)) from None
        print("hetrain: interrupted", file=sys.stderr)  # a training that has begun says what it saved
        return 128 + stopped[0]
    finally:
        logging.disable(logging.NOTSET)
    # A signal that came when there was nothing left to train has stopped nothing.
    number = max((result or 0 for result in results.values()), default=0)
    return 128 + (stopped[0] if stopped else number) if number else 0


def _complete(job: Job) -> str:
    """What is there all the same, where the ranks came to the end of a training."""
    from hetrain.training.run_folder import has_ended

    folder = Path(job.config.runs) / str(job.config.name)
    return f" The run is complete: {folder}/summary.json." if job.verb == "train" and has_ended(folder) else ""


def _goes_on(job: Job) -> str:
    """What to do after a process died."""
    if job.verb != "train" or job.config.checkpoint.resume == "never":
        return ""
    from hetrain.checkpoint import newest
    from hetrain.training.run_folder import CHECKPOINTS

    again = f"\n  Started again with name={job.config.name}, the run"
    if newest(Path(job.config.runs) / str(job.config.name) / CHECKPOINTS) is None:
        return f"{again} begins anew: it has no checkpoint yet (checkpoint.every=N saves one every N steps)."
    return f"{again} goes on from its last checkpoint."


def _settings(processes: int, folder: Path, start_method: str) -> "LaunchConfig":
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=folder.name,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",  # any free port: several runs share a machine
        local_addr="127.0.0.1",  # the host's name may not resolve
        max_restarts=0,  # its restarts ask neither why nor from where: ours do
        start_method=start_method,
        signals_to_handle="SIGUSR2",  # its handlers kill workers after 30 s; ours let them save
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "elastic")),
        shutdown_timeout=SHUTDOWN_S,
    )


def _start_server() -> None:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # When this process is killed with -9, the tracker of semaphores removes what was left, and need not say so.
    ours, theirs = "ignore:resource_tracker", os.environ.get("PYTHONWARNINGS")
    if theirs is None or ours not in theirs:
        os.environ["PYTHONWARNINGS"] = f"{theirs},{ours}" if theirs else ours
    forkserver.set_forkserver_preload(["hetrain.launch.preload"])
    forkserver.ensure_running()


@contextmanager
def _stop_forwarded(folder: Path) -> Iterator[list[int]]:
    """While open, the first stop signal is passed on to the workers, which save and exit; a second one kills them.

    Yields the list of signals caught. Workers get SIGINT whatever came: a SIGTERM that a supervisor sends to every
    process then is the first of its kind to them too, and not a second one that ends them at once.
    """
    caught: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        caught.append(number)
        (folder / STOP_FILE).touch()
        for child in active_children():
            if child.pid is not None:
                os.kill(child.pid, signal.SIGINT if len(caught) == 1 else signal.SIGKILL)

    before = catch(forward)
    try:
        yield caught
    finally:
        restore(before)
