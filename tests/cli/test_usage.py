"""The help texts: every verb names every config group that it takes."""

import pytest

from hetrain.cli.arguments import VERBS, options, read
from hetrain.cli.key_list import key_list
from hetrain.cli.usage import verb_help
from hetrain.config.compose import EXPERIMENT, GROUPS, compose, config_folders, group_options
from hetrain.errors import ConfigError

FOLDERS = config_folders(None)


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "doctor"])
def test_the_groups_a_verb_takes_are_in_its_help(verb: str) -> None:
    text = verb_help(verb, FOLDERS)
    (listed,) = [part for part in text.split("\n\n") if part.startswith("config groups")]
    shown, _, others = listed.partition("  also taken, ")
    named = {line.split()[0] for line in shown.splitlines()[1:] if line[2] != " "}
    named |= {word.strip() for word in others.partition(":")[2].split(",") if word}
    chosen = {"model", "optimizer", "comms", EXPERIMENT} if verb in ("eval", "predict") else set()  # by the run
    assert named == ({"data", EXPERIMENT} if verb == "stats" else {*GROUPS, EXPERIMENT} - chosen)
    for line in shown.splitlines()[1:]:
        if line[2] != " ":
            assert group_options(line.split()[0], FOLDERS)[0] in line
    assert ("--multirun" in text) == (verb == "train")
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize("verb", ["", *VERBS])
def test_an_unknown_option_is_answered_with_those_of_the_verb(verb: str) -> None:
    for words in ([verb, "--foo"] if verb else ["--foo"], ["--foo", verb] if verb else ["--foo"]):
        with pytest.raises(ConfigError) as error:
            read(words)
        assert str(error.value) == f"unknown option --foo.\n  Options: {', '.join(options(verb))}"
    assert ("--calibrate" in options(verb)) == (verb == "plan")
    assert ("-m" in options(verb)) == (verb == "train")
    for option in ("--cfg job", "--config-dir DIR", "--keys"):
        assert (option in options(verb)) == (verb not in ("", "doctor"))
    if verb not in ("", "doctor"):
        text = verb_help(verb, FOLDERS)
        assert all(option in text for option in options(verb) if option != "--version")


def test_what_a_verb_cannot_do_with_an_option() -> None:
    for words in (["doctor", "--cfg", "job"], ["doctor", "--config-dir=x"]):
        with pytest.raises(ConfigError, match="are about configs; doctor has none"):
            read(words)


def test_effort_is_in_the_help_of_plan() -> None:
    assert "planner.effort=" in verb_help("plan", FOLDERS)


def test_keys_of_eval_are_those_it_reads() -> None:
    text = key_list("eval", ("run",))
    assert "train.eval_batch_size" in text
    assert "train.epochs" not in text
    assert "optimizer." not in text


def test_the_groups_are_those_that_compose_takes() -> None:
    for group in GROUPS:
        compose([f"{group}={group_options(group, FOLDERS)[-1]}"], FOLDERS)
