"""Which profile stays in its file, and what is said of it."""

import json
from pathlib import Path
from typing import Any

import pytest

from hetrain.planner.kept_profile import MOST_OFF, keep
from hetrain.planner.machines import PROFILE

EVEN, UNEVEN = MOST_OFF / 2, MOST_OFF * 2


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def profile(number: int, series: float, pieces: float = 0.0) -> dict[str, Any]:
    return {"number": number, "pieces_error": pieces, "measured": {"a": {"error": EVEN}, "b": {"error": series}}}


def held(file: Path = PROFILE) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text())
    return found


@pytest.mark.parametrize("errors", [(UNEVEN, 0.0), (0.0, UNEVEN)])
def test_uneven_times_do_not_replace_even_ones(errors: tuple[float, float]) -> None:
    keep(PROFILE, profile(1, EVEN, EVEN))
    said = keep(PROFILE, profile(2, *errors))
    assert held()["number"] == 1
    assert said.startswith("The times are uneven: measure again when nothing else uses these machines.\nnot saved ")
    assert "plans/profile.json keeps that of 20" in said
    assert "whose times were even (off by 15%); cluster.profile=FILE, another file, saves a profile" in said
    elsewhere = keep(Path("other.json"), profile(2, *errors))
    assert held(Path("other.json"))["number"] == 2
    assert "uneven" in elsewhere
    assert "saved       other.json, which `hetrain plan` uses with cluster.profile=other.json" in elsewhere


def test_any_other_profile_is_replaced() -> None:
    made = keep(PROFILE, profile(1, UNEVEN))
    assert "uneven" in made
    assert "in place" not in made
    assert "(in place of that of 20" in keep(PROFILE, profile(2, UNEVEN))  # neither is better
    assert "uneven" not in keep(PROFILE, profile(3, EVEN))
    assert keep(PROFILE, profile(4, EVEN)).endswith("uses where no other machines are named (cluster=local)")
    assert held()["number"] == 4
    old = {key: value for key, value in profile(5, EVEN).items() if key != "pieces_error"}  # as written before
    PROFILE.write_text(json.dumps(old))
    keep(PROFILE, profile(6, UNEVEN))
    assert held()["number"] == 5
    for by_hand in ({"measured": {}}, {}, {"measured": {"a": {"error": "none"}}}, {"measured": []}):
        PROFILE.write_text(json.dumps(by_hand))
        keep(PROFILE, profile(7, UNEVEN))
        assert held()["number"] == 7
