"""`comms` for dense gradients: what runs in which mode, what is refused by name and with what instead."""

import pytest

from hetrain.config import RunConfig
from hetrain.config.comms import codecs_of, comms_findings

MODES = ("bsp", "het", "asp", "ssp")


def _cfg(mode: str, **changes: object) -> RunConfig:
    cfg = RunConfig()
    cfg.consistency.mode = mode
    for key, value in changes.items():
        setattr(cfg.comms, key, value)
    return cfg


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("option", ["none", "fp16", "bf16", "dct"])
def test_every_mode_has_these(mode: str, option: str) -> None:
    cfg = _cfg(mode, dense=option)
    assert list(comms_findings(cfg)) == []
    assert codecs_of(cfg).dense == option


@pytest.mark.parametrize("mode", MODES)
def test_int8_is_refused_by_name_and_means_bf16_in_the_group(mode: str) -> None:
    (finding,) = comms_findings(_cfg(mode, dense="int8"))
    assert finding.startswith(f"comms.dense=int8: cannot run for dense with consistency.mode={mode}.")
    assert "Set comms.dense to one of none, fp16, bf16, dct." in finding
    assert codecs_of(_cfg(mode, name="int8")).dense == "bf16"
    assert codecs_of(_cfg(mode, name="int8", dense="none")).dense == "none"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dense_sparsity", 1.0),
        ("dense_sparsity", -0.1),
        ("pooled_sparsity", float("nan")),
        ("rows_sparsity", 1.0),
        ("refresh_steps", 0),
        ("dense_warmup_steps", -1),
        ("pooled_warmup_steps", -1),
        ("rows_warmup_steps", -1),
        ("smallest", -1),
        ("max_age", 0),
    ],
)
def test_thresholds_that_make_no_sense_are_named(key: str, value: float) -> None:
    cfg = _cfg("het", dense="dct")
    setattr(cfg.comms.dct, key, value)
    (finding,) = comms_findings(cfg)
    assert finding.startswith(f"comms.dct.{key}={value}: expected ")
