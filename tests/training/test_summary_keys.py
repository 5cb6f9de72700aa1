"""docs/summary.md against what a run of every mode writes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hetrain.config import RunConfig
from tests import summary_keys
from tests.small_run import train


def written(cfg: RunConfig) -> dict[str, Any]:
    train(0, 1, cfg)
    found: dict[str, Any] = json.loads((Path(cfg.runs) / str(cfg.name) / "summary.json").read_text())
    return found


@pytest.mark.parametrize("dct", [False, True])
@pytest.mark.parametrize("mode", summary_keys.MODES)
def test_the_table_has_the_keys_that_are_written(cfg_of: Callable[..., RunConfig], mode: str, dct: bool) -> None:
    capacity = 0 if mode == "asp" else 0.3
    more = {"launch__slow_ranks": {0: 1.01}, "telemetry__audit_every": 3} if dct else {}
    cfg = cfg_of(mode, consistency__cache__capacity=capacity, comms__name="dct" if dct else "none", **more)
    cfg.launch.slow_random.share = 0.5 if dct else 0.0
    cfg.launch.slow_random.factor = 1.01
    cfg.train.max_steps = 6
    summary = written(cfg)
    summary_keys.check(summary, mode, dct=dct)
    assert (summary["slow_ranks"], summary["slow_random"]) == (
        ({"0": 1.01}, {"share": 0.5, "factor": 1.01}) if dct else (None, None)
    )
    assert summary["weights_step"] == 6
    if mode in ("ssp", "asp"):
        assert summary["first_end"] is None  # as the table says of train.max_steps


def test_what_waits_is_said_before_and_told_after(
    cfg_of: Callable[..., RunConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = cfg_of("asp", consistency__cache__capacity=0, comms__rows="dct")
    memory = written(cfg)["memory"]
    assert 0 < memory["residue_max"] <= memory["predicted"]["residue_max"]
    assert "and what comms.rows=dct holds back up to 0.1 MiB" in capsys.readouterr().out
