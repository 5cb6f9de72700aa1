"""Composition and checks: what is accepted, and the message for every kind of mistake."""

from pathlib import Path

import pytest

from hetrain.config import RunConfig
from hetrain.config.compose import chosen_experiment, compose, config_folders, expand, from_yaml, group_options, to_yaml
from hetrain.config.model_target import check_model
from hetrain.config.schema_keys import schema_keys
from hetrain.errors import ConfigError


def composed(*overrides: str, user: Path | None = None) -> RunConfig:
    return compose(overrides, config_folders(None if user is None else str(user)))


def refused(*overrides: str, user: Path | None = None) -> str:
    with pytest.raises(ConfigError) as error:
        composed(*overrides, user=user)
    return str(error.value)


def test_defaults_are_whole() -> None:
    cfg = composed()
    assert cfg.data.name == "sample"
    assert cfg.consistency.mode == "bsp"
    assert cfg.model["_target_"] == "hetrain.models.WDL"


def test_command_line_wins_over_experiment_over_group() -> None:
    cfg = composed("+experiment=criteo_het", "data=criteo", "data.path=x", "consistency.staleness=inf")
    assert (cfg.data.name, cfg.data.path, cfg.consistency.mode) == ("criteo", "x", "het")
    assert cfg.consistency.staleness == float("inf")
    assert composed("experiment=criteo_het").consistency.cache.capacity == 0.1


def test_yaml_round_trip() -> None:
    cfg = composed("+experiment=dcn_het", "consistency.staleness=inf", "train.max_steps=5", "name=x")
    assert from_yaml(to_yaml(cfg)) == cfg
    slow = composed("launch.slow_ranks={1: 3.0, 0: 2}", "launch.slow_random={share: 0.1}")
    assert slow.launch.slow_ranks == {1: 3.0, 0: 2.0}
    assert slow.launch.slow_random.share == 0.1
    assert from_yaml(to_yaml(slow)) == slow


@pytest.mark.parametrize("text", ["Ünïcode", "日本", "it's", "a b", "a(1)", "x=y", "a'b\\", 'q"uote'])
def test_any_text_is_a_value(text: str) -> None:
    assert composed(f"name={text}", f"data.path=/däta/{text}").data.path == f"/däta/{text}"


def test_a_sweep_over_any_text() -> None:
    assert [composed(*line).name for line in expand(["name=ü,it's"])] == ["ü", "it's"]


def test_saved_config_is_a_base(tmp_path: Path) -> None:
    saved = tmp_path / "config.yaml"
    saved.write_text(to_yaml(composed("train.batch_size=7", "name=x")))
    cfg = compose(["data=criteo", "launch.nproc=1"], config_folders(None), saved)
    assert (cfg.train.batch_size, cfg.data.name, cfg.launch.nproc, cfg.name) == (7, "criteo", 1, "x")


def test_users_configs_come_first(tmp_path: Path) -> None:
    for group, name, text in [
        ("data", "mine", "name: mine\npath: there\n"),
        ("comms", "none", "name: none # my own\n"),
        ("experiment", "mine", "# @package _global_\ndefaults:\n  - override /data: mine\ntrain:\n  epochs: 3\n"),
    ]:
        (tmp_path / group).mkdir()
        (tmp_path / group / f"{name}.yaml").write_text(text)
    cfg = composed("+experiment=mine", user=tmp_path)
    assert (cfg.data.path, cfg.train.epochs) == ("there", 3)
    assert group_options("data", config_folders(str(tmp_path))) == ["criteo", "mine", "sample"]
    assert refused(user=tmp_path / "nowhere").startswith("--config-dir")


def test_mistakes_in_a_users_file_name_the_file(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    bad = tmp_path / "data" / "bad.yaml"
    bad.write_text("name: x\npth: y\n")
    assert refused("data=bad", user=tmp_path).startswith(
        "in config 'data/bad': there is no key 'data.pth'. Did you mean 'data.path'?\n  Keys below 'data': name, path,"
    )
    bad.write_text("name: x\nmin_count: many\n")
    assert refused("data=bad", user=tmp_path) == (
        "in config 'data/bad': data.min_count=many: data.min_count must be a whole number."
    )
    bad.write_text("name: [x\n")
    assert "bad.yaml" in refused("data=bad", user=tmp_path)
    bad.write_text("- x\n")
    assert refused("data=bad", user=tmp_path).startswith(
        "in config 'data/bad': data is ['x'], of type list: expected a section with the keys name, path,"
    )
    bad.write_text("name: x\nsplit: 5\n")
    assert refused("data=bad", user=tmp_path).startswith(
        "in config 'data/bad': data.split is 5, of type int: expected a"
    )
    bad.write_text("name: [x]\n")
    assert refused("data=bad", user=tmp_path) == "in config 'data/bad': data.name: data.name must be text."
    bad.write_bytes(b"name: \xff\n")
    assert refused("data=bad", user=tmp_path).startswith("a config file among data/bad is no UTF-8 text: 'utf-8' codec")
    (tmp_path / "data" / "folder.yaml").mkdir()
    assert refused("data=folder", user=tmp_path).startswith("data=folder: there is no data 'folder'.")


MESSAGES = {
    "model=null": "model=null: model is one of: custom, dcn, deepfm, dlrm, dlrm_dcn, wdl; or set a key below it",
    "model._target_=a..b": "model._target_=a..b: expected the import path of a model class.",
    "data.sample.cardinalities=[100000000000]": "data.sample.cardinalities=[100000000000]: expected at most 200,000",
    "launch.timeout_s=0.001": "launch.timeout_s=0.001: expected at least 1.",
    "train.batch_size=1000000000": "train.batch_size=1000000000: expected at most 16,777,216.",
    "model.hidden=[256,64": "'model.hidden=[256,64' is not an override",
    "consistency.stalenes=3": "consistency.stalenes=3: there is no key 'consistency.stalenes'. Did you mean "
    "'consistency.staleness'?\n  Keys below 'consistency': mode, staleness, clock, validation, prefetch, late_leg, "
    "cache",
    "batch_size=3": "batch_size=3: there is no key 'batch_size'. Did you mean 'train.batch_size'?\n  Keys at the top:",
    "seed.x=1": "seed.x=1: there is no key 'seed.x'. Did you mean 'seed'?\n  'seed' holds a whole number",
    "train.batch_size=abc": "train.batch_size=abc: train.batch_size must be a whole number.",
    "train.batch_size=null": "train.batch_size=null: train.batch_size must be a whole number.",
    "train.max_steps=3.5": "train.max_steps=3.5: train.max_steps must be a whole number or null.",
    "data.shuffle=maybe": "data.shuffle=maybe: data.shuffle must be true or false.",
    "data.sample.cardinalities=[a]": "data.sample.cardinalities=[a]: data.sample.cardinalities must be a list",
    "data=crito": "data=crito: there is no data 'crito'. Did you mean 'criteo'?\n  data is one of: criteo, sample",
    "+experiment=nope": "+experiment=nope: there is no experiment 'nope'.\n  experiment is one of: criteo_bsp,",
    "consistency=asq": "consistency=asq: there is no consistency 'asq'.",
    "train=5": "train=5: 'train' is a section with the keys batch_size, epochs,",
    "data=sample,criteo": "data=sample,criteo: this sweeps over several values.\n  Add -m",
    "consistency.staleness=0,10": "consistency.staleness=0,10: this sweeps over several values.\n  Add -m",
    "~train.epochs": "~train.epochs: only keys below 'model' can be removed;",
    "foo": "'foo' is not an override (KEY=VALUE or GROUP=NAME)",
    "x=[1": "'x=[1' is not an override (KEY=VALUE or GROUP=NAME)",
    "data.path=${foo}": "data.path: Interpolation key 'foo' not found",
    "consistency.mode=asp": "consistency.cache.capacity=0.1: expected 0 with consistency.mode=asp. Without clocks",
    "consistency.late_leg=true": "consistency.late_leg=true: expected false with consistency.mode=bsp. Only the rounds",
    "consistency.mode=async": "consistency.mode=async: expected one of bsp, het, ssp, asp.",
    "consistency.staleness=-1": "consistency.staleness=-1.0: expected a whole number of updates, at least 0, or inf.",
    "consistency.staleness=nan": "consistency.staleness=nan: expected a whole number",
    "consistency.staleness=1.5": "consistency.staleness=1.5: expected a whole number",
    "consistency.clock=mean": "consistency.clock=mean: expected one of max, sum.",
    "consistency.cache.capacity=-0.1": "consistency.cache.capacity=-0.1: expected a share of all rows (0 to 1)",
    "consistency.cache.capacity=1.5": "consistency.cache.capacity=1.5: expected a share of all rows (0 to 1)",
    "comms.name=fp8": "comms.name=fp8: expected one of none, fp16, bf16, int8, dct.",
    "comms.rows=fp16": "comms.rows=fp16: consistency.mode=bsp has no such path. Set comms.pooled_forward or",
    "comms.dct.max_age=0": "comms.dct.max_age=0: expected at least 1.",
    "planner.name=greedy": "planner.name=greedy: expected one of torchrec, hierarchical, round_robin, memory_balanced,",
    "planner.column_slice_threshold=9": "planner.column_slice_threshold=9: expected null with planner.name=torchrec.",
    "planner.tiers=[ddr]": "planner.tiers=['ddr']: expected null with planner.name=torchrec. It belongs to the others.",
    "planner.constraints={C1: {columns: 8}}": "planner.constraints=C1: expected none with planner.name=torchrec.",
    "cluster.nodes=0": "cluster.nodes=0: expected at least 1.",
    "cluster.ddr_gib=1e308": "cluster.ddr_gib=1e+308: expected at most 8,589,934,592.",
    "cluster.hbm_gib=1e308": "cluster.hbm_gib=1e+308: expected at most 8,589,934,592.",
    "planner.memory_gib=1e308": "planner.memory_gib=1e+308: expected at most 8,589,934,592.",
    "cluster.latency_us=inf": "cluster.latency_us=inf: expected at most 1,000,000,000.",
    "cluster.device=tpu": "cluster.device=tpu: expected one of cuda, cpu.",
    "cluster.intra_gb_s=0": "cluster.intra_gb_s=0.0: expected a number above 0.",
    "cluster.reserve=1": "cluster.reserve=1.0: expected a share of the memory,",
    "planner.sharding_types=[rows]": "planner.sharding_types=rows: expected one of data_parallel,",
    "planner.sharding_types=[]": "planner.sharding_types=[]: expected at least one of",
    "model.embedding_dim=6": "model.embedding_dim=6: expected a positive multiple of 4.",
    "model._target_=WDL": "model._target_=WDL: expected the import path of a model class.",
    "optimizer.rows.name=adam": "optimizer.rows.name=adam: expected one of sgd, adagrad, rowwise_adagrad. FBGEMM has",
    "optimizer.dense.name=lamb": "optimizer.dense.name=lamb: expected one of sgd, adagrad, adam, adamw.",
    "optimizer.rows.lr=0": "optimizer.rows.lr=0.0: expected a number above 0.",
    "optimizer.schedule.decay=cosine": "optimizer.schedule.decay_steps=0: expected more than",
    "data.split.train=0": "data.split.train=0: expected a share or row count above 0.",
    "data.split.train=0.9": "data.split={'train': 0.9, 'validation': 0.1, 'test': 0.1}: expected shares that add up to",
    "data.split.test=100": "data.split={'train': 0.8, 'validation': 0.1, 'test': 100.0}: expected either shares",
    "data.on_bad_row=ignore": "data.on_bad_row=ignore: expected one of error, skip.",
    "cluster.servers=-1": "cluster.servers=-1: expected at least 0.",
    "cluster.servers=1": "cluster.servers=1: expected 0 with consistency.mode=bsp. TorchRec shards",
    "cluster.server=1": "cluster.server=1: there is no key 'cluster.server'. Did you mean 'cluster.servers'?",
    "launch.nproc=0": "launch.nproc=0: expected at least 1.",
    "launch.max_restarts=-1": "launch.max_restarts=-1: expected at least 0.",
    "launch.slow_ranks={1: 0.5}": "launch.slow_ranks={1: 0.5}: expected the ranks of workers, from 0, each with a",
    "launch.slow_ranks={1: nan}": "launch.slow_ranks={1: nan}: expected the ranks of workers, from 0, each with a",
    "launch.slow_ranks={-1: 3}": "launch.slow_ranks={-1: 3.0}: expected the ranks of workers, from 0, each with a",
    "launch.slow_ranks={a: 3}": "launch.slow_ranks={a: 3}: launch.slow_ranks must be a mapping as in {KEY: VALUE}",
    "launch.slow_ranks={1: x}": "launch.slow_ranks={1: x}: launch.slow_ranks must be a mapping as in {KEY: VALUE}",
    "planner.constraints={C1: {columns: 8.5}}": "planner.constraints.C1.columns: Value '8.5' of type 'float'",
    "planner.constraints=[C1]": "planner.constraints=[C1]: planner.constraints must be a mapping as in {KEY: VALUE}, "
    "each KEY text, each VALUE a mapping with some of the keys sharding_types, tiers, columns.",
    "launch.slow_ranks=[3]": "launch.slow_ranks=[3]: launch.slow_ranks must be a mapping as in {KEY: VALUE}",
    "launch.slow_random={share: 2}": "launch.slow_random.share=2.0: expected a share between 0 and 1.",
    "launch.slow_random.factor=0.9": "launch.slow_random.factor=0.9: expected a factor of at least 1.",
    "launch.slow_random={shar: 0.1}": "there is no key 'launch.slow_random.shar'. Did you mean",
    "data.sample.cardinalities={1: 3}": "data.sample.cardinalities={1: 3}: data.sample.cardinalities must be a list",
    "launch.device=tpu": "launch.device=tpu: expected one of auto, cpu, cuda.",
    "train.batch_size=0": "train.batch_size=0: expected at least 1.",
    "checkpoint.resume=nowhere": "checkpoint.resume=nowhere: expected auto, never or an existing checkpoint folder.",
    "name=a/b": "name=a/b: expected a folder name without '/'",
    "seed=-1": "seed=-1: expected 0 <= seed < 2^63.",
}


@pytest.mark.parametrize(("override", "message"), MESSAGES.items(), ids=MESSAGES)
def test_message(override: str, message: str) -> None:
    assert refused(override).startswith(message)


def test_pairs_that_cannot_be() -> None:
    assert "Its state does not add up, so updates cannot be held back" in refused(
        "consistency=het", "optimizer.rows.name=adam"
    )
    assert "The store holds whole rows" in refused("consistency=het", "planner.sharding_types=[column_wise]")
    assert "planner.tiers=disk: expected one of hbm, cached, ddr." in refused(
        "planner=hierarchical", "planner.tiers=[disk]"
    )
    wrong = refused("planner=hierarchical", "planner.constraints={C1: {columns: 6, tiers: [ssd]}}")
    assert "planner.constraints.C1.columns=6: expected a multiple of 4." in wrong
    assert "planner.constraints.C1.tiers=ssd: expected one of hbm, cached, ddr." in wrong
    given = refused(
        "planner=hierarchical",
        "planner.plan=one",
        "planner.data_parallel_threshold=9",
        "planner.constraints={C1: {columns: 8}}",
    )
    assert "planner.data_parallel_threshold=9: expected null with planner.plan. The plan that is given decides" in given
    assert "planner.constraints=C1: expected none with planner.plan. The plan that is given decides" in given
    assert "store.device=cuda: expected cpu" in refused("store.device=cuda", "launch.device=cpu")
    assert "expected false with consistency.mode=ssp" in refused("consistency=ssp", "consistency.late_leg=true")
    assert "cluster.gpus_per_node=65536 x 2: expected at most 65,536 ranks" in refused(
        "cluster.nodes=65536", "cluster.gpus_per_node=2"
    )
    served = ("consistency=het", "cluster.servers=2")
    assert composed(*served).cluster.servers == 2
    assert "store.device=cuda: expected cpu with cluster.servers=2. Servers" in refused(*served, "store.device=cuda")
    assert "expected 0 with checkpoint.resume=never" in refused("launch.max_restarts=1", "checkpoint.resume=never")
    assert "Early stopping needs validation rows" in refused("train.patience=2", "data.split.validation=0")


def test_all_findings_come_in_one_message() -> None:
    assert refused("train.batch_size=0", "seed=-1").startswith("2 settings cannot run:\n  seed=-1:")


def test_every_key_has_a_type_in_words() -> None:
    from hetrain.config.schema_keys import expected

    unknown = [key for key in schema_keys() if key != "model" and expected(key) == "another value"]
    assert unknown == []


def test_sweeps_expand_as_hydra_does() -> None:
    assert expand(["a=1,2", "b=x"]) == [["a=1", "b=x"], ["a=2", "b=x"]]
    assert expand(["+experiment=a,b", "c=range(0,2)"])[-1] == ["+experiment=b", "c=1"]
    assert expand(["a=choice(3,4)", "b=[1,2]"]) == [["a=3", "b=[1,2]"], ["a=4", "b=[1,2]"]]
    with pytest.raises(ConfigError, match="Sweep with a comma list"):
        expand(["a=interval(0,1)"])


def test_chosen_experiment() -> None:
    assert chosen_experiment(["+experiment=a", "seed=1"]) == "a"
    assert chosen_experiment(["seed=1"]) is None


class Mine:
    def __init__(
        self, bags: object, dense_features: int, sparse_features: list[str], embedding_dim: int, width: int = 1
    ):
        pass


class NotAModel:
    def __init__(self, width: int = 1) -> None:
        pass


def test_model_arguments() -> None:
    mine = f"{__name__}.Mine"
    check_model({"_target_": mine, "embedding_dim": 4, "width": 3})
    for model, message in [
        (
            {"_target_": mine, "embedding_dim": 4, "widht": 3},
            "model.widht=3: Mine has no argument 'widht'. Did",
        ),
        ({"_target_": mine}, "model: Mine needs model.embedding_dim as well."),
        ({"_target_": "nowhere.Mine"}, "model._target_=nowhere.Mine: there is no module 'nowhere'."),
        ({"_target_": f"{__name__}.Yours"}, "has no class 'Yours', but"),
        ({"_target_": "collections.OrderedDict"}, "its arguments cannot be read, so it is no model class."),
        ({"_target_": f"{__name__}.NotAModel"}, "its constructor lacks bags, dense_features, sparse_features."),
    ]:
        with pytest.raises(ConfigError) as error:
            check_model(model)
        assert message in str(error.value)


@pytest.mark.parametrize("value", ["0", "0.5", "1000", "512MiB", "0.5 GB"])
def test_a_capacity_is_a_number_or_memory(value: str) -> None:
    cfg = composed("+experiment=criteo_het", f"consistency.cache.capacity={value}")
    assert str(cfg.consistency.cache.capacity) == value
    assert from_yaml(to_yaml(cfg)) == cfg


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "consistency.cache.capacity=9 lives",
            "consistency.cache.capacity=9 lives: expected a share of all rows (0 to",
        ),
        ("consistency.cache.capacity=1.5", "consistency.cache.capacity=1.5: expected a share of all rows (0 to 1), a"),
        ("consistency.cache.capacity=true", "consistency.cache.capacity=true: consistency.cache.capacity must be a"),
        ("consistency.cache.policy=fifo", "consistency.cache.policy=fifo: expected one of lru, lfu, light_lfu."),
        ("consistency.validation=never", "consistency.validation=never: expected one of directory, clock."),
        ("store.index=tree", "store.index=tree: expected one of array, hash."),
        ("consistency.mode=bsp", "store.index=hash: expected array with consistency.mode=bsp. TorchRec"),
    ],
)
def test_refused_options_of_the_store(override: str, message: str) -> None:
    hashed = ["store.index=hash"] if override == "consistency.mode=bsp" else []
    assert refused("+experiment=criteo_het", *hashed, override).startswith(message)
