"""A real training whose ranks are killed at given steps, for tests of restarts.

Usage: python -m tests.launch.dying_runs CONFIG DEATHS. CONFIG is a file; DEATHS is as in 1@7,0@9: in the first try
rank 1 is killed while it takes step 7, in the second rank 0 while it takes step 9, and in the third nobody.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from hetrain.config import RunConfig
from hetrain.config.compose import from_yaml
from hetrain.errors import HetrainError
from hetrain.launch.job import Job
from hetrain.launch.start import launch
from hetrain.launch.worker import perform, run_rank

DEATHS = "HETRAIN_TEST_DEATHS"


def dies(path: str) -> int:
    """`run_rank`, on a rank that may be the next to die; the dead leave notes beside the job."""
    from hetrain import build

    died = len(list(Path(path).parent.glob("died*")))
    rank, at = (int(number) for number in [*os.environ[DEATHS].split(","), "-1@0"][died].split("@"))
    make = build.build

    def built(*arguments: Any) -> Any:
        trainer = make(*arguments)
        step = trainer.setup.engine.step

        def counted(batches: Any) -> Any:
            if trainer.step + 1 == at and trainer.setup.ranks.rank == rank:
                (Path(path).parent / f"died{died}").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return step(batches)

        trainer.setup.engine.step = counted
        return trainer

    with mock.patch.object(build, "build", built):
        return run_rank(path)


def main() -> None:
    config: RunConfig = from_yaml(Path(sys.argv[1]).read_text())
    os.environ[DEATHS] = sys.argv[2]
    try:
        sys.exit(launch(Job("train", config), perform, dies))
    except HetrainError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    import tests.launch.dying_runs

    tests.launch.dying_runs.main()
