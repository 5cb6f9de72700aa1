"""One rank's work for a verb. The launcher calls `run_rank` in each process it starts.

Slow imports stay inside functions: the launching process names these functions but never runs them.
"""

import os
import signal
import sys
from pathlib import Path

from hetrain.launch import failures
from hetrain.launch.job import Job
from hetrain.launch.last_rank import note_begun, note_done
from hetrain.launch.orphans import end_with_parent
from hetrain.launch.quiet import quiet_third_parties, show_our_own
from hetrain.launch.rank_environment import (
    RankEnvironment,
    check_machines,
    check_slow_ranks,
    read_environment,
    roles_of,
)
from hetrain.launch.start import STOP_FILE


def run_rank(path: str) -> int:
    """`perform` the job in file `path` as one of the launcher's processes; leave a record beside it on failure."""
    end_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the server we were forked from ignores it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    quiet_third_parties()
    folder = Path(path).parent
    environment = read_environment(os.environ)
    assert environment is not None, "the launcher sets RANK"
    places: list[str] = []
    note_begun(folder, environment.rank)
    try:
        if (folder / STOP_FILE).exists():
            sys.exit(128 + signal.SIGINT)
        job = Job.read(Path(path))
        places = job.places
        stopped = perform(job, environment)
        note_done(folder, environment.rank)
        return stopped
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except Exception as error:  # noqa: BLE001 - the launcher shows it
        failure = failures.describe(environment.rank, error, places)
        failures.leave(folder, failure)
        sys.exit(failure.exit_code)


def perform(job: Job, environment: RankEnvironment) -> int:
    """Do `job` on this rank; the number of the signal that stopped it, or 0."""
    from hetrain import build
    from hetrain.config.model_target import check_model
    from hetrain.launch.process import process_group
    from hetrain.launch.versions import check_versions

    show_our_own()
    check_versions()
    check_model(job.config.model)
    if job.verb == "train":
        roles = roles_of(environment, job.config.cluster.servers)
        check_slow_ranks(job.config.launch, roles)
        check_machines(job.config.cluster, roles)
    with process_group(job.config.launch, environment, job.config.cluster.servers) as (ranks, device):
        job = ranks.gather(job)[0]  # rank 0's: ranks started apart may have chosen different run names
        if job.verb == "train":
            reason = build.build(job.config, ranks, device, job.restarts).run()["stop_reason"]
            return int(signal.Signals[reason]) if reason.startswith("SIG") else 0
        if job.verb == "calibrate":
            from hetrain.engine.bag_step import bag_step
            from hetrain.planner.calibrate import calibrate

            calibrate(ranks, device, Path(job.options["out"]), bag_step)
        elif job.verb == "eval":
            build.evaluate_run(job.config, job.options, ranks, device)
        else:
            build.predict_run(job.config, job.options, ranks, device)
        return 0
