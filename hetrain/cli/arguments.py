"""The command line taken apart: the verb, its options and its overrides."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from hetrain.errors import ConfigError

VERBS = ("train", "eval", "predict", "prepare", "stats", "plan", "doctor")
OF_CONFIGS = ("--keys", "--cfg job", "--config-dir DIR")  # options of every verb that has a config


@dataclass
class Arguments:
    """The command line, taken apart."""

    verb: str = ""
    help: bool = False
    keys: bool = False
    show_config: bool = False
    multirun: bool = False
    calibrate: bool = False
    config_dir: str | None = None
    overrides: list[str] = field(default_factory=list)


def read(argv: Sequence[str]) -> Arguments:
    """Take the command line apart; ConfigError for what cannot be read."""
    found = Arguments()
    rest, unknown = list(argv), ""
    while rest:
        word = rest.pop(0)
        if word in ("--help", "-h"):
            found.help = True
        elif word == "--keys":
            found.keys = True
        elif word in ("-m", "--multirun"):
            found.multirun = True
        elif word == "--calibrate":
            found.calibrate = True
        elif word.partition("=")[0] in ("--cfg", "--config-dir", "-cd"):
            option, _, value = word.partition("=")
            value = value or (rest.pop(0) if rest else "")
            _take_option(found, option, value)
        elif word == "--version":
            from hetrain import __version__

            print(__version__)
            sys.exit(0)
        elif word.startswith("-"):
            unknown = unknown or word
        elif not found.verb and "=" not in word:
            found.verb = _verb(word)
        else:
            found.overrides.append(word)
    if unknown:  # named when the verb, which may follow, is known
        raise ConfigError(f"unknown option {unknown}.\n  Options: {', '.join(options(found.verb))}")
    _check_together(found)
    return found


def options(verb: str) -> tuple[str, ...]:
    """The options of a verb; "": those without one."""
    own = {"train": ("-m",), "plan": ("--calibrate",)}.get(verb, ())
    return ("--help", *(OF_CONFIGS if verb not in ("", "doctor") else ()), *own, "--version")


def _take_option(found: Arguments, option: str, value: str) -> None:
    if option == "--cfg":
        if value != "job":
            raise ConfigError(f"--cfg {value}: expected `--cfg job`, which prints the resolved config.")
        found.show_config = True
    elif not value:
        raise ConfigError(f"{option}: expected a folder with your own configs.")
    else:
        found.config_dir = value


def _verb(word: str) -> str:
    if word in VERBS:
        return word
    from difflib import get_close_matches

    close = get_close_matches(word, VERBS, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ConfigError(f"there is no verb {word!r}.{hint}\n  Verbs: {', '.join(VERBS)}")


def _check_together(found: Arguments) -> None:
    if not found.verb and found.overrides:
        raise ConfigError(f"{found.overrides[0]}: a verb must come first.\n  Verbs: {', '.join(VERBS)}")
    if found.keys and found.verb in ("", "doctor"):
        raise ConfigError("--keys lists the keys of a verb that has some.\n  As in: hetrain train --keys")
    if found.multirun and found.verb != "train":
        raise ConfigError(f"-m runs several trainings; {found.verb or 'no verb'} cannot be swept.")
    if found.calibrate and found.verb != "plan":
        raise ConfigError(
            f"--calibrate measures for `hetrain plan`; {found.verb or 'no verb'} has nothing of the kind."
        )
    if found.verb == "doctor" and (found.show_config or found.config_dir is not None):
        raise ConfigError("--cfg and --config-dir are about configs; doctor has none.")
    if found.verb == "doctor" and found.overrides:
        raise ConfigError(f"{found.overrides[0]}: doctor takes no settings.")
