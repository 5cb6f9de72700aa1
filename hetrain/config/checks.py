"""Checks of values and of keys against each other, before anything is allocated. Nothing here imports torch.

Every finding says key, value, what was expected and what to do; one ConfigError carries them all.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hetrain.capacity import parse_capacity
from hetrain.config.comms import comms_findings
from hetrain.config.findings import at_least, at_most, comes_from, finding, one_of, positive
from hetrain.config.planner_checks import MOST_GIB, constraint_findings, idle_rules, planner_findings
from hetrain.config.schema import ClusterConfig, LaunchConfig, RunConfig
from hetrain.config.unread import unread
from hetrain.errors import ConfigError

DENSE_OPTIMIZERS = ("sgd", "adagrad", "adam", "adamw")
ROW_OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad")
MOST = 1 << 24  # examples of a batch: more is a slip of the finger
MOST_RANKS = 65_536  # of machines to plan for
MOST_IDS = 200_000_000  # of a sample, all columns together: 24 bytes each while it is made
SPLITS = ("train", "validation", "test")


def check(
    cfg: RunConfig,
    *,
    strict: bool = False,
    verb: str = "",
    typed: Mapping[str, Any] | None = None,
    origin: Callable[[str], str | None] = lambda key: None,
) -> None:
    """Raise ConfigError when `cfg` cannot run.

    strict: settings without effect in `verb` ("": in any) are refused as well; `typed`: those of the command line.
    origin: which file, in the words that chose it, a key has its value from; None: the command line, or a default.
    """
    parts: tuple[Callable[[RunConfig], Iterator[str]], ...] = (
        *(_run, _data, _model, _optimizer, planner_findings, constraint_findings, _consistency, _cluster),
        *(_comms, _launch, _train, _checkpoint, _store),
    )
    parts += (idle_rules,) if strict else ()
    idle = {setting.key: setting for setting in (unread(cfg, verb, typed) if strict else ())}
    found = []
    for text in (text for part in parts for text in part(cfg)):
        key = text.partition("=")[0]
        found.append(text + comes_from(key, origin(key), idle.pop(key, None)))  # one finding per key
    found += [setting.told(None if setting.word else origin(setting.key)) for setting in idle.values()]
    if len(found) == 1:
        raise ConfigError(found[0])
    if found:
        raise ConfigError(f"{len(found)} settings cannot run:\n" + "\n".join(f"  {text}" for text in found))


def _run(cfg: RunConfig) -> Iterator[str]:
    if not 0 <= cfg.seed < 1 << 63:
        yield finding("seed", cfg.seed, "0 <= seed < 2^63")
    if cfg.name is not None and (not cfg.name or "/" in cfg.name or cfg.name.startswith(".")):
        yield finding(
            "name", cfg.name, "a folder name without '/' that does not start with '.'", "Set `runs` for where."
        )
    yield from at_least("telemetry.log_every", cfg.telemetry.log_every, 1)
    yield from at_least("telemetry.audit_every", cfg.telemetry.audit_every, 0, "0 turns audits off.")


def _data(cfg: RunConfig) -> Iterator[str]:
    data, split, sample = cfg.data, cfg.data.split, cfg.data.sample
    yield from one_of("data.on_bad_row", data.on_bad_row, ("error", "skip"))
    for key in ("min_count", "shuffle_window"):
        yield from at_least(f"data.{key}", getattr(data, key), 1)
    if data.prefetch is not None:
        yield from at_least("data.prefetch", data.prefetch, 0, "0 reads between steps.")
        yield from at_most("data.prefetch", data.prefetch, 1024, "So many batches wait in memory.")
    shares = {name: getattr(split, name) for name in SPLITS}
    for name, share in shares.items():
        yield from at_least(f"data.split.{name}", share, 0)
    if split.train == 0:
        yield finding("data.split.train", 0, "a share or row count above 0", "There would be nothing to train on.")
    used = [share for share in shares.values() if share > 0]
    if any(share > 1 for share in used) and any(share < 1 for share in used):
        yield finding("data.split", shares, "either shares (each <= 1) or row counts (> 1), not both")
    elif all(share <= 1 for share in used) and sum(used) > 1 + 1e-9:
        yield finding("data.split", shares, "shares that add up to at most 1")
    yield from at_least("data.sample.rows", sample.rows, 100, "A split needs rows of both labels.")
    yield from at_most(
        "data.sample.rows", sample.rows, 10**10, "A sample is for trying things; prepare real logs for more."
    )
    yield from at_least("data.sample.dense", sample.dense, 1)
    yield from at_most("data.sample.dense", sample.dense, 10_000)
    yield from at_least("data.sample.seed", sample.seed, 0)
    yield from positive("data.sample.zipf", sample.zipf)
    if not 0 < sample.base_rate < 1:
        yield finding("data.sample.base_rate", sample.base_rate, "a share between 0 and 1")
    if any(rows < 2 for rows in sample.cardinalities):
        yield finding("data.sample.cardinalities", sample.cardinalities, "at least 2 ids in every column")
    if sum(sample.cardinalities) > MOST_IDS:
        yield finding(
            "data.sample.cardinalities",
            sample.cardinalities,
            f"at most {MOST_IDS:,} ids in all columns together",
            "The sample's model keeps every id in memory; for larger tables prepare real logs.",
        )


def _model(cfg: RunConfig) -> Iterator[str]:
    target = cfg.model.get("_target_")
    if not isinstance(target, str) or "." not in target or not all(part.isidentifier() for part in target.split(".")):
        yield finding(
            "model._target_", target, "the import path of a model class", "As in model._target_=hetrain.models.WDL."
        )
    dim = cfg.model.get("embedding_dim")
    if not isinstance(dim, int) or isinstance(dim, bool) or dim <= 0 or dim % 4:
        yield finding(
            "model.embedding_dim", dim, "a positive multiple of 4", "FBGEMM's kernels read rows in groups of 4 floats."
        )
    else:
        yield from at_most("model.embedding_dim", dim, 1 << 14)


def _optimizer(cfg: RunConfig) -> Iterator[str]:
    dense, rows, schedule = cfg.optimizer.dense, cfg.optimizer.rows, cfg.optimizer.schedule
    yield from one_of("optimizer.dense.name", dense.name, DENSE_OPTIMIZERS)
    if rows.name not in ROW_OPTIMIZERS:
        why = ""
        if "adam" in rows.name or "lamb" in rows.name:
            why = (
                "Its state does not add up, so updates cannot be held back and merged; take adagrad or rowwise_adagrad."
            )
            if cfg.consistency.mode == "bsp":
                why = "FBGEMM has no CPU kernel for it; take adagrad or rowwise_adagrad."
        yield finding("optimizer.rows.name", rows.name, "one of " + ", ".join(ROW_OPTIMIZERS), why)
    for key, part in (("dense", dense), ("rows", rows)):
        yield from positive(f"optimizer.{key}.lr", part.lr)
        yield from positive(f"optimizer.{key}.eps", part.eps)
    yield from at_least("optimizer.dense.weight_decay", dense.weight_decay, 0)
    yield from one_of("optimizer.schedule.decay", schedule.decay, ("none", "linear", "cosine"))
    yield from at_least("optimizer.schedule.warmup_steps", schedule.warmup_steps, 0)
    if schedule.decay != "none" and schedule.decay_steps <= schedule.warmup_steps:
        yield finding(
            "optimizer.schedule.decay_steps",
            schedule.decay_steps,
            f"more than optimizer.schedule.warmup_steps={schedule.warmup_steps}",
            "Decay is over at that step.",
        )
    if not 0 <= schedule.final <= 1:
        yield finding("optimizer.schedule.final", schedule.final, "a factor between 0 and 1")


ZERO = "With 0 a changed row is sent and fetched again before its next read."


def _consistency(cfg: RunConfig) -> Iterator[str]:
    mode = cfg.consistency
    yield from one_of("consistency.mode", mode.mode, ("bsp", "het", "ssp", "asp"))
    whole = math.isinf(mode.staleness) or float(mode.staleness).is_integer()
    if not mode.staleness >= 0 or not whole:
        yield finding(
            "consistency.staleness",
            mode.staleness,
            f"a whole number of {'steps' if mode.mode == 'ssp' else 'updates'}, at least 0, or inf",
            "With 0 nobody leads." if mode.mode == "ssp" else ZERO,
        )
    yield from one_of("consistency.clock", mode.clock, ("max", "sum"))
    yield from one_of("consistency.validation", mode.validation, ("directory", "clock"))
    yield from one_of("consistency.cache.policy", mode.cache.policy, ("lru", "lfu", "light_lfu"))
    if mode.late_leg and mode.mode != "het":
        yield finding(
            "consistency.late_leg",
            True,
            f"false with consistency.mode={mode.mode}",
            "Only the rounds of consistency=het go in two legs.",
        )
    try:
        parse_capacity(mode.cache.capacity)
    except ConfigError as error:
        yield str(error)
        return
    if mode.mode == "asp" and parse_capacity(mode.cache.capacity).amount > 0:
        yield finding(
            "consistency.cache.capacity",
            mode.cache.capacity,
            "0 with consistency.mode=asp",
            "Without clocks nobody could tell how old a cached row is; take consistency=ssp for a cache.",
        )


def _cluster(cfg: RunConfig) -> Iterator[str]:
    servers = cfg.cluster.servers
    yield from at_least("cluster.servers", servers, 0, "0 leaves the rows on the workers.")
    if servers > 0 and cfg.consistency.mode == "bsp":
        yield finding(
            "cluster.servers",
            servers,
            "0 with consistency.mode=bsp",
            "TorchRec shards tables over the workers themselves; servers own the rows of consistency=het, ssp and asp.",
        )
    yield from _machines(cfg.cluster)


def _machines(cluster: ClusterConfig) -> Iterator[str]:
    if cluster.device is not None:
        yield from one_of("cluster.device", cluster.device, ("cuda", "cpu"))
    for key in ("nodes", "gpus_per_node"):
        yield from at_least(f"cluster.{key}", getattr(cluster, key), 1)
        yield from at_most(f"cluster.{key}", getattr(cluster, key), 65_536)
    if (cluster.nodes or 1) * (cluster.gpus_per_node or 1) > MOST_RANKS:
        asked = f"{cluster.nodes} x {cluster.gpus_per_node}"
        yield finding("cluster.nodes x cluster.gpus_per_node", asked, f"at most {MOST_RANKS:,} ranks together")
    yield from positive("cluster.hbm_gib", cluster.hbm_gib, "cluster.device=cpu plans without.")
    yield from positive("cluster.ddr_gib", cluster.ddr_gib)
    for key in ("hbm_gib", "ddr_gib"):
        yield from at_most(f"cluster.{key}", getattr(cluster, key), MOST_GIB)
    for key in ("hbm_gb_s", "ddr_gb_s", "host_link_gb_s", "intra_gb_s", "inter_gb_s"):
        yield from positive(f"cluster.{key}", getattr(cluster, key), "It is in 10^9 bytes a second.")
    yield from at_least("cluster.latency_us", cluster.latency_us, 0)
    yield from at_most("cluster.latency_us", cluster.latency_us, 10**9, "It is in microseconds: that is 17 minutes.")
    if not 0 <= cluster.reserve < 1:
        yield finding("cluster.reserve", cluster.reserve, "a share of the memory, at least 0 and below 1")


def _comms(cfg: RunConfig) -> Iterator[str]:
    yield from comms_findings(cfg)


def _launch(cfg: RunConfig) -> Iterator[str]:
    launch = cfg.launch
    yield from at_least("launch.nproc", launch.nproc, 1, "null starts one per GPU, else 2.")
    yield from at_least("launch.threads", launch.threads, 1, "null shares the cores out.")
    yield from one_of("launch.device", launch.device, ("auto", "cpu", "cuda"))
    yield from at_least("launch.timeout_s", launch.timeout_s, 1, "Ranks need seconds to find each other.")
    yield from at_most("launch.timeout_s", launch.timeout_s, 10_000_000)
    yield from at_least("launch.max_restarts", launch.max_restarts, 0)
    if launch.max_restarts > 0 and cfg.checkpoint.resume == "never":
        yield finding(
            "launch.max_restarts",
            launch.max_restarts,
            "0 with checkpoint.resume=never",
            "A restart would train from the beginning; set checkpoint.resume=auto.",
        )
    yield from _slow(launch)


def _slow(launch: LaunchConfig) -> Iterator[str]:
    """Which ranks there are is known where they are started: check_slow_ranks."""
    for rank, factor in launch.slow_ranks.items():
        if not (rank >= 0 and 1 <= factor < math.inf):
            expected = "the ranks of workers, from 0, each with a factor of at least 1"
            yield finding("launch.slow_ranks", launch.slow_ranks, expected, "As in 'launch.slow_ranks={1: 3.0}'.")
            break
    share, factor = launch.slow_random.share, launch.slow_random.factor
    if not 0 <= share <= 1:
        yield finding("launch.slow_random.share", share, "a share between 0 and 1")
    if not 1 <= factor < math.inf:
        yield finding("launch.slow_random.factor", factor, "a factor of at least 1")


def _train(cfg: RunConfig) -> Iterator[str]:
    train = cfg.train
    for key in ("batch_size", "epochs", "max_steps", "eval_every", "eval_batch_size", "patience"):
        yield from at_least(f"train.{key}", getattr(train, key), 1)
    for key in ("batch_size", "eval_batch_size"):
        yield from at_most(f"train.{key}", getattr(train, key), MOST, "It counts the examples of one process and step.")
    if train.patience is not None and cfg.data.split.validation == 0:
        yield finding(
            "train.patience",
            train.patience,
            "null with data.split.validation=0",
            "Early stopping needs validation rows.",
        )


def _checkpoint(cfg: RunConfig) -> Iterator[str]:
    yield from at_least("checkpoint.every", cfg.checkpoint.every, 1, "null saves at evaluations and at the end.")
    yield from at_least("checkpoint.keep", cfg.checkpoint.keep, 1)
    resume = cfg.checkpoint.resume
    if resume not in ("auto", "never") and not Path(resume).is_dir():
        yield finding("checkpoint.resume", resume, "auto, never or an existing checkpoint folder")


def _store(cfg: RunConfig) -> Iterator[str]:
    yield from one_of("store.device", cfg.store.device, ("cpu", "cuda"))
    yield from at_least("store.init_bound", cfg.store.init_bound, 0)
    yield from one_of("store.index", cfg.store.index, ("array", "hash"))
    if cfg.store.index == "hash" and cfg.consistency.mode == "bsp":
        yield finding(
            "store.index",
            "hash",
            "array with consistency.mode=bsp",
            "TorchRec allocates every row; take consistency=het for tables far larger than memory.",
        )
    if cfg.store.device == "cuda" and cfg.launch.device == "cpu":
        yield finding("store.device", "cuda", "cpu with launch.device=cpu")
    if cfg.store.device == "cuda" and cfg.consistency.mode in ("asp", "ssp"):
        yield finding(
            "store.device",
            "cuda",
            f"cpu with consistency.mode={cfg.consistency.mode}",
            "Its rows are pulled and pushed through the host's memory.",
        )
    if cfg.store.device == "cuda" and cfg.cluster.servers > 0:
        yield finding("store.device", "cuda", f"cpu with cluster.servers={cfg.cluster.servers}", "Servers use no GPU.")
