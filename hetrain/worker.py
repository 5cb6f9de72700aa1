"""One rank's work for a verb. The launcher calls `run_rank` in each process it starts.

Slow imports stay inside functions: the launching process names these functions but never runs them.
"""

import os
import signal
import sys
from pathlib import Path

from hetrain import failures
from hetrain.call import Call
from hetrain.launch import STOP_FILE
from hetrain.orphans import end_with_parent
from hetrain.place import Place, joined
from hetrain.quiet import quiet_third_parties, show_our_own


def run_rank(path: str) -> None:
    """Perform the call in file `path` as one of the launcher's processes; leave a record beside it on failure."""
    end_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the server we were forked from ignores it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    quiet_third_parties()
    folder = Path(path).parent
    place = joined(os.environ)
    assert place is not None, "the launcher sets RANK"
    try:
        if (folder / STOP_FILE).exists():
            sys.exit(128 + signal.SIGINT)
        perform(Call.read(Path(path)), place)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except Exception as error:  # noqa: BLE001 - the launcher shows it
        failure = failures.describe(place.rank, error)
        failures.leave(folder, failure)
        sys.exit(failure.exit_code)


def perform(call: Call, place: Place) -> int:
    """Do `call` on this rank; the number of the signal that stopped it, or 0."""
    from hetrain import build
    from hetrain.model_target import check_model
    from hetrain.process import process_group
    from hetrain.versions import check_versions

    show_our_own()
    check_versions()
    check_model(call.config.model)
    with process_group(call.config.launch, place) as (ranks, device):
        call = ranks.gather(call)[0]  # rank 0's: ranks started apart may have chosen different run names
        if call.verb == "train":
            reason = build.build(call.config, ranks, device).run()["stop_reason"]
            return signal.Signals[reason] if reason.startswith("SIG") else 0
        if call.verb == "eval":
            build.evaluate_run(call.config, call.options, ranks, device)
        else:
            build.predict_run(call.config, call.options, ranks, device)
        return 0
