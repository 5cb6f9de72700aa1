"""The far end of a contender that lives in a process of its own: one window per line read. Standard library only."""

import json
import sys
import time
from collections.abc import Callable

from quiet import Stopwatch, Window

WARM_STEPS = 5
ANSWER = "ANSWER "


def serve(window: Callable[[float], Window]) -> None:
    """Say ready, then answer each line {"seconds": s} with a window of about that length, until input ends.

    Answers begin with ANSWER; other lines are what the contender itself prints.
    """
    print(ANSWER + "{}", flush=True)
    for line in sys.stdin:
        print(ANSWER + json.dumps(window(json.loads(line)["seconds"]).as_dict()), flush=True)


def repeated(step: Callable[[], int]) -> Callable[[float], Window]:
    """Windows of a step that returns its number of examples."""

    def window(seconds: float) -> Window:
        for _ in range(WARM_STEPS):
            step()
        watch, end, examples = Stopwatch(), time.perf_counter() + seconds, 0
        while time.perf_counter() < end:
            examples += step()
        return watch.stop(examples)

    return window
