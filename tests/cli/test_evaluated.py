"""What `eval` and `predict` take over a run's own config, and what `plan --calibrate` takes: the rest is named."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hetrain.cli.calibrated import check_calibrated
from hetrain.cli.command import run
from hetrain.config.compose import compose, config_folders, to_yaml
from hetrain.errors import ConfigError

FOLDERS = config_folders(None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with the config of a `het` run of WDL."""
    folder = tmp_path_factory.mktemp("evaluated")
    (folder / "config.yaml").write_text(to_yaml(compose(["consistency=het"], FOLDERS)))
    return folder


def refused(folder: Path, word: str, verb: str = "eval") -> str:
    with pytest.raises(ConfigError) as error:
        run([verb, f"run={folder}", "out=x.csv", word] if verb == "predict" else [verb, f"run={folder}", word])
    return str(error.value).replace(str(folder), "RUN")


OWN = "expected the model of the run, whose weights these are"
IDLE = "eval does not read it, as it trains nothing: what the run had is in RUN/config.yaml. Leave it out."

FLOAT32 = "eval does not read it: it exchanges float32, whatever the run did."


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("model=dlrm", f"{OWN} (hetrain.models.WDL in RUN/config.yaml). Leave it out."),
        ("model.hidden=[16]", f"{OWN} (model.hidden=[256,256,256] in RUN/config.yaml). Leave it out."),
        ("model.embedding_dim=32", f"{OWN} (model.embedding_dim=16 in RUN/config.yaml). Leave it out."),
        ("optimizer=sgd", IDLE),
        ("seed=7", IDLE),
        ("data.shuffle=false", IDLE),
        ("planner.plan=there", IDLE),
        ("comms=fp16", f"{FLOAT32} Leave it out."),
        ("comms.rows=fp16", f"{FLOAT32} Leave it out."),
        ("train.batch_size=7", "eval does not read it, but train.eval_batch_size. Leave it out."),
    ],
)
def test_the_word_that_was_typed_is_named(folder: Path, word: str, says: str) -> None:
    assert refused(folder, word) == f"{word}: {says}"


def test_an_experiment_is_none_of_a_run(folder: Path) -> None:
    assert refused(folder, "+experiment=dlrm_bsp", "predict") == (
        "+experiment=dlrm_bsp: predict takes the config that the run saved, RUN/config.yaml. Leave it out, or set "
        "single keys, as in data.path=DIR."
    )


def test_what_says_the_same_or_where_to_run_is_taken(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    same = ["model=wdl", "optimizer.rows.lr=0.02", "seed=1"]
    other = ["consistency=bsp", "launch.nproc=1", "data.path=there", "train.eval_batch_size=8", "planner=hierarchical"]
    assert run(["eval", f"run={folder}", *same, *other, "--cfg", "job"]) == 0
    assert "path: there" in capsys.readouterr().out
    assert run(["eval", f"run={folder}", "model._target_=moved.WDL", "--cfg", "job"]) == 0
    assert "_target_: moved.WDL" in capsys.readouterr().out


def test_a_path_of_the_run_can_be_left_out_with_its_mode(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(to_yaml(compose(["consistency=het", "comms.rows=fp16"], FOLDERS)))
    assert "no such path" in refused(tmp_path, "consistency=bsp")
    for nothing in ("null", "none"):
        assert run(["eval", f"run={tmp_path}", "consistency=bsp", f"comms.rows={nothing}", "--cfg", "job"]) == 0


def test_a_misspelt_key_of_the_verb_is_named(folder: Path) -> None:
    for words, says in {
        f"predict run={folder} ouput=x.csv": "ouput=x.csv: there is no key 'ouput'. Did you mean 'out'?",
        "eval rn=runs/first": "rn=runs/first: there is no key 'rn'. Did you mean 'run'?",
        f"eval run={folder} sed=3": "sed=3: there is no key 'sed'. Did you mean 'seed'?",
        f"predict run={folder}": "predict needs a file to write.",
        f"predict run={folder} comms=none": "predict needs a file to write.",
    }.items():
        with pytest.raises(ConfigError) as error:
            run(words.split())
        assert str(error.value).startswith(says)


def test_stats_reads_data_alone(capsys: pytest.CaptureFixture[str]) -> None:
    for word in ("cluster=laptop", "consistency=het", "train.batch_size=8", "model=dlrm"):
        with pytest.raises(ConfigError, match=r"`hetrain stats` counts the ids .* nothing but data\.\*") as error:
            run(["stats", word])
        assert str(error.value).startswith(f"{word}: ")
    assert run(["stats", "+experiment=criteo_bsp", "data=criteo", "data.path=there", "--cfg", "job"]) == 0
    assert "path: there" in capsys.readouterr().out


# As from a shell: a process that was started with SIGINT ignored, as by pytest's workers, would ignore it too.
FROM_A_SHELL = """import signal, sys
from hetrain.cli.command import main
signal.signal(signal.SIGINT, signal.default_int_handler)
main(sys.argv[1:])"""


def test_an_interrupted_command_says_so(tmp_path: Path) -> None:
    """The search asked for would take hours; it is interrupted once its first line is there."""
    words = ["plan", "+experiment=merlin_large", "cluster=dgx_a100", "planner=hierarchical", "planner.effort=1000"]
    command, pipe = [sys.executable, "-u", "-c", FROM_A_SHELL, *words], subprocess.PIPE
    with subprocess.Popen(command, cwd=tmp_path, stdout=pipe, stderr=pipe) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith(b"tables")
            process.send_signal(signal.SIGINT)
            assert process.communicate(timeout=60)[1] == b"hetrain: interrupted\n"
            assert process.returncode == 130
        finally:
            process.kill()


def test_calibration_measures_the_machine_it_runs_on() -> None:
    check_calibrated(["launch.nproc=4", "launch=cpu", "cluster.profile=mine.json"])
    for word in ("cluster=dgx_a100", "cluster.nodes=2", "model=dlrm", "+experiment=merlin_tiny"):
        with pytest.raises(ConfigError) as error:
            check_calibrated(["launch.nproc=4", word])
        assert str(error.value).startswith(f"{word}: --calibrate measures the machine it runs on, with launch.nproc")
        assert ("calibrate on one of them" in str(error.value)) == word.startswith("cluster")
    with pytest.raises(ConfigError, match=r"^cluster=dgx_a100: --calibrate measures"):
        run(["plan", "--calibrate", "cluster=dgx_a100"])
