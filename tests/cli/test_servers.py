"""`cluster.servers` as a user types it: local processes, torchrun, what is refused, a server that dies."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hetrain.errors import ConfigError
from tests.cli.test_cli import SMALL, hetrain, refused

HET = ("train", "+experiment=criteo_het", *SMALL, "cluster.servers=1")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of two workers and a server in runs/first."""
    folder = tmp_path_factory.mktemp("servers")
    done = hetrain(*HET, "name=first", "launch.nproc=2", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return folder


def test_a_run_its_evaluation_and_predictions(served: Path) -> None:
    summary = json.loads((served / "runs" / "first" / "summary.json").read_text())
    assert (summary["world_size"], summary["servers"]) == (3, 1)
    assert summary["cache"]["hits"] > 0
    for overrides in ([], ["cluster.servers=0"], ["launch.nproc=1", "cluster.servers=2"]):
        done = hetrain("eval", "run=runs/first", *overrides, cwd=served)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["auc"] == pytest.approx(summary["test"]["auc"], abs=1e-6)
    done = hetrain("predict", "run=runs/first", "out=scores.csv", cwd=served)
    assert done.returncode == 0, done.stderr
    assert len((served / "scores.csv").read_text().splitlines()) == summary["test"]["examples"] + 1


def started(folder: Path, *arguments: str, name: str) -> "subprocess.Popen[str]":
    """A run that has trained some steps."""
    command = [sys.executable, "-m", "hetrain", *HET, f"name={name}", "train.epochs=5000", "telemetry.log_every=5"]
    process = subprocess.Popen([*command, *arguments], cwd=folder, stderr=subprocess.PIPE, text=True)
    metrics = folder / "runs" / name / "metrics.jsonl"
    end = time.monotonic() + 120
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < end:
        assert process.poll() is None, process.stderr and process.stderr.read()
        time.sleep(0.1)
    return process


def test_a_signal_saves_and_the_run_goes_on(served: Path) -> None:
    process = started(served, "launch.nproc=1", name="stopped")
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 143
    arguments = ["name=stopped", "launch.nproc=1", "train.epochs=5000", "telemetry.log_every=5"]
    step = max(int(p.name[5:]) for p in (served / "runs" / "stopped" / "checkpoints").glob("step_*"))
    done = hetrain(*HET, *arguments, f"train.max_steps={step + 3}", cwd=served)
    assert done.returncode == 0, done.stderr
    assert "bit for bit" in done.stdout


def test_joined_processes_count_workers_and_servers(served: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "hetrain"]
    command = [*torchrun, *HET, "runs=torchrun", "train.max_steps=3"]
    done = subprocess.run(command, cwd=served, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    (run,) = (served / "torchrun").iterdir()
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["world_size"], summary["servers"], summary["examples"]) == (2, 1, 3 * 256)


def test_a_worker_must_remain(tmp_path: Path) -> None:
    rank = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    command = [sys.executable, "-m", "hetrain", *HET]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, **rank}, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == ConfigError.exit_code
    assert done.stderr.startswith("hetrain: cluster.servers=1: expected fewer than the 1 processes of this run")
    assert "Start at least 2 processes" in done.stderr


def test_refused(tmp_path: Path) -> None:
    message = refused(tmp_path, "train", *SMALL, "consistency=bsp", "cluster.servers=1")
    assert message.startswith("cluster.servers=1: expected 0 with consistency.mode=bsp.")
    message = refused(tmp_path, *HET, "launch.nproc=1", "cluster.servers=100000")
    assert message.startswith("launch.nproc and cluster.servers=100000: 100001 processes, expected at most")
