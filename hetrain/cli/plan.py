"""`hetrain plan`: a plan for machines that need not exist: its predicted cost on the screen, plan.json, a picture."""

import json
import os
import shlex
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from itertools import count
from pathlib import Path

from hetrain.cli.table import show
from hetrain.codec import Codecs
from hetrain.config import ClusterConfig, PlannerConfig, RunConfig
from hetrain.config.comms import codecs_of
from hetrain.config.compose import chosen_experiment, compose, group_options
from hetrain.config.planner_checks import MOST_EFFORT
from hetrain.durable import write_text
from hetrain.errors import ConfigError
from hetrain.planner import table_list
from hetrain.planner.cluster import Cluster
from hetrain.planner.machines import PROFILE, Machines, machines_of
from hetrain.planner.misfit import MisfitError
from hetrain.planner.picture import page
from hetrain.planner.plan import Plan
from hetrain.planner.planned import Planned
from hetrain.planner.remedies import MORE_MACHINES, MORE_SERVERS, Ways
from hetrain.planner.report import HEAD, asked_lines, found_lines, rank_rows
from hetrain.planner.request import STATE, loads_of, planned_for, tables_of
from hetrain.planner.search.hierarchical import NEAR_ENOUGH
from hetrain.planner.workload import TableLoad

__all__ = ["PROFILE", "run"]

Lines = list[tuple[str, str]]
PLAN_ALONE = ("plan.", "planner", "cluster=", "cluster.")  # what the plan has decided
SERVERS = "cluster.servers="
PATIENCE = 5000  # tables x ranks of which TorchRec's planner takes about 20 s


def run(cfg: RunConfig, overrides: Sequence[str], folders: Sequence[Path]) -> int:
    """Plan, show and save. Raises ConfigError or DataError for what cannot be planned."""
    if cfg.planner.plan is not None:
        raise ConfigError(
            f"planner.plan={cfg.planner.plan}: expected null with `hetrain plan`, which makes a plan. Leave it out; "
            "`hetrain train` trains by it."
        )
    what, loads = _loads(cfg, folders)
    machines = machines_of(cfg.cluster, cfg.planner.memory_gib, cfg.launch.nproc)
    _check_gpus(cfg.cluster, machines.cluster.kind)
    out = _folder(cfg, chosen_experiment(overrides) or what, machines)
    asked = _asked(cfg, what, loads, machines)
    _say(asked)
    if cfg.planner.name == "torchrec" and len(loads) * machines.cluster.world_size > PATIENCE:
        _say(
            [("patience", "planner=torchrec takes minutes for so many tables and ranks, planner=hierarchical seconds")]
        )
    started = time.process_time()
    try:
        planned = _planned(cfg, loads, machines.cluster)
    except MisfitError as error:
        error.ways = _ways(cfg, overrides, folders, machines.cluster)
        raise
    seconds = time.process_time() - started
    print()
    show(HEAD, rank_rows(planned))
    print()
    found = found_lines(planned, cfg.train.batch_size)
    files = _save(out, cfg, planned, loads, machines, [*asked, *found])
    took = ("took", f"{seconds:,.1f} s of one core ({cfg.planner.name}){_longer(cfg.planner, planned)}")
    _say([*found, took, ("saved", str(files[0])), ("picture", str(files[1]))])
    if cfg.plan.tables is None:
        _say([("next", _next(cfg, overrides, planned.plan, files[0]))])
    return 0


def _asked(cfg: RunConfig, what: str, loads: Sequence[TableLoad], machines: Machines) -> list[tuple[str, str]]:
    asked = asked_lines(what, loads, machines)
    if codecs_of(cfg) != Codecs():
        asked.append(("comms", "none in the prices, which are of float32: what comms.* saves is not counted"))
    return asked


def _longer(cfg: PlannerConfig, planned: Planned) -> str:
    """What a longer search is asked for with, where it may gain something."""
    if cfg.name != "hierarchical" or planned.slowest_ms <= planned.lower_bound_ms * NEAR_ENOUGH:
        return ""
    return f"; planner.effort={min(10 * cfg.effort, MOST_EFFORT):g} looks longer, for a better plan or a higher bound"


def _check_gpus(cfg: ClusterConfig, kind: str) -> None:
    """What is said of GPUs is read where the ranks have some; with cluster.device=cpu it was refused before."""
    for key in ("hbm_gib", "hbm_gb_s", "host_link_gb_s"):
        if kind == "cpu" and cfg.device is None and getattr(cfg, key) is not None:
            raise ConfigError(
                f"cluster.{key}={getattr(cfg, key)}: expected null, as this machine has no GPU and cluster.device=null "
                "plans for its kind. Set cluster.device=cuda, or leave it out."
            )


def _planned(cfg: RunConfig, loads: Sequence[TableLoad], cluster: Cluster) -> Planned:
    if cfg.planner.name != "torchrec":
        return planned_for(cfg, loads, cluster)
    from hetrain.launch.quiet import quiet_third_parties

    quiet_third_parties()
    from hetrain.planner.torchrec_planned import planned_by_torchrec

    return planned_by_torchrec(cfg, loads, cluster)


def _ways(cfg: RunConfig, overrides: Sequence[str], folders: Sequence[Path], cluster: Cluster) -> Ways:
    """What can be changed where nothing fits."""
    servers = cfg.cluster.servers
    return Ways(
        more=MORE_SERVERS if servers else MORE_MACHINES,
        machines=cluster,
        reserve=cfg.cluster.reserve,
        embedding_dim=cfg.plan.tables is None,
        presets=tuple if servers else partial(_presets, overrides, folders),
    )


def _presets(overrides: Sequence[str], folders: Sequence[Path]) -> list[tuple[str, Cluster]]:
    """The machines that have a name, in place of what the command line says of machines, and their words on it."""
    ours = ("cluster=", "cluster.", "planner.memory_gib=")
    others = [word for word in overrides if not word.lstrip("+").startswith(ours)]
    found = []
    for name in group_options("cluster", folders):
        cfg = compose([*others, f"cluster={name}", "planner.memory_gib=null"], folders, verb="plan")
        if cfg.cluster.ddr_gib is not None:  # cluster=local is whatever this machine is
            capped = any(word.startswith("planner.memory_gib=") for word in overrides)
            words = f"cluster={name}" + " planner.memory_gib=null" * capped
            found.append((words, machines_of(cfg.cluster, None, cfg.launch.nproc).cluster))
    return found


def _next(cfg: RunConfig, overrides: Sequence[str], plan: Plan, file: Path) -> str:
    """The training by the plan, on as many ranks."""
    words = [w for w in overrides if not (bare := w.lstrip("+")).startswith(PLAN_ALONE) or bare.startswith(SERVERS)]
    workers, per_node = plan.world_size - cfg.cluster.servers, plan.ranks_per_node or plan.world_size
    if workers > per_node:
        nodes = f"--nnodes {workers // per_node} --nproc-per-node {per_node}"
        return f"torchrun {nodes} ... -m hetrain train {shlex.join([*words, f'planner.plan={file}'])}"
    words = [word for word in words if not word.startswith("launch.nproc=")]
    return shlex.join(["hetrain", "train", *words, f"planner.plan={file}", f"launch.nproc={workers}"])


def _say(lines: Lines) -> None:
    print("\n".join(f"{label:<12}{text}" for label, text in lines), flush=True)


def _loads(cfg: RunConfig, folders: Sequence[Path]) -> tuple[str, list[TableLoad]]:
    """What is planned, in a word, and its tables: of a list, else of the data and the model."""
    if cfg.plan.tables is not None:
        file = table_list.find(cfg.plan.tables, folders)
        return file.stem, table_list.read(file, STATE[cfg.optimizer.rows.name], cfg.store.init_bound)
    from hetrain.data.schema import is_prepared, load_schema
    from hetrain.stats.measure import load

    path, model = Path(cfg.data.path), str(cfg.model["_target_"]).rpartition(".")[2].lower()
    if cfg.data.name == "sample" and not is_prepared(path):
        from hetrain.data.sample import sample_columns

        return f"{model}_sample", loads_of(tables_of(cfg, sample_columns(cfg.data.sample)), cfg.optimizer.rows)
    schema = load_schema(path)
    stats = load(path, schema)
    return f"{model}_{path.name}", loads_of(tables_of(cfg, schema.sparse), cfg.optimizer.rows, stats)


def _folder(cfg: RunConfig, what: str, machines: Machines) -> Path:
    """Where the plan is written: `plan.out`, refused where it holds a plan already; else a name that is free."""
    if cfg.plan.out is None:
        size = f"{machines.cluster.nodes}x{machines.cluster.ranks_per_node}"
        name = f"{what}_{cfg.planner.name}_{size}_{time.strftime('%m%d-%H%M%S')}"
        names = (Path("plans") / (name if number == 1 else f"{name}_{number}") for number in count(1))
        free = next(path for path in names if not path.exists())
        _check_writable(free, "plan.out=null")
        return free
    if not cfg.plan.out:
        raise ConfigError("plan.out=: expected a folder, or null for one with a name of its own in plans.")
    out = Path(cfg.plan.out)
    if (out / "plan.json").exists():
        raise ConfigError(f"plan.out={out}: holds a plan already. Choose another folder, or remove {out}/plan.json.")
    if out.exists() and not out.is_dir():
        raise ConfigError(f"plan.out={out}: is no folder.")
    _check_writable(out, f"plan.out={out}")
    return out


def _check_writable(out: Path, said: str) -> None:
    """Raise ConfigError where the folder cannot be made, before the search, which may take long."""
    there = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    if not there.is_dir():
        raise ConfigError(f"{said}: {there} is a file, and a folder is wanted there. Name another, as in plan.out=DIR.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"{said}: {there} cannot be written to. Name another folder, as in plan.out=DIR.")


def _save(
    out: Path, cfg: RunConfig, planned: Planned, loads: Sequence[TableLoad], machines: Machines, lines: Lines
) -> tuple[Path, Path]:
    out.mkdir(parents=True, exist_ok=True)
    asked = {
        "strategy": cfg.planner.name,
        "batch_size": cfg.train.batch_size,
        "row_optimizer": cfg.optimizer.rows.name,
        "mode": cfg.consistency.mode,
        "cluster": asdict(machines.cluster),
    }
    plan, picture = out / "plan.json", out / "plan.html"
    write_text(picture, page(out.name, lines, planned, loads, machines.cluster))
    write_text(plan, json.dumps({**planned.to_json(), "asked": asked}) + "\n")
    return plan, picture
