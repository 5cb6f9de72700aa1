"""The command as a user types it: a real process, its screen and its exit code."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hetrain.config.schema_keys import is_section, schema_keys
from hetrain.errors import ConfigError, DataError

SMALL = ("data.sample.rows=4000", "data.path=sample", "train.batch_size=256", "telemetry.tensorboard=false")


def hetrain(*arguments: str, cwd: Path, timeout_s: float = 240) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "hetrain", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=timeout_s, check=False)


def refused(cwd: Path, *arguments: str, code: int = ConfigError.exit_code) -> str:
    done = hetrain(*arguments, cwd=cwd)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("hetrain: ")
    return done.stderr.removeprefix("hetrain: ")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small `het` run of two processes in runs/first."""
    folder = tmp_path_factory.mktemp("cli")
    done = hetrain("train", "+experiment=criteo_het", *SMALL, "name=first", "launch.nproc=2", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # no word of third parties
    return folder


def test_help_names_every_verb_and_imports_nothing_slow(tmp_path: Path) -> None:
    done = hetrain("--help", cwd=tmp_path)
    assert done.returncode == 0
    assert all(verb in done.stdout for verb in ("train", "eval", "predict", "prepare", "stats", "plan", "doctor"))
    check = "import sys; from hetrain.cli.command import run; run(['train', '--help']); "
    check += "assert not {'torch', 'hydra', 'omegaconf', 'pyarrow', 'rich'} & set(sys.modules), 'slow import'"
    subprocess.run([sys.executable, "-c", check], check=True, capture_output=True)


@pytest.mark.parametrize("verb", ["train", "eval", "predict", "prepare", "stats", "plan", "doctor"])
def test_help_of_a_verb(verb: str, tmp_path: Path) -> None:
    done = hetrain(verb, "--help", cwd=tmp_path)
    assert done.returncode == 0
    assert done.stdout.startswith(f"usage: hetrain {verb}")


def test_keys_lists_every_key_and_imports_nothing_slow(tmp_path: Path) -> None:
    check = "import sys; from hetrain.cli.command import run; run(['train', '--keys']); "
    check += "assert not {'torch', 'hydra', 'omegaconf', 'pyarrow', 'rich'} & set(sys.modules), 'slow import'"
    shown = subprocess.run([sys.executable, "-c", check], check=True, capture_output=True, text=True).stdout
    listed = {line.split("=")[0].strip() for line in shown.splitlines() if "=" in line}
    assert {key for key in schema_keys() if not is_section(key)} <= listed
    row = next(line for line in shown.splitlines() if "cache.policy" in line)
    assert row.split()[:7] == ["consistency.cache.policy=lru", "str", "lru", "|", "lfu", "|", "light_lfu"]
    assert "out=FILE" in hetrain("predict", "--keys", cwd=tmp_path).stdout
    assert "launch.nproc" not in hetrain("prepare", "--keys", cwd=tmp_path).stdout
    assert "data.path" in hetrain("stats", "--keys", cwd=tmp_path).stdout
    assert "hetrain train --keys" in refused(tmp_path, "doctor", "--keys")


def test_prepare_says_what_it_made_and_what_to_run_next(tmp_path: Path) -> None:
    asked = ("data.path=my sample", "data.sample.rows=1000")
    done = hetrain("prepare", *asked, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert lines["train"].startswith("800 rows, ")
    assert "left" not in lines
    assert lines["next"] == "hetrain train +experiment=criteo_het 'data.path=my sample' data.sample.rows=1000"
    assert "was there already" in hetrain("prepare", *asked, cwd=tmp_path).stdout


def test_cfg_job_prints_the_resolved_config(tmp_path: Path) -> None:
    done = hetrain("train", "+experiment=criteo_het", "consistency.staleness=7", "--cfg", "job", cwd=tmp_path)
    assert done.returncode == 0
    assert "  staleness: 7.0\n" in done.stdout
    assert "_target_: hetrain.models.WDL" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_mistakes_on_the_command_line(tmp_path: Path) -> None:
    assert refused(tmp_path, "trian").startswith("there is no verb 'trian'. Did you mean 'train'?")
    assert refused(tmp_path, "train", "--verbose").startswith("unknown option --verbose.")
    assert refused(tmp_path, "train", "--cfg", "all").startswith("--cfg all: expected `--cfg job`")
    assert refused(tmp_path, "seed=3").startswith("seed=3: a verb must come first.")
    assert refused(tmp_path, "eval", "-m").startswith("-m runs several trainings")
    assert refused(tmp_path, "train", "consistency.stalenes=3").startswith("consistency.stalenes=3: there is no key")
    assert refused(tmp_path, "eval").startswith("eval needs a trained run.")
    assert refused(tmp_path, "eval", "run=nowhere").startswith("run=nowhere: there is no nowhere/config.yaml.")
    assert list(tmp_path.iterdir()) == []


def test_mistakes_that_only_ranks_can_see(tmp_path: Path) -> None:
    message = refused(tmp_path, "train", *SMALL, "model.hiden=[8]", "launch.nproc=2")
    assert message.startswith("model.hiden=[8]: WDL has no argument 'hiden'. Did you mean model.hidden?\n  It takes:")
    message = refused(tmp_path, "train", "data=criteo", "data.path=none", "launch.nproc=1", code=DataError.exit_code)
    assert "hetrain prepare" in message


def test_train_leaves_its_folder(trained: Path) -> None:
    run = trained / "runs" / "first"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["world_size"] == 2
    assert summary["mode"] == "het"
    assert 0 < summary["auc"] < 1
    assert (run / "config.yaml").exists()
    assert (run / "metrics.jsonl").exists()


@pytest.mark.parametrize("nproc", [1, 2])
def test_eval_gives_the_numbers_training_gave(trained: Path, nproc: int) -> None:
    summary = json.loads((trained / "runs" / "first" / "summary.json").read_text())
    done = hetrain("eval", "run=runs/first", f"launch.nproc={nproc}", cwd=trained)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["auc"] == pytest.approx(summary["auc"], abs=1e-6)
    assert found["logloss"] == pytest.approx(summary["logloss"], abs=1e-6)


def test_predict_writes_a_row_per_example(trained: Path) -> None:
    done = hetrain("predict", "run=runs/first", "out=scores.csv", "launch.nproc=1", cwd=trained)
    assert done.returncode == 0, done.stderr
    lines = (trained / "scores.csv").read_text().splitlines()
    assert len(lines) == 1 + 400
    assert all(0 < float(line.split(",")[-1]) < 1 for line in lines[1:])


def test_sweep_goes_on_and_ends_with_a_table(trained: Path) -> None:
    swept = ("train", "-m", *SMALL, "+experiment=criteo_het", "consistency.staleness=0,-1,10", "train.max_steps=3")
    done = hetrain(*swept, "launch.nproc=1", cwd=trained)
    assert done.returncode == ConfigError.exit_code
    assert "failed: job 1 (consistency.staleness=-1)" in done.stderr
    (folder,) = (trained / "multirun").iterdir()
    assert (folder / "0" / "summary.json").exists()
    assert (folder / "2" / "summary.json").exists()
    table = done.stdout[done.stdout.index("job  consistency.staleness") :].splitlines()
    head = ["job", "consistency.staleness", "state", "auc", "logloss", "examples/s", "bytes", "hit rate", "staleness"]
    assert table[0].split("  ") == head or [cell.strip() for cell in table[0].split("  ") if cell.strip()] == head
    assert [line.split()[1] for line in table[1:4]] == ["0", "-1", "10"]
    assert [line.split()[2] for line in table[1:4]] == ["finished", "failed", "finished"]


def test_interrupted_sweep_says_so(trained: Path) -> None:
    swept = ["train", "-m", *SMALL, "runs=sweeps", "seed=1,2", "train.epochs=5000", "telemetry.log_every=5"]
    command = [sys.executable, "-m", "hetrain", *swept, "launch.nproc=1"]
    process = subprocess.Popen(command, cwd=trained, stdout=subprocess.PIPE, text=True)
    end = time.monotonic() + 120
    while not any(file.stat().st_size for file in trained.glob("sweeps/*/0/metrics.jsonl")):
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    shown, _ = process.communicate(timeout=120)
    assert process.returncode == 130
    rows = shown[shown.index("job  seed") :].splitlines()[1:3]
    assert rows[0].split()[2:5] == ["interrupted", "-", "-"]
    assert rows[1].split()[2:5] == ["not", "started", "-"]


def test_a_sweep_has_no_name(trained: Path) -> None:
    assert "a sweep names the folders of its jobs itself" in refused(trained, "train", "-m", "seed=1,2", "name=x,y")


def test_eval_and_predict_make_no_data(trained: Path) -> None:
    message = refused(trained, "eval", "run=runs/first", "data.path=nothing", code=DataError.exit_code)
    assert message.startswith("data.path=nothing: no data set there.")
    assert not (trained / "nothing").exists()
    message = refused(trained, "eval", "run=runs/first", "data.sample.rows=500", code=DataError.exit_code)
    assert "sample.rows: 4000 there, 500 asked for" in message


def test_a_refused_write_is_no_defect(trained: Path) -> None:
    (trained / "file").touch()
    message = refused(trained, "train", *SMALL, "data.path=file/sample", "launch.nproc=1", code=1)
    assert message.startswith("file: File exists.\n  Something is in the way")


def test_sweep_of_a_misspelt_key_starts_nothing(tmp_path: Path) -> None:
    assert "Did you mean" in refused(tmp_path, "train", "-m", "consistency.stalenes=0,10")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("number", "nproc", "code"), [(signal.SIGTERM, 2, 143), (signal.SIGINT, 1, 130)])
def test_signal_saves_and_the_run_goes_on(trained: Path, number: int, nproc: int, code: int) -> None:
    name = f"stopped{nproc}"
    arguments = ["train", *SMALL, f"name={name}", f"launch.nproc={nproc}", "train.epochs=5000", "telemetry.log_every=5"]
    process = subprocess.Popen([sys.executable, "-m", "hetrain", *arguments], cwd=trained, stderr=subprocess.PIPE)
    metrics = trained / "runs" / name / "metrics.jsonl"
    end = time.monotonic() + 120
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < end:
        assert process.poll() is None, process.stderr and process.stderr.read()
        time.sleep(0.1)
    process.send_signal(number)
    assert process.wait(120) == code
    assert list((trained / "runs" / name / "checkpoints").glob("step_*"))
    done = hetrain(*arguments[:-2], "train.epochs=5000", "train.max_steps=1", cwd=trained)
    assert done.returncode == 0, done.stderr
    assert "goes on from" in done.stdout


def test_runs_under_torchrun(trained: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "hetrain"]
    arguments = ["train", *SMALL, "runs=torchrun", "train.max_steps=3"]  # each rank makes up a name; rank 0's is taken
    done = subprocess.run(
        [*torchrun, *arguments], cwd=trained, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    (run,) = (trained / "torchrun").iterdir()
    assert json.loads((run / "summary.json").read_text())["world_size"] == 2


def test_runs_under_slurm(trained: Path) -> None:
    processes = []
    for rank in range(2):
        slurm = {"SLURM_PROCID": str(rank), "SLURM_NTASKS": "2", "SLURM_LOCALID": str(rank)}
        slurm |= {"SLURM_NODELIST": "127.0.0.1", "SLURM_JOB_ID": str(os.getpid())}
        command = [sys.executable, "-m", "hetrain", "train", *SMALL, "runs=slurm", "train.max_steps=3"]
        processes.append(subprocess.Popen(command, cwd=trained, env={**os.environ, **slurm}))
    assert [process.wait(240) for process in processes] == [0, 0]
    (run,) = (trained / "slurm").iterdir()
    assert json.loads((run / "summary.json").read_text())["world_size"] == 2


def test_users_own_model_in_the_current_folder(trained: Path) -> None:
    (trained / "my_models.py").write_text("from hetrain.models import WDL\n\n\nclass Mine(WDL):\n    pass\n")
    arguments = ["model._target_=my_models.Mine", "launch.nproc=2", "name=mine", "train.max_steps=3"]
    done = hetrain("train", *SMALL, *arguments, cwd=trained)
    assert done.returncode == 0, done.stderr
    assert json.loads((trained / "runs" / "mine" / "summary.json").read_text())["model"] == "Mine"


def test_doctor(tmp_path: Path) -> None:
    done = hetrain("doctor", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    for word in ("python", "torch", "torchrec", "fbgemm-gpu", "device", "gloo", "nccl", "cores", "memory", "disk"):
        assert word in done.stdout
