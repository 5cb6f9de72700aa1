"""When nothing reads a setting: every key of which that can be said, with the reason and what to do instead.

A key that is in no rule here and in none of the tables is read by every run.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from hetrain.codec import OF_MODE, PATHS
from hetrain.config.comms import codecs_of
from hetrain.config.schema import RunConfig

# Key -> the consistency modes that read it.
READ_IN = {
    "consistency.staleness": ("het", "ssp"),
    "consistency.clock": ("het",),
    "consistency.validation": ("het",),
    "consistency.prefetch": ("het",),
    "consistency.late_leg": ("het",),
    "consistency.cache.capacity": ("het", "ssp"),
    "consistency.cache.policy": ("het", "ssp"),
    "telemetry.audit_every": ("het", "ssp", "asp"),
    "store.device": ("het",),  # with asp and ssp it is refused in words of its own
}
# Key of comms.dct -> the paths whose dct reads it.
READ_BY = {
    "dense_sparsity": ("dense",),
    "pooled_sparsity": ("pooled_forward",),
    "rows_sparsity": ("rows",),
    "refresh_steps": ("rows", "dense"),
    "dense_warmup_steps": ("dense",),
    "pooled_warmup_steps": ("pooled_forward",),
    "rows_warmup_steps": ("rows",),
    "smallest": ("dense",),
    "max_age": ("rows",),
}
PATH_WORDS = {"rows": "rows", "pooled_forward": "pooled embeddings", "dense": "dense gradients"}
RAW_ALONE = ("data.raw", "data.min_count", "data.on_bad_row")
SPLIT = ("data.split.train", "data.split.validation", "data.split.test")
SAMPLE = ("rows", "dense", "cardinalities", "zipf", "base_rate", "seed")
GPU_ALONE = ("cluster.hbm_gib", "cluster.hbm_gb_s", "cluster.host_link_gb_s")
# What a cluster says of its machines beside how many there are.
MACHINES = (
    *("hbm_gib", "ddr_gib", "reserve", "hbm_gb_s", "ddr_gb_s", "host_link_gb_s", "intra_gb_s", "inter_gb_s", "profile"),
)

Words = tuple[str, str]  # where it is not read; what to do to have it read
PLANNED = "with planner.plan, which has decided", "Make another plan with it (`hetrain plan`)"


@dataclass(frozen=True)
class Rule:
    """Keys, and the words for a config and a verb ("": any) that do not read them; None: they are read.

    typed: counts where the command line says it. A file may: what it describes is there for other verbs too.
    """

    keys: tuple[str, ...]
    unread: Callable[[RunConfig, str], Words | None]
    typed: bool = False


def _of_mode(key: str) -> Rule:
    def unread(cfg: RunConfig, verb: str) -> Words | None:
        mode = cfg.consistency.mode
        if mode in READ_IN[key]:
            return None
        return f"with consistency.mode={mode}, which does not read it", f"Take consistency={either(READ_IN[key])}"

    return Rule((key,), unread)


def _of_dct(key: str) -> Rule:
    def unread(cfg: RunConfig, verb: str) -> Words | None:
        mode, codecs = cfg.consistency.mode, codecs_of(cfg)
        if any(getattr(codecs, path) == "dct" for path in READ_BY[key]):
            return None
        has = [f"comms.{path}=dct" for path in READ_BY[key] if path in OF_MODE.get(mode, ())]
        what = either([PATH_WORDS[path] for path in READ_BY[key]])
        return f"as no {what} travel as dct, with consistency.mode={mode}", f"Set {either(has)}" if has else ""

    return Rule((f"comms.dct.{key}",), unread)


def _of_path(path: str) -> Rule:
    """Outside a sweep refused in words of its own (comms_findings)."""

    def unread(cfg: RunConfig, verb: str) -> Words | None:
        mode = cfg.consistency.mode
        return None if path in OF_MODE.get(mode, PATHS) else (f"as consistency.mode={mode} has no such path", "")

    return Rule((f"comms.{path}",), unread)


def _when(met: Callable[[RunConfig], bool], why: str, instead: str = "", verbs: Collection[str] = ()) -> Any:
    """`unread` of a rule: the same words wherever the condition is met; `verbs` empty: in all of them."""

    def unread(cfg: RunConfig, verb: str) -> Words | None:
        return (why, instead) if met(cfg) and (not verbs or verb in verbs) else None

    return unread


def _from_raw(cfg: RunConfig, verb: str) -> Words | None:
    if verb in ("", "prepare"):
        return None
    return f"with `hetrain {verb}`, which takes data as they were prepared", "Give it to `hetrain prepare`"


def _split(cfg: RunConfig, verb: str) -> Words | None:
    return None if cfg.data.name == "sample" else _from_raw(cfg, verb)


def _of_machines(cfg: RunConfig, verb: str) -> Words | None:
    """A training asks what its own machines have, except for plans of ours."""
    if verb != "train":
        return None
    if cfg.planner.plan is not None:
        return PLANNED
    if cfg.planner.name == "torchrec":
        return "with planner=torchrec, which takes the machines that train as they are", "Take planner=hierarchical"
    return None


def _only_types(*types: str) -> Callable[[RunConfig, str], Words | None]:
    """For a threshold whose sharding types nobody allows: it would say nothing."""

    def unread(cfg: RunConfig, verb: str) -> Words | None:
        allowed = cfg.planner.sharding_types
        if allowed is None or set(types) & set(allowed):
            return None
        return f"as planner.sharding_types has no {either(types)}", f"Add {either(types)}"

    return unread


def _by_columns(cfg: RunConfig, verb: str) -> Words | None:
    if cfg.consistency.mode != "bsp":
        return "as a store keeps whole rows", "Take consistency=bsp"
    if cfg.optimizer.rows.name == "rowwise_adagrad":
        where = "with optimizer.rows.name=rowwise_adagrad, whose tables are not cut by columns"
        return where, "Take optimizer=adagrad or sgd"
    return _only_types("column_wise", "table_column_wise", "grid_shard")(cfg, verb)


def _inter(cfg: RunConfig, verb: str) -> Words | None:
    """TorchRec prices tables that all hold with it on one machine too; the store's exchange has no use for it there."""
    if verb != "plan" or cfg.consistency.mode == "bsp" or cfg.cluster.servers or (cfg.cluster.nodes or 1) > 1:
        return None
    return "with one machine", "Set cluster.nodes"


def _intra(cfg: RunConfig, verb: str) -> Words | None:
    if verb != "plan" or cfg.cluster.gpus_per_node != 1:
        return None
    return "with cluster.gpus_per_node=1", "Set cluster.gpus_per_node above 1"


def _nproc(cfg: RunConfig, verb: str) -> Words | None:
    ranks = cfg.cluster.gpus_per_node
    if verb != "plan" or ranks is None or ranks == cfg.launch.nproc:
        return None
    why = f"as cluster.gpus_per_node={ranks} says how many ranks a machine has"
    return why, f"Set cluster.gpus_per_node={cfg.launch.nproc}"


def _keeps_nothing(cfg: RunConfig) -> bool:
    return cfg.consistency.mode in ("het", "ssp") and cfg.consistency.cache.capacity in (0, "0")


def _all_paths_said(cfg: RunConfig) -> bool:
    return all(getattr(cfg.comms, path) is not None for path in OF_MODE.get(cfg.consistency.mode, PATHS))


def _without_cross(cfg: RunConfig) -> bool:
    return cfg.model.get("_target_") == "hetrain.models.DLRM" and cfg.model.get("interaction", "dot") == "dot"


def either(words: Collection[str]) -> str:
    """`a, b or c`."""
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last


RULES = (
    *(_of_mode(key) for key in READ_IN),
    *(_of_dct(key) for key in READ_BY),
    *(_of_path(path) for path in PATHS if path != "dense"),
    Rule(
        tuple(f"data.sample.{key}" for key in SAMPLE),
        _when(lambda cfg: cfg.data.name != "sample", "as the data are not generated", "Take data=sample"),
        typed=True,
    ),
    Rule(
        ("data.min_count", "data.on_bad_row"),
        _when(lambda cfg: cfg.data.name == "sample" and cfg.data.raw is None, "as the sample is generated"),
        typed=True,
    ),
    Rule(RAW_ALONE, _from_raw, typed=True),
    Rule(SPLIT, _split, typed=True),
    Rule(
        ("data.shuffle_window",),
        _when(lambda cfg: not cfg.data.shuffle, "with data.shuffle=false", "Set data.shuffle=true"),
    ),
    Rule(
        ("model.cross_layers", "model.cross_rank"),
        _when(_without_cross, "as DLRM has no cross network with model.interaction=dot", "Set model.interaction=dcn"),
        typed=True,
    ),
    Rule(
        ("model", "model.embedding_dim", "data.name", "data.path"),
        _when(lambda cfg: cfg.plan.tables is not None, "as plan.tables says what is planned", verbs=("plan",)),
        typed=True,
    ),
    Rule(
        ("optimizer.schedule.decay_steps", "optimizer.schedule.final"),
        _when(
            lambda cfg: cfg.optimizer.schedule.decay == "none",
            "with optimizer.schedule.decay=none",
            "Set optimizer.schedule.decay=linear or cosine",
        ),
    ),
    Rule(
        ("optimizer.dense.eps",),
        _when(lambda cfg: cfg.optimizer.dense.name == "sgd", "with optimizer.dense.name=sgd, which has none"),
    ),
    Rule(
        ("optimizer.rows.eps",),
        _when(lambda cfg: cfg.optimizer.rows.name == "sgd", "with optimizer.rows.name=sgd, which has none"),
    ),
    Rule(("planner.column_slice_threshold",), _by_columns),
    Rule(("planner.row_slice_threshold",), _only_types("row_wise", "table_row_wise", "grid_shard")),
    Rule(("planner.data_parallel_threshold",), _only_types("data_parallel")),
    Rule(
        ("planner.tiers",),
        _when(lambda cfg: cfg.consistency.mode != "bsp", "as a store keeps rows in the memory of hosts"),
    ),
    Rule(
        ("planner.memory_gib", "planner.tiers"),
        _when(lambda cfg: cfg.planner.plan is not None, *PLANNED),
    ),
    Rule(
        ("planner.effort",),
        _when(
            lambda cfg: cfg.planner.name != "hierarchical" or cfg.planner.plan is not None,
            "as only planner=hierarchical searches for long",
            "Take planner=hierarchical",
        ),
    ),
    Rule(
        ("planner.name", "planner.sharding_types"),
        _when(lambda cfg: cfg.planner.plan is not None, *PLANNED),
        typed=True,
    ),
    Rule(("plan.out",), _when(lambda cfg: True, "as only `hetrain plan` writes there", verbs=("train",)), typed=True),
    Rule(
        ("consistency.late_leg",),
        _when(
            lambda cfg: cfg.consistency.mode == "het" and not cfg.consistency.prefetch,
            "with consistency.prefetch=false",
            "Set consistency.prefetch=true",
        ),
    ),
    Rule(
        ("consistency.cache.policy", "consistency.clock", "consistency.validation"),
        _when(
            _keeps_nothing,
            "with consistency.cache.capacity=0, which keeps no row",
            "Set consistency.cache.capacity above 0",
        ),
        typed=True,
    ),
    Rule(
        ("consistency.staleness",),
        _when(
            lambda cfg: cfg.consistency.mode == "het" and _keeps_nothing(cfg),
            "with consistency.cache.capacity=0, which keeps no row, so that none is behind",
            "Set consistency.cache.capacity above 0",
        ),
        typed=True,
    ),
    Rule(("comms.name",), _when(_all_paths_said, "as every path has a key of its own"), typed=True),
    Rule(
        ("cluster.device",),
        _when(lambda cfg: True, "as a training runs on what launch.device says", "Set launch.device", ("train",)),
        typed=True,
    ),
    Rule(
        GPU_ALONE,
        _when(lambda cfg: cfg.cluster.device == "cpu", "with cluster.device=cpu", "Set cluster.device=cuda"),
        typed=True,
    ),
    Rule(("cluster", *(f"cluster.{key}" for key in MACHINES)), _of_machines, typed=True),
    Rule(("cluster.latency_us",), _when(lambda cfg: True, "as no price of a plan has it"), typed=True),
    Rule(("cluster.inter_gb_s",), _inter, typed=True),
    Rule(("cluster.intra_gb_s",), _intra, typed=True),
    Rule(("launch.nproc",), _nproc, typed=True),
    Rule(
        ("launch.slow_random.factor",),
        _when(
            lambda cfg: cfg.launch.slow_random.share == 0,
            "with launch.slow_random.share=0",
            "Set launch.slow_random.share above 0",
        ),
    ),
)
RULED = tuple(dict.fromkeys(key for rule in RULES for key in rule.keys))
KEYS = tuple(key for key in RULED if not key.startswith("model."))  # those that every config has
