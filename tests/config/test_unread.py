"""Settings without effect: refused by name, passed over in a sweep of which other jobs read them."""

from copy import deepcopy
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import pytest
import yaml

from hetrain.cli import sweep
from hetrain.config import ConstraintConfig, RunConfig
from hetrain.config.checks import check
from hetrain.config.compose import compose, config_folders, expand, from_yaml, to_yaml
from hetrain.config.schema_keys import is_section, schema_keys
from hetrain.config.swept import compose_together
from hetrain.config.unread import KEYS, READ_IN, passing_over, unread
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


@pytest.mark.parametrize(
    ("words", "passed"),
    [
        ("+experiment=criteo_het consistency=bsp,asp", [[], ["consistency.cache.capacity=0.1"]]),
        ("consistency=bsp,asp consistency.cache.capacity=0", [["consistency.cache.capacity=0"], []]),
        ("consistency=bsp,het comms.rows=fp16", [["comms.rows=fp16"], []]),
        (
            "consistency=bsp,het comms.pooled_forward=none,fp16",
            [[], [], [], ["comms.pooled_forward=fp16"]],
        ),
        (
            "consistency=bsp,het consistency.staleness=7 comms.pooled_backward=bf16",  # each reads one of them
            [["consistency.staleness=7"], ["comms.pooled_backward=bf16"]],
        ),
        (
            "consistency=het consistency.cache.capacity=0,0.2 consistency.staleness=0,7",
            [[], ["consistency.staleness=7"], [], []],
        ),
    ],
)
def test_what_some_jobs_of_a_sweep_read_the_others_pass_over(words: str, passed: list[list[str]]) -> None:
    jobs = compose_together(expand(words.split()), FOLDERS, "train")
    assert [job.error for job in jobs] == [None] * len(passed)
    assert [[setting.named for setting in job.passed_over] for job in jobs] == passed


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        ("consistency=ssp,asp comms.pooled_forward=fp16", "comms.pooled_forward=fp16: consistency.mode="),
        ("consistency=het,ssp,asp comms.pooled_backward=fp16", "comms.pooled_backward=fp16: consistency.mode="),
        ("+experiment=criteo_het consistency=asp seed=1,2", "consistency.cache.capacity=0.1: expected 0 with"),
        ("consistency=bsp,het consistency.staleness=7 store.device=cuda launch.device=cpu", "store.device=cuda: "),
    ],
)
def test_what_no_job_that_can_run_reads_is_refused(words: str, refused: str) -> None:
    jobs = compose_together(expand(words.split()), FOLDERS, "train")
    assert all(job.config is None and job.passed_over == [] for job in jobs)
    assert all(refused in str(job.error) for job in jobs)


def test_what_only_a_job_that_cannot_run_reads_is_refused() -> None:
    words = ["consistency=bsp,het", "consistency.staleness=7", "seed=1"]
    bsp, het = compose_together(expand(words), FOLDERS, "train", not_het)
    assert str(het.error) == "not het"
    assert str(bsp.error).startswith("consistency.staleness=7: expected its default, 100, with consistency.mode=bsp")


def not_het(cfg: RunConfig) -> None:
    if cfg.consistency.mode == "het":
        raise ConfigError("not het")


def test_a_path_that_is_not_there_may_be_none() -> None:
    compose(["consistency=het", "comms.pooled_forward=none"], FOLDERS)
    compose(["comms.rows=none"], FOLDERS)
    assert "comms.rows=fp16: consistency.mode=bsp has no such path" in refused("comms.rows=fp16")


def test_staleness_where_no_row_is_kept() -> None:
    empty = ["consistency=het", "consistency.cache.capacity=0"]
    assert refused(*empty, "consistency.staleness=10") == (
        "consistency.staleness=10: expected its default, 100, with consistency.cache.capacity=0, which keeps no row, "
        "so that none is behind. Set consistency.cache.capacity above 0, or leave it out."
    )
    compose([*empty, "consistency.staleness=0"], FOLDERS)
    compose(["consistency=ssp", "consistency.cache.capacity=0", "consistency.staleness=10"], FOLDERS)  # its lead
    compose(["+experiment=criteo_het_paper", "consistency.cache.capacity=0"], FOLDERS)


def test_what_no_job_of_a_sweep_reads_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    jobs = sweep._jobs(["consistency=bsp,asp", "consistency.staleness=7"], FOLDERS)
    assert all("consistency.staleness=7: expected its default" in str(job.error) for job in jobs)
    assert list(tmp_path.iterdir()) == []


# Keys that every run reads: whoever adds a key says here, or in a rule, who reads it.
READ_BY_ALL = {
    *("seed", "name", "runs", "data.shuffle", "data.prefetch", "plan.tables", "store.index"),
    *("optimizer.dense.name", "optimizer.dense.lr", "optimizer.dense.weight_decay"),
    *("optimizer.rows.name", "optimizer.rows.lr", "optimizer.schedule.warmup_steps", "optimizer.schedule.decay"),
    *("planner.plan", "planner.constraints"),  # whose rules have findings of their own in planner_checks.py
    *("consistency.mode", "comms.dense"),
    *("cluster.servers", "cluster.nodes", "cluster.gpus_per_node", "store.init_bound"),
    *("launch.device", "launch.threads", "launch.timeout_s", "launch.max_restarts", "launch.slow_ranks"),
    "launch.slow_random.share",
    *(f"train.{key}" for key in ("batch_size", "epochs", "max_steps", "eval_every", "eval_batch_size", "patience")),
    *("checkpoint.every", "checkpoint.keep", "checkpoint.resume", "telemetry.log_every", "telemetry.tensorboard"),
}


def test_every_key_is_read_by_all_or_has_a_rule() -> None:
    leaves = {key for key in schema_keys() if not is_section(key)}
    assert leaves - set(KEYS) == READ_BY_ALL


READING = (  # of the words below, those that are read
    *("data=", "data.shuffle=", "model=", "planner.plan=", "plan.tables=", "consistency=", "consistency.prefetch="),
    *("consistency.cache.capacity=", "optimizer.rows.name=", "optimizer.dense.name=", "cluster.device=cpu"),
    *("planner.sharding_types=null", "planner.sharding_types=[table"),
    *("cluster.gpus_per_node=", "comms.rows=", "comms.dense="),
)


NAMES = {"planner": "planner.name", "data": "data.name", "consistency": "consistency.mode", "comms": "comms.name"}


@pytest.fixture(scope="module")
def plain() -> RunConfig:
    return compose([], FOLDERS)


def idle(plain: RunConfig, verb: str, *words: str) -> list[str]:
    """What is refused of `words`, laid over the config `plain`, without the advice."""
    cfg, said = deepcopy(plain), {}
    for word in words:
        key, _, text = word.partition("=")
        said[key] = yaml.safe_load(text)
        section, _, last = NAMES.get(key, key).rpartition(".")
        if key == "model":
            cfg.model = {"_target_": f"hetrain.models.{text.upper()}", "embedding_dim": 16}
        elif section == "model":
            cfg.model[last] = said[key]
        elif section:
            setattr(attrgetter(section)(cfg), last, said[key])
    return [str(setting).rpartition(". ")[0] for setting in unread(cfg, verb, said)]


@pytest.mark.parametrize(
    ("verb", "read", "words"),
    [
        ("train", "optimizer.schedule.decay=linear", "optimizer.schedule.decay_steps=9 optimizer.schedule.final=0.5"),
        ("train", "optimizer.rows.name=adagrad", "optimizer.rows.name=sgd optimizer.rows.eps=0.1"),
        ("train", "optimizer.dense.name=adam", "optimizer.dense.name=sgd optimizer.dense.eps=0.1"),
        ("train", "data.shuffle=true", "data.shuffle=false data.shuffle_window=7"),
        ("train", "data=sample", "data=criteo data.sample.rows=500 data.split.train=0.5"),
        ("train", "planner.plan=null", "planner.plan=here planner=hierarchical planner.memory_gib=3"),
        ("train", "planner.plan=null", "planner.plan=here planner.tiers=[hbm] planner.sharding_types=[row_wise]"),
        ("train", "planner=hierarchical", "cluster.profile=here cluster.ddr_gib=9 cluster.reserve=0.3"),
        ("train", "planner=hierarchical", "cluster=laptop"),
        ("train", "model=wdl", "model=dlrm model.cross_layers=2 model.cross_rank=8"),
        ("train", "launch.slow_random.share=0.1", "launch.slow_random.factor=3"),
        ("train", "consistency.prefetch=true", "consistency=het consistency.prefetch=false consistency.late_leg=true"),
        (
            "train",
            "consistency.cache.capacity=0.2",
            "consistency=het consistency.cache.capacity=0 consistency.cache.policy=lfu consistency.validation=clock",
        ),
        ("train", "comms.dense=null", "consistency=het comms=int8 comms.rows=bf16 comms.dense=none"),
        ("plan", "cluster.device=cuda", "cluster.device=cpu cluster.hbm_gib=80 cluster.hbm_gb_s=900"),
        ("plan", "plan.tables=null", "plan.tables=merlin_tiny model.embedding_dim=8 data.path=there"),
        ("plan", "cluster.nodes=2", "consistency=het cluster.inter_gb_s=9"),
        ("plan", "cluster.gpus_per_node=2", "cluster.gpus_per_node=1 cluster.intra_gb_s=9"),
        ("plan", "planner.sharding_types=null", "planner.sharding_types=[table_wise] planner.row_slice_threshold=9"),
        (
            "plan",
            "planner.sharding_types=null",
            "planner.sharding_types=[table_wise] planner.data_parallel_threshold=9",
        ),
        ("plan", "optimizer.rows.name=sgd", "planner.sharding_types=null planner.column_slice_threshold=9"),
        ("plan", "consistency=bsp", "consistency=het planner.tiers=[hbm]"),
        ("plan", "cluster.gpus_per_node=null", "cluster.gpus_per_node=4 launch.nproc=2"),
    ],
)
def test_what_nothing_reads_is_refused_where_nothing_reads_it(
    plain: RunConfig, verb: str, read: str, words: str
) -> None:
    said, first = words.split(), read.partition("=")[0]
    found = idle(plain, verb, *said)
    assert {text.partition(":")[0] for text in found} == {word for word in said if not word.startswith(READING)}
    assert all(": expected " in text for text in found)
    assert idle(plain, verb, *(word for word in said if not word.startswith(f"{first}=")), read) == []


def test_a_list_of_tables_has_no_use_for_a_model_and_data() -> None:
    words = ["plan.tables=merlin_tiny", "model=dlrm", "data=criteo"]
    with pytest.raises(ConfigError) as error:
        compose(words, FOLDERS, verb="plan")
    assert str(error.value).splitlines()[1:] == [
        "  model=dlrm: expected its default, wdl, as plan.tables says what is planned. Leave it out.",
        "  data=criteo: expected its default, sample, as plan.tables says what is planned. Leave it out.",
    ]
    compose(words[1:], FOLDERS, verb="plan")
    compose([words[0], "model=wdl", "data=sample"], FOLDERS, verb="plan")  # which say nothing
    for experiment in ("merlin_tiny", "dlrm_bsp"):
        compose([words[0], f"+experiment={experiment}"], FOLDERS, verb="plan")


def test_what_only_another_verb_reads(plain: RunConfig) -> None:
    raw = ["data=criteo", "data.raw=day_*.gz", "data.min_count=3", "data.on_bad_row=skip", "data.split.train=0.5"]
    assert idle(plain, "prepare", *raw) == []
    assert [text.partition("=")[0] for text in idle(plain, "stats", *raw)] == [
        word.partition("=")[0] for word in raw[1:]
    ]
    assert idle(plain, "prepare", "data.min_count=3") == [
        "data.min_count=3: expected its default, 1, as the sample is generated"
    ]
    assert (
        idle(plain, "plan", "plan.out=there", "cluster.device=cpu", "cluster.ddr_gib=9", "cluster.profile=here") == []
    )
    assert idle(plain, "plan", "cluster.gpus_per_node=2", "launch.nproc=2") == []  # which say the same
    assert len(idle(plain, "train", "plan.out=there", "cluster.device=cpu")) == 2
    assert idle(plain, "plan", "cluster.latency_us=9") == idle(plain, "train", "cluster.latency_us=9") != []


def test_a_file_may_say_what_a_verb_does_not_read(tmp_path: Path) -> None:
    for group, text in {"data": "name: criteo\nmin_count: 9\nraw: day\n", "cluster": "ddr_gib: 9\n"}.items():
        (tmp_path / group).mkdir()
        (tmp_path / group / "mine.yaml").write_text(text)
    folders = config_folders(str(tmp_path))
    assert compose(["data=mine"], folders, verb="train").data.min_count == 9
    with pytest.raises(ConfigError, match=r"^cluster=mine: expected its default, local, with planner=torchrec"):
        compose(["cluster=mine"], folders, verb="train")
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "lab.yaml").write_text("# @package _global_\ndefaults:\n  - override /cluster: mine\n")
    assert compose(["+experiment=lab", "planner.plan=x"], folders, verb="train").cluster.ddr_gib == 9


def test_a_sweep_passes_over_rules_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["optimizer.schedule.decay=none,linear", "optimizer.schedule.decay_steps=9", "optimizer.schedule.final=0.5"]
    steady, decaying = sweep._jobs(words, FOLDERS)
    assert [setting.named for setting in steady.passed_over] == words[1:]
    assert decaying.passed_over == []
    words = ["planner=torchrec,hierarchical", "cluster=laptop", "cluster.reserve=0.5"]
    plain, ours = sweep._jobs(words, FOLDERS)
    assert [setting.named for setting in plain.passed_over] == words[1:]
    assert plain.config is not None
    assert ours.config is not None
    assert (plain.config.cluster.ddr_gib, plain.config.cluster.reserve, plain.config.cluster.nodes) == (None, 0.15, 1)
    assert (ours.config.cluster.ddr_gib, ours.config.cluster.reserve) == (16, 0.5)


def test_an_argument_of_a_model_is_passed_over_by_leaving_it_out(plain: RunConfig) -> None:
    cfg = replace(plain, model={"_target_": "hetrain.models.DLRM", "interaction": "dot", "cross_layers": 2})
    cleared, passed = passing_over(cfg, {"model.cross_layers"}, "train", {"model.cross_layers": 2})
    assert [setting.named for setting in passed] == ["model.cross_layers=2"]
    assert "cross_layers" not in cleared.model


def test_a_value_that_an_experiment_sets_is_said_to_come_from_there(tmp_path: Path) -> None:
    asp = refused("+experiment=criteo_het", "consistency=asp")
    assert asp.startswith("consistency.cache.capacity=0.1: expected 0 with consistency.mode=asp.")
    assert asp.endswith(
        " +experiment=criteo_het sets it; consistency.cache.capacity=0 on the command line overrides that."
    )
    ssp = refused("+experiment=criteo_het_paper", "consistency=ssp").splitlines()
    assert ssp[1] == (
        "  consistency.validation=clock: expected its default, directory, with consistency.mode=ssp, which does not "
        "read it. +experiment=criteo_het_paper sets it. Take consistency=het, or type consistency.validation=directory."
    )
    typed_too = ["consistency.validation=directory", "consistency.prefetch=true"]
    compose(["+experiment=criteo_het_paper", "consistency=ssp", *typed_too], FOLDERS)
    saved = tmp_path / "run" / "config.yaml"
    saved.parent.mkdir()
    saved.write_text(to_yaml(compose(["consistency=het"], FOLDERS)))
    with pytest.raises(ConfigError) as error:
        compose(["consistency.mode=asp"], FOLDERS, saved)
    assert f"{saved} sets it; consistency.cache.capacity=VALUE on the command line" in str(error.value)
    (tmp_path / "optimizer").mkdir()
    (tmp_path / "optimizer" / "mine.yaml").write_text("rows: {lr: -1.0}\n")
    with pytest.raises(ConfigError, match=r"lr=-1.0: expected .* optimizer=mine sets it; optimizer.rows.lr=VALUE"):
        compose(["optimizer=mine"], config_folders(str(tmp_path)))


def test_rules_of_tables_that_the_engine_has_no_use_for(plain: RunConfig) -> None:
    cfg = deepcopy(plain)
    cfg.planner.name, cfg.planner.constraints = "hierarchical", {"C1": ConstraintConfig(tiers=["ddr"], columns=8)}
    check(cfg)
    with pytest.raises(ConfigError) as error:
        check(cfg, strict=True)
    assert str(error.value).startswith(
        "planner.constraints.C1.columns=8: expected null with optimizer.rows.name=rowwise_adagrad, whose tables are not"
    )
    cfg.optimizer.rows.name = "adagrad"
    check(cfg, strict=True)
    cfg.consistency.mode = "het"
    with pytest.raises(ConfigError) as error:
        check(cfg, strict=True)
    assert "planner.constraints.C1.tiers=['ddr']: expected none with consistency.mode=het" in str(error.value)
    assert "planner.constraints.C1.columns=8: expected null with consistency.mode=het" in str(error.value)
