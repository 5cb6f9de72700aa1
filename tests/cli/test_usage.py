"""The help texts: every verb names every config group that it takes."""

import pytest

from hetrain.cli.arguments import VERBS
from hetrain.cli.usage import verb_help
from hetrain.config.compose import EXPERIMENT, GROUPS, compose, config_folders, group_options

FOLDERS = config_folders(None)


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "doctor"])
def test_the_groups_a_verb_takes_are_in_its_help(verb: str) -> None:
    text = verb_help(verb, FOLDERS)
    (listed,) = [part for part in text.split("\n\n") if part.startswith("config groups")]
    shown, _, others = listed.partition("  also taken, ")
    named = {line.split()[0] for line in shown.splitlines()[1:] if line[2] != " "}
    named |= {word.strip() for word in others.partition(":")[2].split(",") if word}
    assert named == {*GROUPS, EXPERIMENT}
    for line in shown.splitlines()[1:]:
        if line[2] != " ":
            assert group_options(line.split()[0], FOLDERS)[0] in line
    assert ("--multirun" in text) == (verb == "train")
    assert max(map(len, text.splitlines())) <= 120


def test_the_groups_are_those_that_compose_takes() -> None:
    for group in GROUPS:
        compose([f"{group}={group_options(group, FOLDERS)[-1]}"], FOLDERS)
