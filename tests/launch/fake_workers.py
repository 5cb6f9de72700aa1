"""Workers that fail or wait in the ways real ones do, for the launcher's tests.

Usage: python -m tests.launch.fake_workers WORKER NPROC [MAX_RESTARTS [TIMEOUT_S]]
"""

import os
import signal
import sys
import time
from pathlib import Path

from hetrain.config import RunConfig
from hetrain.errors import DataError, HetrainError
from hetrain.launch import failures
from hetrain.launch.job import Job
from hetrain.launch.last_rank import note_begun, note_done
from hetrain.launch.orphans import end_with_parent
from hetrain.launch.process import process_group
from hetrain.launch.rank_environment import read_environment
from hetrain.launch.start import launch

FOLDER = "HETRAIN_TEST_FOLDER"
MODEL = {"_target_": "hetrain.models.WDL", "embedding_dim": 16}


def _as_rank(path: str, work):  # type: ignore[no-untyped-def]
    """What hetrain.launch.worker.run_rank does around the work."""
    end_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    environment = read_environment(os.environ)
    assert environment is not None
    try:
        with process_group(Job.read(Path(path)).config.launch, environment):
            return work(environment.rank)
    except Exception as error:  # noqa: BLE001
        failure = failures.describe(environment.rank, error)
        failures.leave(Path(path).parent, failure)
        sys.exit(failure.exit_code)


def _barrier() -> None:
    import torch.distributed as dist

    dist.barrier()


def good(path: str) -> None:
    _as_rank(path, lambda rank: _barrier())


def user_error(path: str) -> None:
    def work(rank: int) -> None:
        if rank == 1:
            raise DataError("day_0.tsv, line 7: 12 columns, expected 40")
        _barrier()

    _as_rank(path, work)


def defect(path: str) -> None:
    def work(rank: int) -> None:
        if rank == 1:
            raise ZeroDivisionError("a defect")
        _barrier()

    _as_rank(path, work)


def killed(path: str) -> None:
    def work(rank: int) -> None:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        _barrier()

    _as_rank(path, work)


def _first_time() -> bool:
    """Whether rank 1 is here for the first time, which it leaves a note of."""
    try:
        (Path(os.environ[FOLDER]) / "tried").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def killed_once(path: str) -> None:
    def work(rank: int) -> None:
        if rank == 1 and _first_time():
            os.kill(os.getpid(), signal.SIGKILL)
        _barrier()

    _as_rank(path, work)


def killed_then_user_error(path: str) -> None:
    def work(rank: int) -> None:
        if rank == 1 and _first_time():
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1:
            raise DataError("day_0.tsv, line 7: 12 columns, expected 40")
        _barrier()

    _as_rank(path, work)


def defect_once(path: str) -> None:
    def work(rank: int) -> None:
        if rank == 1 and _first_time():
            raise ZeroDivisionError("a defect")
        _barrier()

    _as_rank(path, work)


def stopped_once(path: str) -> None:
    """Is there and does not answer."""

    def work(rank: int) -> None:
        if rank == 1 and _first_time():
            os.kill(os.getpid(), signal.SIGSTOP)
        _barrier()

    _as_rank(path, work)


def stopped_at_the_end(path: str) -> None:
    """Has done its part, as all others have, and does not end."""
    end_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    rank, folder = int(os.environ["RANK"]), Path(path).parent
    note_begun(folder, rank)
    note_done(folder, rank)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)


def killed_then_waits(path: str) -> int | None:
    if os.environ["RANK"] == "1" and _first_time():
        os.kill(os.getpid(), signal.SIGKILL)
    return waits(path)


def waits(path: str) -> int:
    """Writes its process id, then saves when stopped, which takes a second; returns the signal's number."""

    def work(rank: int) -> int:
        folder = Path(os.environ[FOLDER])
        stopped: list[int] = []
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda caught, frame: stopped.append(caught))
        (folder / f"pid{rank}").write_text(str(os.getpid()))
        while not stopped:
            time.sleep(0.02)
        time.sleep(1)
        (folder / f"saved{rank}").touch()
        return stopped[0]

    return _as_rank(path, work)


def waits_and_finishes(path: str) -> None:
    """Is stopped when nothing is left to do."""
    waits(path)


def main() -> None:
    name, nproc = sys.argv[1], int(sys.argv[2])
    config = RunConfig(model=dict(MODEL), name="fake", runs=os.environ[FOLDER])
    config.launch.nproc = nproc
    config.launch.device = "cpu"
    config.launch.max_restarts = int(sys.argv[3]) if len(sys.argv) > 3 else 0
    config.launch.timeout_s = float(sys.argv[4]) if len(sys.argv) > 4 else config.launch.timeout_s
    try:
        sys.exit(
            launch(
                Job("train", config),
                lambda job, environment: 0,
                getattr(sys.modules["tests.launch.fake_workers"], name),
            )
        )
    except HetrainError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    import tests.launch.fake_workers

    tests.launch.fake_workers.main()
