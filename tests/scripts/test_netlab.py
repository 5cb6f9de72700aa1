"""scripts/netlab.py on real namespaces: what the kernel counted, what is left behind, what is refused."""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "netlab.py"
sys.path.insert(0, str(SCRIPT.parent))

import netlab  # noqa: E402
import netlab_hosts  # noqa: E402

LEAVE_S = 60.0


def why_no_lab() -> str | None:
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "needs ip and tc (iproute2)"
    probe = f"hetlabprobe{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"no namespaces here: {made.stderr.strip()}"
    tbf = [
        "tc",
        "-n",
        probe,
        "qdisc",
        "add",
        "dev",
        "lo",
        "root",
        "tbf",
        "rate",
        "1mbit",
        "burst",
        "9kb",
        "limit",
        "9kb",
    ]
    capped = subprocess.run(tbf, capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "delete", probe], check=False)
    return f"no tbf here: {capped.stderr.strip()}" if capped.returncode else None


@pytest.fixture(scope="module")
def lab_possible() -> None:
    if reason := why_no_lab():
        pytest.skip(reason)


def job(folder: Path, *overrides: str) -> list[str]:
    """A small training run in `folder`."""
    return [
        "train",
        f"runs={folder / 'runs'}",
        f"data.path={folder / 'sample'}",
        "data.sample.rows=20000",
        "launch.device=cpu",
        "model.hidden=[32]",
        "telemetry.tensorboard=false",
        *overrides,
    ]


def start(folder: Path, options: list[str], arguments: list[str]) -> "subprocess.Popen[str]":
    env = {**os.environ, "TMPDIR": str(folder), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(SCRIPT), *options, "--", *arguments]
    return subprocess.Popen(
        command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def left_of(pid: int) -> list[str]:
    return [name for name in netlab_hosts.namespaces() if name.startswith(f"{netlab_hosts.PREFIX}.{pid}.")]


def until(what, process) -> None:
    """Wait until `what()`; fails when the process ends first."""
    while not what():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)


def long_run(folder: Path, name: str) -> tuple["subprocess.Popen[str]", Path]:
    """A lab whose job goes on until it is stopped, in its first steps."""
    arguments = job(folder, "consistency=het", "train.epochs=100000", f"name={name}", "telemetry.log_every=1")
    process = start(folder, ["--hosts", "2", "--rate", "250mbit"], arguments)
    log = folder / "runs" / name / "metrics.jsonl"
    until(lambda: log.exists() and log.read_text().count("\n") > 3, process)
    return process, folder / "runs" / name


@pytest.mark.usefixtures("lab_possible")
@pytest.mark.parametrize("mode", ["bsp", "het"])
def test_kernel_and_own_bytes_agree(tmp_path, mode):
    arguments = job(tmp_path, f"consistency={mode}", "train.batch_size=128", "train.epochs=2")
    process = start(tmp_path, ["--hosts", "2", "--rate", "1gbit", "--json", "out.json"], arguments)
    out, err = process.communicate()
    assert process.returncode == 0, out + err
    told = json.loads((tmp_path / "out.json").read_text())
    summary = told["summary"]
    ours = summary["bytes"]["total"]
    assert ours > 2e7
    assert 0.98 * ours < summary["kernel_bytes"] < 1.1 * ours
    sent = sum(host["tx_bytes"] for host in told["hosts"])
    assert summary["kernel_bytes"] + 0.9 * summary["bytes_aside"] < sent < 1.15 * (ours + summary["bytes_aside"])
    assert [host["ranks"] for host in told["hosts"]] == [[0], [1]]
    assert {host["rate_bits_per_s"] for host in told["hosts"]} == {10**9}
    assert summary["step_ms"]["p50"] <= summary["step_ms"]["p90"]
    assert summary["examples_per_s_steady"] > 0
    assert "launch.threads=1" in told["job"]
    assert "examples at" in out
    assert not left_of(process.pid)
    assert not list(tmp_path.glob("netlab-*"))


@pytest.mark.usefixtures("lab_possible")
def test_a_failing_job_is_shown_and_leaves_only_its_logs(tmp_path):
    process = start(tmp_path, ["--rate", "none"], ["train", "data=criteo", "data.path=nowhere"])
    _, err = process.communicate()
    assert process.returncode == 3, err
    assert "no prepared data set" in err
    assert "--- rank 1, exit code 3" in err
    assert [path.name for path in tmp_path.glob("netlab-*/*")] == ["rank1.log"]
    assert not left_of(process.pid)


@pytest.mark.usefixtures("lab_possible")
def test_sigterm_saves_and_cleans_up_and_labs_do_not_meet(tmp_path):
    process, folder = long_run(tmp_path, "stopped")
    mine = left_of(process.pid)
    assert len(mine) == 3
    other = start(tmp_path, ["--rate", "none"], ["train", "no.such.key=1"])
    other.communicate()
    assert other.returncode == 2
    assert left_of(process.pid) == mine
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=LEAVE_S)
    assert process.returncode == 128 + signal.SIGTERM, out + err
    assert "stopped by a signal" in out
    assert list((folder / "checkpoints").glob("step_*"))
    assert not left_of(process.pid)


@pytest.mark.usefixtures("lab_possible")
def test_the_next_lab_removes_what_a_killed_one_left(tmp_path):
    process, _ = long_run(tmp_path, "killed")
    left = left_of(process.pid)
    ranks = [int(pid) for name in left for pid in netlab_hosts.command("ip", "netns", "pids", name).split()]
    assert len(ranks) >= 2
    process.kill()
    process.wait()
    assert left_of(process.pid) == left
    end = time.monotonic() + LEAVE_S
    while any(netlab_hosts.started_at(pid) is not None for pid in ranks) and time.monotonic() < end:
        time.sleep(0.05)
    assert not [pid for pid in ranks if netlab_hosts.started_at(pid) is not None]
    netlab_hosts.remove_leftovers()
    assert not left_of(process.pid)


@pytest.mark.usefixtures("lab_possible")
def test_latency_needs_netem_and_says_so(tmp_path):
    process = start(tmp_path, ["--latency", "1ms"], ["train", "no.such.key=1"])
    _, err = process.communicate()
    assert process.returncode == 2
    assert "netem" in err or "no.such.key" in err, err
    assert not left_of(process.pid)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--rate", "fast"], "--rate fast: expected"),
        (["--rate", "100mbps"], "--rate 100mbps: expected"),
        (["--rate", "0mbit"], "--rate 0mbit: expected"),
        (["--latency", "3"], "--latency 3: expected"),
        (["--hosts", "1"], "--hosts 1: expected"),
        (["--ranks-per-host", "0"], "--ranks-per-host 0: expected"),
        (["--preset", "paper", "--workers", "0"], "--workers 0: expected"),
    ],
)
def test_bad_options_are_named(tmp_path, options, told):
    process = start(tmp_path, options, ["train"])
    _, err = process.communicate()
    assert process.returncode == 2
    assert told in err
    assert "Traceback" not in err


def test_a_job_is_asked_for(tmp_path):
    process = start(tmp_path, [], [])
    assert "no job given" in process.communicate()[1]


def test_what_the_machine_lacks_is_named(monkeypatch):
    monkeypatch.setattr(netlab.os, "geteuid", lambda: 1000)
    with pytest.raises(netlab.LabError, match="need root"):
        netlab.check_machine()
    monkeypatch.setattr(netlab.os, "geteuid", lambda: 0)
    monkeypatch.setattr(netlab.shutil, "which", lambda tool: None if tool == "tc" else "/sbin/ip")
    with pytest.raises(netlab.LabError, match=r"no `tc` found: install iproute2"):
        netlab.check_machine()


def parsed(*words: str) -> argparse.Namespace:
    return netlab.parse(words)


def test_the_papers_topology():
    args = parsed("--preset", "paper", "--workers", "3", "--rate", "250mbit", "--", "train", "launch.threads=2")
    hosts = netlab.hosts_of(args)
    assert [(host.ranks, host.rate) for host in hosts] == [((0, 1, 2), None), ((3,), 250_000_000)]
    assert netlab.job_of(args) == ["train", "launch.threads=2", "cluster.servers=1"]


def test_ranks_are_counted_host_by_host():
    args = parsed("--hosts", "3", "--ranks-per-host", "2", "--rate", "2.5gbit", "--", "train")
    assert [(host.ranks, host.rate) for host in netlab.hosts_of(args)] == [
        ((0, 1), 2_500_000_000),
        ((2, 3), 2_500_000_000),
        ((4, 5), 2_500_000_000),
    ]
