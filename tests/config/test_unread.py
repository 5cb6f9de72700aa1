"""Settings without effect: refused by name, passed over in a sweep of which other jobs read them."""

from copy import deepcopy
from operator import attrgetter
from pathlib import Path

import pytest

from hetrain.cli import sweep
from hetrain.config.checks import check
from hetrain.config.compose import compose, config_folders, from_yaml, to_yaml
from hetrain.config.schema_keys import schema_keys
from hetrain.config.unread import KEYS, READ_IN
from hetrain.errors import ConfigError

FOLDERS = config_folders(None)
MODES = ("bsp", "het", "ssp", "asp")
OTHER: dict[str, object] = {
    "consistency.staleness": 7,
    "consistency.clock": "sum",
    "consistency.validation": "clock",
    "consistency.prefetch": False,
    "consistency.late_leg": True,
    "consistency.cache.capacity": 0.3,
    "consistency.cache.policy": "lfu",
    "telemetry.audit_every": 5,
    "store.device": "cuda",
}


def refused(*words: str) -> str:
    with pytest.raises(ConfigError) as error:
        compose(words, FOLDERS)
    return str(error.value)


def test_the_tables_name_keys_that_there_are() -> None:
    assert set(KEYS) <= set(schema_keys())
    of_consistency = {key for key in schema_keys() if key.startswith("consistency.")}
    assert of_consistency - set(KEYS) == {"consistency.mode", "consistency.cache"}
    assert {key for key in schema_keys() if key.startswith("comms.dct.")} <= set(KEYS)
    assert OTHER.keys() == READ_IN.keys()


@pytest.mark.parametrize("mode", MODES)
def test_a_key_of_other_modes_is_refused(mode: str) -> None:
    composed = compose([f"consistency={mode}"], FOLDERS)
    for key, value in OTHER.items():
        cfg = deepcopy(composed)
        section, _, last = key.rpartition(".")
        setattr(attrgetter(section)(cfg), last, value)
        if mode in READ_IN[key]:
            check(cfg, strict=True)
            continue
        with pytest.raises(ConfigError) as error:
            check(cfg, strict=True)
        wrong = str(error.value)
        assert wrong.startswith(f"{key}={str(value).lower()}: expected ")
        assert f"with consistency.mode={mode}" in wrong
        assert wrong.count(f"{key}=") == 1


def test_what_is_said() -> None:
    assert refused("consistency.staleness=10") == (
        "consistency.staleness=10: expected its default, 100, with consistency.mode=bsp, which does not read it. Take "
        "consistency=het or ssp, or leave it out."
    )
    assert refused("consistency=het", "comms.dct.rows_sparsity=0.5").endswith("Set comms.rows=dct, or leave it out.")
    assert refused("comms=dct", "comms.dct.max_age=3") == (
        "comms.dct.max_age=3: expected its default, null, as no rows travel as dct, with consistency.mode=bsp. Leave "
        "it out."
    )


def test_dct_is_read_path_by_path() -> None:
    compose(["comms=dct", "comms.dct.pooled_sparsity=0.9", "comms.dct.smallest=5"], FOLDERS)
    compose(["consistency=het", "comms.rows=dct", "comms.dct.max_age=3", "comms.dct.refresh_steps=9"], FOLDERS)
    assert "comms.dct.smallest=5" in refused("consistency=het", "comms.rows=dct", "comms.dct.smallest=5")


def test_a_default_may_be_written_down_and_an_old_run_read() -> None:
    compose(["consistency.staleness=100", "consistency.validation=directory"], FOLDERS)
    old = compose([], FOLDERS)
    old.consistency.staleness = 7
    assert from_yaml(to_yaml(old)).consistency.staleness == 7


def test_a_saved_config_is_taken_as_it_is(tmp_path: Path) -> None:
    saved = tmp_path / "config.yaml"
    saved.write_text(to_yaml(compose(["consistency=het", "consistency.staleness=7"], FOLDERS)))
    assert compose(["consistency.mode=bsp"], FOLDERS, saved).consistency.staleness == 7


def test_a_sweep_over_modes_passes_over_what_some_do_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["consistency=bsp,het,asp", "consistency.staleness=7", "consistency.cache.capacity=0.3"]
    bsp, het, asp = sweep._jobs(words, FOLDERS)
    assert (bsp.error, het.error, asp.error) == (None, None, None)
    assert [setting.named for setting in bsp.passed_over] == [
        "consistency.staleness=7",
        "consistency.cache.capacity=0.3",
    ]
    assert het.passed_over == []
    assert bsp.config is not None
    assert het.config is not None
    assert asp.config is not None
    assert (bsp.config.consistency.staleness, het.config.consistency.staleness) == (100, 7)
    assert asp.config.consistency.cache.capacity == 0


def test_what_no_job_of_a_sweep_reads_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    jobs = sweep._jobs(["consistency=bsp,asp", "consistency.staleness=7"], FOLDERS)
    assert all("consistency.staleness=7: expected its default" in str(job.error) for job in jobs)
    assert list(tmp_path.iterdir()) == []
