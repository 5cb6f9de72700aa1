"""The launcher on real processes: whose error is shown, what a signal does, who is left behind."""

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hetrain.config import LaunchConfig
from hetrain.errors import CheckpointError, ConfigError, DataError, LostPeerError, TrainingError
from hetrain.launch import failures
from hetrain.launch.job_folder import LOCK, job_folder
from hetrain.launch.process import device_of
from hetrain.launch.rank_environment import RankEnvironment, check_room, first_host, read_environment, roles_of
from hetrain.roles import Roles
from tests.launch.fake_workers import FOLDER

ROOT = Path(__file__).resolve().parent.parent.parent
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


def start(worker: str, folder: Path, nproc: int = 2) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "tests.launch.fake_workers", worker, str(nproc)]
    env = {**os.environ, FOLDER: str(folder)}
    return subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True)


def finish(process: "subprocess.Popen[str]") -> tuple[int, str]:
    _, error = process.communicate(timeout=120)
    return process.returncode, error


def until(condition: Callable[[], bool], timeout_s: float = 60) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def worker_pids(folder: Path, nproc: int = 2) -> list[int]:
    files = [folder / f"pid{rank}" for rank in range(nproc)]
    until(lambda: all(file.exists() and file.read_text() for file in files))
    return [int(file.read_text()) for file in files]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_all_ranks_good(tmp_path: Path) -> None:
    assert finish(start("good", tmp_path)) == (0, "")


def test_user_error_of_a_rank_is_all_that_is_shown(tmp_path: Path) -> None:
    code, error = finish(start("user_error", tmp_path))
    assert code == DataError.exit_code
    assert error == "day_0.tsv, line 7: 12 columns, expected 40\n"


def test_a_rank_is_named_only_for_what_may_be_its_own(tmp_path: Path) -> None:
    for error, rank in [(CheckpointError("no checkpoint"), ""), (TrainingError("loss is nan"), "\n  (rank 1)")]:
        failures.leave(tmp_path, failures.describe(1, error))
        assert str(failures.cause(tmp_path, Roles(2), {0: -15, 1: error.exit_code})) == f"{error}{rank}"


def test_defect_shows_the_failing_ranks_traceback(tmp_path: Path) -> None:
    code, error = finish(start("defect", tmp_path))
    assert code == 1
    ours = "\n".join(line for line in error.splitlines() if "ProcessGroupGloo.cpp" not in line)  # gloo's own log
    assert ours.startswith("rank 1 failed. This is a defect")
    assert error.endswith("ZeroDivisionError: a defect\n")
    assert "elastic" not in error
    assert "Connection" not in error


def test_killed_rank_is_named(tmp_path: Path) -> None:
    code, error = finish(start("killed", tmp_path))
    assert code == 1
    assert error.startswith("rank 1 was killed from outside")
    assert "Started again with name=" in error


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_stop_signal_lets_workers_save(tmp_path: Path, number: int, code: int) -> None:
    process = start("waits", tmp_path)
    worker_pids(tmp_path)
    process.send_signal(number)
    assert finish(process) == (code, "")
    assert (tmp_path / "saved0").exists()
    assert (tmp_path / "saved1").exists()


def test_a_run_that_finished_all_the_same_was_not_stopped(tmp_path: Path) -> None:
    process = start("waits_and_finishes", tmp_path)
    worker_pids(tmp_path)
    process.send_signal(signal.SIGINT)
    assert finish(process) == (0, "")


def test_signal_to_the_whole_group_lets_workers_save(tmp_path: Path) -> None:
    process = start("waits", tmp_path)
    pids = worker_pids(tmp_path)
    os.killpg(process.pid, signal.SIGTERM)
    for pid in pids:  # a supervisor signals every process it knows
        os.kill(pid, signal.SIGTERM)
    assert finish(process)[0] == 143
    assert (tmp_path / "saved0").exists()
    assert (tmp_path / "saved1").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")
def test_killed_launcher_leaves_no_orphans(tmp_path: Path) -> None:
    process = start("waits", tmp_path)
    pids = worker_pids(tmp_path)
    process.kill()
    process.wait()
    until(lambda: not any(alive(pid) for pid in pids), 10)
    assert finish(process)[1] == ""  # and no word about its semaphores


def test_the_folder_of_a_killed_launcher_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with job_folder() as running:
        left = tmp_path / "hetrain-left"
        left.mkdir()
        for lock in (left / LOCK, Path(running) / LOCK):
            lock.touch()
            os.utime(lock, (0, 0))
        with job_folder() as name:
            assert {path.name for path in tmp_path.iterdir()} == {Path(running).name, Path(name).name}


def test_two_launches_share_a_machine(tmp_path: Path) -> None:
    processes = [start("good", tmp_path) for _ in range(2)]
    assert [finish(process) for process in processes] == [(0, ""), (0, "")]


def test_environment_from_torchrun() -> None:
    env = {**TORCHRUN, "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
    assert read_environment(env) == RankEnvironment(3, 4, 1, 2, "node1", 29500)
    with pytest.raises(ConfigError, match="MASTER_ADDR and MASTER_PORT are not"):
        read_environment(TORCHRUN)


def test_environment_from_slurm() -> None:
    env = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_NODELIST": "n[03-04,7],gpu1"}
    env |= {"SLURM_JOB_ID": "123", "SLURM_TASKS_PER_NODE": "4(x2)", "SLURM_NODEID": "1"}
    assert read_environment(env) == RankEnvironment(5, 8, 1, 4, "n03", 20_123)


def test_slurm_with_one_task_or_none_starts_local_processes() -> None:
    assert read_environment({"SLURM_NTASKS": "8"}) is None  # inside salloc, not srun
    assert read_environment({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}) is None
    assert read_environment({}) is None


def test_the_last_processes_are_servers() -> None:
    environment = RankEnvironment(3, 4, 1, 2)
    assert roles_of(environment, 3) == Roles(4, 3)
    with pytest.raises(
        ConfigError, match=r"(?s)cluster\.servers=4: expected fewer than the 4 processes .*Start at least 5"
    ):
        roles_of(environment, 4)


def test_only_workers_need_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    roles = Roles(6, 3)  # two machines: workers 0, 1, 2, then servers 3, 4, 5
    devices = [device_of(LaunchConfig(), RankEnvironment(r, 6, r % 3, 3), roles).type for r in range(3, 6)]
    assert devices == ["cpu"] * 3
    assert device_of(LaunchConfig(), RankEnvironment(1, 4, 1, 4), Roles(4, 2)).index == 1
    with pytest.raises(ConfigError, match=r"launch\.nproc=3: this machine has 2 GPU\(s\) and each worker"):
        device_of(LaunchConfig(), RankEnvironment(0, 6, 0, 6), roles)


def test_servers_count_among_a_machines_processes() -> None:
    with pytest.raises(ConfigError, match=r"launch\.nproc and cluster\.servers=9000: 9001 processes"):
        check_room(LaunchConfig(), 9001, 9000)
    with pytest.raises(ConfigError, match=r"launch\.nproc=9001: expected"):
        check_room(LaunchConfig(), 9001)


def test_a_dead_server_is_called_one(tmp_path: Path) -> None:
    failures.leave(tmp_path, failures.describe(0, LostPeerError("gave up waiting for server rank 2")))
    text = str(failures.cause(tmp_path, Roles(3, 1), {0: 1, 1: -15, 2: -9}))
    assert text.startswith("server rank 2 was killed")  # the launcher ended worker 1 for that
    assert "cluster.servers" in text


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("a", "a"), ("a,b", "a"), ("a[1-3]", "a1"), ("a[09,11]b", "a09b"), ("n-1[2]", "n-12"), ("127.0.0.1", "127.0.0.1")],
)
def test_first_host(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


def test_cause_is_not_the_rank_that_lost_its_peer(tmp_path: Path) -> None:
    lost = failures.describe(0, RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:4711"))
    real = failures.describe(1, TrainingError("the loss of step 3 on rank 1 is not finite"))
    failures.leave(tmp_path, lost)
    failures.leave(tmp_path, real)
    found = failures.cause(tmp_path, Roles(2), {0: 1})
    assert "not finite" in str(found)
    assert found.exit_code == TrainingError.exit_code


def test_our_own_error_is_a_cause_whatever_it_quotes(tmp_path: Path) -> None:
    real = failures.describe(0, DataError("data.path=/mnt/store/socket timeout: connection closed"))
    assert not real.lost_peer
    assert failures.describe(1, LostPeerError("gave up waiting for rank 0")).lost_peer
    failures.leave(tmp_path, failures.describe(1, RuntimeError("[gloo/transport/tcp/pair.cc] Read error")))
    failures.leave(tmp_path, real)
    assert "/mnt/store" in str(failures.cause(tmp_path, Roles(2), {0: 3, 1: 1}))


def test_what_the_system_refuses_is_no_defect(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError) as found:
        (tmp_path / "file" / "below").touch()
    failure = failures.describe(0, found.value)
    assert not failure.defect
    assert failure.text.startswith(f"{tmp_path}/file/below: Not a directory.\n")
    assert failures.describe(0, OSError("what our own code raised")).defect
    assert "No space left" in failures.describe(0, OSError(errno.ENOSPC, "full"), [tmp_path]).text


def test_cause_is_a_crash_when_the_others_lost_their_peer(tmp_path: Path) -> None:
    failures.leave(tmp_path, failures.describe(0, RuntimeError("Connection closed by peer")))
    assert "rank 1 was ended by SIGSEGV" in str(failures.cause(tmp_path, Roles(2), {1: -11}))
    assert "rank 1 was killed from outside" in str(failures.cause(tmp_path, Roles(2), {0: 1}))
