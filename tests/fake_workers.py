"""Workers that fail or wait in the ways real ones do, for the launcher's tests. Run as `python -m tests.fake_workers`.

Usage: python -m tests.fake_workers WORKER NPROC [FOLDER]
"""

import os
import signal
import sys
import time
from pathlib import Path

from hetrain import failures
from hetrain.call import Call
from hetrain.config import RunConfig
from hetrain.errors import DataError, HetrainError
from hetrain.launch import launch
from hetrain.orphans import end_with_parent
from hetrain.place import joined
from hetrain.process import process_group

FOLDER = "HETRAIN_TEST_FOLDER"
MODEL = {"_target_": "hetrain.models.WDL", "embedding_dim": 16}


def _as_rank(path: str, work):  # type: ignore[no-untyped-def]
    """What hetrain.worker.run_rank does around the work."""
    end_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    place = joined(os.environ)
    assert place is not None
    try:
        with process_group(Call.read(Path(path)).config.launch, place):
            work(place.rank)
    except Exception as error:  # noqa: BLE001
        failure = failures.describe(place.rank, error)
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


def waits(path: str) -> None:
    """Writes its process id, then saves when stopped, which takes a second."""

    def work(rank: int) -> None:
        folder = Path(os.environ[FOLDER])
        stopped: list[int] = []
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda caught, frame: stopped.append(caught))
        (folder / f"pid{rank}").write_text(str(os.getpid()))
        while not stopped:
            time.sleep(0.02)
        time.sleep(1)
        (folder / f"saved{rank}").touch()

    _as_rank(path, work)


def main() -> None:
    name, nproc = sys.argv[1], int(sys.argv[2])
    config = RunConfig(model=dict(MODEL))
    config.launch.nproc = nproc
    config.launch.device = "cpu"
    try:
        sys.exit(launch(Call("train", config), lambda call, place: 0, getattr(sys.modules["tests.fake_workers"], name)))
    except HetrainError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    import tests.fake_workers

    tests.fake_workers.main()
