"""Which ends of a launch are followed by another try, and what the user sees of it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hetrain.config import LaunchConfig
from hetrain.errors import CheckpointError, ConfigError, LostPeerError, SilentPeerError, TrainingError
from hetrain.launch import failures
from hetrain.launch.last_rank import LastRank, note_begun
from hetrain.launch.rank_environment import check_slow_ranks
from hetrain.roles import Roles
from tests.launch.fake_workers import FOLDER
from tests.launch.test_launch import ROOT, finish, until, worker_pids

AT_THE_START = "goes on from step 0: there is no checkpoint\n"


def start(worker: str, folder: Path, *numbers: float) -> "subprocess.Popen[str]":
    """Two ranks of a fake worker. `numbers`: launch.max_restarts and launch.timeout_s."""
    command = [sys.executable, "-m", "tests.launch.fake_workers", worker, "2", *map(str, numbers)]
    env = {**os.environ, FOLDER: str(folder)}
    return subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True)


@pytest.mark.parametrize(
    ("worker", "what"),
    [
        ("killed_once", "rank 1 was killed from outside"),
        ("defect_once", "rank 1 failed (ZeroDivisionError: a defect)"),
    ],
)
def test_one_line_says_what_died_and_where_it_goes_on(tmp_path: Path, worker: str, what: str) -> None:
    code, error = finish(start(worker, tmp_path, 1))
    ours = "".join(line for line in error.splitlines(True) if "ProcessGroupGloo.cpp" not in line)  # gloo's own log
    assert (code, ours) == (0, f"hetrain: {what}; restart 1 of 1 {AT_THE_START}")


def test_a_rank_that_does_not_answer_is_ended_and_started_again(tmp_path: Path) -> None:
    code, error = finish(start("stopped_once", tmp_path, 1, 10))
    assert code == 0, error
    assert f"hetrain: rank 1 did not answer for launch.timeout_s; restart 1 of 1 {AT_THE_START}" in error


def test_a_rank_that_does_not_end_is_ended_in_time(tmp_path: Path) -> None:
    code, error = finish(start("stopped_at_the_end", tmp_path, 0, 2))
    assert code == TrainingError.exit_code
    what = "rank 1 did not end for launch.timeout_s=2 after the others had done their part, and had to be killed"
    assert error == f"{what}: stopped, or stuck.\n"


def test_only_ranks_that_do_nothing_are_ended(tmp_path: Path) -> None:
    """One that computes may still be writing its last file; a process of the same number may be another's."""
    last, long_ago = LastRank(tmp_path, 1), time.monotonic() - 100
    note_begun(tmp_path, 0)
    ours = (tmp_path / "pid0").read_text()
    stopped, waiting = subprocess.Popen(["sleep", "100"]), subprocess.Popen(["sleep", "100"])
    stopped.send_signal(signal.SIGSTOP)
    until(lambda: stat_of(stopped.pid)[0] == "T")
    others = {1: f"{stopped.pid} {stat_of(stopped.pid)[19]}", 2: f"{waiting.pid} {stat_of(waiting.pid)[19]}"}
    last._marks |= {0: (long_ago, 0.0), 1: (long_ago, 0.0), 2: (long_ago, 0.0)}
    last._look({0: ours, 1: f"{stopped.pid} 1"})
    assert last._marks[0][0] > long_ago
    assert last.killed == []
    last._done = {0}
    last._look({0: ours, **others})
    assert (stopped.wait(10), waiting.poll(), last.killed) == (-signal.SIGKILL, None, [1])
    last._look({0: ours, **others})
    assert (waiting.wait(10), last.killed) == (-signal.SIGKILL, [1, 2])


def stat_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def test_no_more_often_than_asked(tmp_path: Path) -> None:
    code, error = finish(start("killed", tmp_path, 2))
    lines = error.splitlines()
    assert code == 1
    assert [f"restart {n} of 2 goes on from step 0" in line for n, line in enumerate(lines[:2], 1)] == [True, True]
    assert lines[2].startswith("rank 1 was killed from outside, most often")
    assert lines[-1] == "  launch.max_restarts=2: no restart is left."
    assert error.count("restart ") == 3


def test_the_users_mistake_is_not_tried_again_and_no_earlier_death_hides_it(tmp_path: Path) -> None:
    code, error = finish(start("user_error", tmp_path, 3))
    assert (code, error) == (3, "day_0.tsv, line 7: 12 columns, expected 40\n")
    code, error = finish(start("killed_then_user_error", tmp_path, 3))
    assert code == 3
    assert error.splitlines()[0].startswith("hetrain: rank 1 was killed from outside; restart 1 of 3")
    assert error.splitlines()[1:] == ["day_0.tsv, line 7: 12 columns, expected 40"]


def test_a_signal_stops_what_was_started_again(tmp_path: Path) -> None:
    process = start("killed_then_waits", tmp_path, 1)
    worker_pids(tmp_path)  # those of the second try: in the first one no rank got so far
    process.send_signal(signal.SIGTERM)
    code, error = finish(process)
    assert code == 143
    assert error.count("\n") == 1
    assert (tmp_path / "saved1").exists()


def cause(folder: Path, *told: tuple[int, Exception]) -> failures.RankError:
    failures.forget(folder)
    for rank, error in told:
        failures.leave(folder, failures.describe(rank, error))
    return failures.cause(folder, Roles(3), {rank: 1 for rank, _ in told})


def test_what_may_pass(tmp_path: Path) -> None:
    lost = (0, LostPeerError("gave up waiting for rank 2"))
    everyone = [(rank, SilentPeerError(f"rank {rank} waited in vain.\n  More")) for rank in range(3)]
    assert cause(tmp_path, lost).may_pass
    assert cause(tmp_path, *everyone).may_pass
    assert cause(tmp_path, *everyone).what == "rank 0: rank 0 waited in vain."
    assert cause(tmp_path, lost, (1, RuntimeError("CUDA error: an illegal memory access"))).may_pass
    for error in (ConfigError("a key"), CheckpointError("damaged"), TrainingError("loss"), OSError(28, "full", "file")):
        assert not cause(tmp_path, lost, (1, error)).may_pass
    failures.forget(tmp_path)
    assert failures.cause(tmp_path, Roles(2, 1), {1: -11}).what == "server rank 1 was ended by SIGSEGV"


def test_a_wait_in_vain_is_told_without_a_traceback(tmp_path: Path) -> None:
    """gloo's own errors are RuntimeErrors; that the rank which did not answer is known makes them no defect."""
    with pytest.raises(RuntimeError) as gloo:
        raise RuntimeError("[gloo/unbound_buffer.cc:129] Timed out waiting 20000ms for send operation to complete")
    found = cause(tmp_path, (0, gloo.value), (2, LostPeerError("lost rank 0")))
    text = str(found)
    assert text.startswith("rank 1 did not answer for launch.timeout_s and had to be ended")
    assert text.endswith(f"rank 0 says: RuntimeError: {gloo.value}")
    assert found.may_pass
    assert found.exit_code == TrainingError.exit_code
    everyone = [(rank, gloo.value) for rank in range(3)]
    text = str(cause(tmp_path, *everyone))
    assert text == f"rank 0 waited in vain for another rank: RuntimeError: {gloo.value}."


def test_only_workers_are_slowed_down() -> None:
    check_slow_ranks(LaunchConfig(slow_ranks={0: 2.0, 1: 3.0}), Roles(3, 1))
    with pytest.raises(ConfigError, match=r"launch\.slow_ranks=\{2: 3\.0\}: expected .* 0 to 1 in this run\. Leave 2"):
        check_slow_ranks(LaunchConfig(slow_ranks={2: 3.0}), Roles(3, 1))


def test_without_a_checkpoint_the_run_begins_anew_under_its_name(tmp_path: Path) -> None:
    code, error = finish(start("killed_once", tmp_path, 0))
    assert code == 1
    assert "the run begins anew: it has no checkpoint yet (checkpoint.every=N saves one every N steps)." in error
