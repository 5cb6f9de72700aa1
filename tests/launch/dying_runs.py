"""A real training whose ranks are killed at given steps, for tests of restarts.

Usage: python -m tests.launch.dying_runs CONFIG DEATHS. CONFIG is a file; DEATHS is as in 1@7,0@9: in the first try
rank 1 is killed while it takes step 7, in the second rank 0 while it takes step 9, and in the third nobody. Where ranks
step at their own pace the count may pass by a step: then it is the next that this rank takes; a server takes none and
counts those of the checkpoint before.

Every rank writes down what it trains, in the run folder's `.trained_R`: a line per batch with the step this try began
at, the step saved last and a fingerprint of every example.
"""

import hashlib
import json
import os
import signal
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from hetrain.config import RunConfig
from hetrain.config.compose import from_yaml
from hetrain.data.batch import Batch
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
        step, here = trainer.setup.engine.step, trainer.setup.ranks.rank
        start = trainer.step
        taken: deque[Batch] = deque()  # begun, not trained yet
        watch = trainer.guard.watch
        trainer.guard.watch = lambda batches: _noted(watch(batches), taken)

        def counted(batches: Any) -> Any:
            if trainer.step + 1 >= at and here == rank:
                (Path(path).parent / f"died{died}").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            out = step(batches)
            if out is not None:
                line = {"start": start, "saved": trainer.last_saved, "examples": _fingerprints(taken.popleft())}
                with (trainer.setup.folder / f".trained_{here}").open("a") as file:
                    file.write(json.dumps(line) + "\n")
            return out

        trainer.setup.engine.step = counted
        return trainer

    with mock.patch.object(build, "build", built):
        return run_rank(path)


def _noted(batches: Iterator[Batch], taken: deque[Batch]) -> Iterator[Batch]:
    for batch in batches:
        taken.append(batch)
        yield batch


def _fingerprints(batch: Batch) -> list[str]:
    ids = batch.sparse.values().view(len(batch.sparse.keys()), batch.size).T  # [B, F]: the sample has one id per column
    parts = (batch.dense.numpy(), ids.numpy(), batch.labels.view(-1, 1).numpy())
    return [
        hashlib.sha256(b"".join(part.tobytes() for part in example)).hexdigest() for example in zip(*parts, strict=True)
    ]


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
