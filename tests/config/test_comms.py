"""Every comms option with every mode is accepted or refused by name, as hetrain/codec.py and the pages say."""

from pathlib import Path

import pytest

from hetrain.codec import OF_MODE, OPTIONS, PATHS, RUNS, Codecs, of_name
from hetrain.config import CommsConfig
from hetrain.config.comms import codecs_of, comms_findings
from hetrain.config.compose import compose, config_folders, group_options
from hetrain.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = ("README.md", "docs/comms.md")
FOLDERS = config_folders(None)
MASK = "comms.pooled_backward=dct: the gradients of pooled embeddings travel where"


def runs(mode: str, path: str, option: str) -> bool:
    return option == "none" or option in RUNS[mode, path]


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        compose(overrides, FOLDERS)
    return str(error.value)


@pytest.mark.parametrize("mode", OF_MODE)
def test_every_group_runs_or_is_refused_by_name(mode: str) -> None:
    assert set(group_options("comms", FOLDERS)) == set(OPTIONS)
    for option in OPTIONS:
        means = {path: of_name(option, path) for path in OF_MODE[mode]}
        missing = [path for path in means if not runs(mode, path, means[path])]
        if missing:
            message = refused(f"consistency={mode}", f"comms={option}")
            for path in missing:
                assert f"comms.name={means[path]}: cannot run for {path} with consistency.mode={mode}. Set " in message
                assert f"comms.{path} to one of none" in message
        else:
            codecs = codecs_of(compose([f"consistency={mode}", f"comms={option}"], FOLDERS))
            assert {path: getattr(codecs, path) for path in PATHS} == {**dict.fromkeys(PATHS, "none"), **means}


@pytest.mark.parametrize("mode", OF_MODE)
def test_every_path_runs_or_is_refused_by_name(mode: str) -> None:
    cfg = compose([f"consistency={mode}"], FOLDERS)
    for path in PATHS:
        for option in OPTIONS:
            cfg.comms = CommsConfig(**{path: option})
            found = [finding for finding in comms_findings(cfg) if not finding.startswith(MASK)]
            if path not in OF_MODE[mode] and option == "none":
                assert found == []  # nothing travels there anyway
            elif path not in OF_MODE[mode]:
                assert found[0].startswith(f"comms.{path}={option}: consistency.mode={mode} has no such path. Set ")
            elif runs(mode, path, option):
                assert found == []
                assert getattr(codecs_of(cfg), path) == option
            else:
                assert found[0].startswith(f"comms.{path}={option}: cannot run for {path} with consistency.mode={mode}")


def test_the_two_directions_of_pooled_embeddings_are_apart() -> None:
    cfg = compose(["comms.pooled_forward=fp16", "comms.pooled_backward=bf16"], FOLDERS)
    assert codecs_of(cfg) == Codecs(pooled_forward="fp16", pooled_backward="bf16")
    for backward in OPTIONS:
        cfg.comms = CommsConfig(pooled_forward="dct", pooled_backward=backward)
        assert list(comms_findings(cfg)) == []


def test_gradients_cannot_follow_a_mask_that_is_not_there() -> None:
    cfg = compose([], FOLDERS)
    cfg.comms = CommsConfig(pooled_backward="dct")
    (message,) = comms_findings(cfg)
    assert message.startswith(MASK)
    assert "and that is none. Set comms.pooled_forward=dct, or comms.pooled_backward to one of none, fp16" in message
    cfg.comms = CommsConfig(name="dct", dense="none", pooled_forward="bf16")
    (message,) = comms_findings(cfg)
    assert message.startswith("comms.name=dct: the gradients of pooled")
    assert "that is bf16." in message


def table() -> list[str]:
    """What runs, as the pages show it."""
    lines = [f"| mode | path | {' | '.join(f'`{option}`' for option in OPTIONS)} |", "|---" * (2 + len(OPTIONS)) + "|"]
    for mode, paths in OF_MODE.items():
        for path in paths:
            cells = ["yes" if runs(mode, path, option) else "refused" for option in OPTIONS]
            lines.append(f"| `{mode}` | `comms.{path}` | {' | '.join(cells)} |")
    return lines


@pytest.mark.parametrize("page", PAGES)
def test_pages_say_what_runs(page: str) -> None:
    expected = table()
    lines = (ROOT / page).read_text().splitlines()
    assert expected[0] in lines, f"{page} has no table of what runs; it should be:\n" + "\n".join(expected)
    first = lines.index(expected[0])
    assert lines[first : first + len(expected)] == expected
