"""The command `hetrain`: does what the verb says, shows errors, chooses exit codes.

Imports stay inside functions where they are slow: help must not wait for torch or Hydra.
"""

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from hetrain.cli.arguments import Arguments, read
from hetrain.errors import ConfigError, HetrainError

if TYPE_CHECKING:
    from hetrain.config import RunConfig

OWN_KEYS = {"eval": ("run", "checkpoint", "split"), "predict": ("run", "checkpoint", "split", "out")}


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command and exit: 0, or the code of the error, or 128 + the signal that stopped it."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # a user's own model class lives in the current folder
    words = sys.argv[1:] if argv is None else argv
    try:
        code = run(words)
    except HetrainError as error:
        if _speaks() or not isinstance(error, ConfigError):
            print(f"hetrain: {error}", file=sys.stderr)
        code = error.exit_code
    except KeyboardInterrupt:
        if _speaks():
            print("hetrain: interrupted", file=sys.stderr)
        code = 130
    except BrokenPipeError:  # `hetrain ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except OSError as error:
        print(f"hetrain: {_refused(error, words)}", file=sys.stderr)
        code = 1
    sys.stdout.flush()
    sys.exit(code)


def _speaks() -> bool:
    """Of processes that torchrun or srun started with the same words, the first."""
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"


def _refused(error: OSError, words: Sequence[str]) -> str:
    """What the system refused, in words; raises `error` again when it is a defect of ours."""
    from hetrain.launch.system_error import explain

    values = [word.partition("=")[2] for word in words if "/" in word]
    text = explain(error, ["runs", "data", *filter(None, values)])
    if text is None:
        raise error
    return text


def run(argv: Sequence[str]) -> int:
    """The exit code of one command."""
    arguments = read(argv)
    if not arguments.verb:
        from hetrain.cli.usage import TOP

        print(TOP, end="")
        return 0
    if arguments.keys and not arguments.help:
        from hetrain.cli.key_list import key_list

        print(key_list(arguments.verb, OWN_KEYS.get(arguments.verb, ())), end="")
        return 0
    from hetrain.config.compose import config_folders

    folders = config_folders(arguments.config_dir)
    if arguments.help:
        from hetrain.cli.usage import verb_help

        print(verb_help(arguments.verb, folders), end="")
        return 0
    if arguments.verb == "doctor":
        from hetrain.cli import doctor

        return doctor.main()
    if arguments.multirun:
        from hetrain.cli import sweep

        return sweep.run(arguments.verb, arguments.overrides, folders)
    return _one(arguments, folders)


def _one(arguments: Arguments, folders: Sequence[Path]) -> int:
    from hetrain.cli.calibrated import check_calibrated
    from hetrain.cli.counted import check_counted
    from hetrain.cli.evaluated import check_evaluated, check_no_experiment
    from hetrain.config.compose import compose, to_yaml
    from hetrain.config.saved import read_saved

    own, overrides = _own_keys(arguments)
    _check_own(arguments.verb, overrides)
    base = _saved_config(arguments.verb, own) if arguments.verb in OWN_KEYS else None
    if arguments.calibrate:
        check_calibrated(overrides)
    if base is not None:
        check_no_experiment(arguments.verb, overrides, base)
    cfg = compose(overrides, folders, base, arguments.verb)
    if base is not None:
        check_evaluated(arguments.verb, overrides, read_saved(base), cfg, base)
    if arguments.verb == "stats":
        check_counted(overrides)
    if arguments.show_config:
        print(to_yaml(cfg), end="")
        return 0
    if arguments.verb == "prepare":
        return _prepare(cfg, arguments)
    if arguments.verb == "stats":
        from hetrain.cli import stats

        return stats.run(cfg.data)
    if arguments.verb == "plan":
        from hetrain.cli import plan

        if arguments.calibrate:
            return _on_ranks("calibrate", cfg, {"out": cfg.cluster.profile or str(plan.PROFILE)})
        return plan.run(cfg, overrides, folders)
    from hetrain.cli.trainable import check_trainable

    check_trainable(cfg)
    return _on_ranks(arguments.verb, named(cfg, overrides), own)


def _own_keys(arguments: Arguments) -> tuple[dict[str, str], list[str]]:
    """The verb's own KEY=VALUE pairs, and the overrides of the run's config."""
    names = OWN_KEYS.get(arguments.verb, ())
    own: dict[str, str] = {}
    overrides = []
    for word in arguments.overrides:
        key, _, value = word.partition("=")
        if key in names:
            own[key] = value
        else:
            overrides.append(word)
    return own, overrides


def _check_own(verb: str, overrides: Sequence[str]) -> None:
    """Raise ConfigError for a misspelt key of the verb itself, which no config has."""
    from difflib import get_close_matches

    from hetrain.config.schema_keys import children

    for word in overrides:
        key = word.lstrip("+~").partition("=")[0]
        close = get_close_matches(key, (*OWN_KEYS.get(verb, ()), *children("")), n=1)
        if close and close[0] != key and close[0] in OWN_KEYS.get(verb, ()) and key not in children(""):
            raise ConfigError(f"{word}: there is no key {key!r}. Did you mean {close[0]!r}?")


def _saved_config(verb: str, own: dict[str, str]) -> Path:
    """config.yaml of the run that `run=` names; checks it and the verb's own keys."""
    from hetrain.config.saved import read_saved

    if not own.get("run"):
        raise ConfigError(f"{verb} needs a trained run.\n  As in: hetrain {verb} run=runs/NAME")
    if verb == "predict" and not own.get("out"):
        raise ConfigError("predict needs a file to write.\n  As in: hetrain predict run=runs/NAME out=scores.parquet")
    if own.get("split", "test") not in ("train", "validation", "test"):
        raise ConfigError(f"split={own['split']}: expected one of train, validation, test.")
    config = Path(own["run"]) / "config.yaml"
    if not config.is_file():
        raise ConfigError(f"run={own['run']}: there is no {config}.\n  Name the folder that a training left.")
    read_saved(config)
    return config


def named(cfg: "RunConfig", overrides: Sequence[str]) -> "RunConfig":
    """The config with a run name: the experiment (or model and mode), the time and this process's number."""
    if cfg.name is not None:
        return cfg
    from hetrain.config.compose import chosen_experiment

    model = str(cfg.model["_target_"]).rpartition(".")[2].lower()
    what = chosen_experiment(overrides) or f"{model}_{cfg.consistency.mode}"
    return replace(cfg, name=f"{what}_{time.strftime('%m%d-%H%M%S')}_{os.getpid()}")


def _prepare(cfg: "RunConfig", arguments: Arguments) -> int:
    from hetrain.cli.prepared import in_words, next_command
    from hetrain.data.prepare import prepare
    from hetrain.launch.quiet import show_our_own

    show_our_own()
    report = prepare(cfg.data, say=partial(print, file=sys.stderr))
    following = next_command(arguments.overrides, arguments.config_dir, from_raw=cfg.data.raw is not None)
    print("\n".join(in_words(report, following)))
    return 0


def _on_ranks(verb: str, cfg: "RunConfig", options: dict[str, str]) -> int:
    from hetrain.launch.job import Job
    from hetrain.launch.quiet import quiet_third_parties
    from hetrain.launch.start import launch
    from hetrain.launch.versions import check_versions
    from hetrain.launch.worker import perform, run_rank

    check_versions()
    quiet_third_parties()
    return launch(Job(verb, cfg, options), perform, run_rank)
