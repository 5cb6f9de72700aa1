"""A plan that a run is given: plan.json of another run, of `hetrain plan`, or written by hand."""

from collections.abc import Sequence
from pathlib import Path

from hetrain.errors import ConfigError
from hetrain.json_file import read_json
from hetrain.planner.plan import Plan
from hetrain.planner.replicas import check_replicas
from hetrain.planner.request import engine_of
from hetrain.roles import Roles
from hetrain.tables import Table

PLAN = "plan.json"
MODES = {"torchrec": "bsp", "store": "het, ssp or asp"}


def given_plan(file: str, mode: str, tables: Sequence[Table], roles: Roles) -> Plan:
    """The plan in `file` (planner.plan) for consistency.mode `mode`, these tables and these ranks.

    A folder stands for the plan.json in it. Raises ConfigError when it cannot be read, or is for another engine, other
    ranks or other tables.
    """
    plan = _read(Path(file))
    engine = engine_of(mode)
    if plan.engine in MODES and plan.engine != engine:
        raise ConfigError(
            f"planner.plan={file}: is a plan for consistency={MODES[plan.engine]}, and this run has {mode}. Set that, "
            "or make a plan for this run: `hetrain plan` with its words, or planner.plan=null."
        )
    if plan.world_size != roles.world_size:
        servers = f" with its {roles.servers} servers" if roles.servers else ""
        raise ConfigError(
            f"planner.plan={file}: is for {plan.world_size} ranks, and this run{servers} has {roles.world_size}. Start "
            f"{plan.world_size}, as with launch.nproc={plan.world_size - roles.servers}, or make the plan again for "
            f"{roles.world_size}."
        )
    workers = [piece for piece in plan.pieces if roles.servers and roles.computes(piece.rank)]
    if workers:
        raise ConfigError(
            f"planner.plan={file}: rank {workers[0].rank} holds rows of table {workers[0].table!r}, and with "
            f"cluster.servers={roles.servers} workers hold none: only ranks {roles.workers} to "
            f"{roles.world_size - 1} do. Set cluster.servers=0, or make the plan again with servers."
        )
    _check(plan, file, mode, tables)
    return plan


def _read(file: Path) -> Plan:
    remedy = "expected plan.json of a run's folder or of `hetrain plan`, or that folder."
    try:
        if file.is_dir() and not (file / PLAN).is_file():
            raise ConfigError(f"planner.plan={file}: is a folder without {PLAN}; {remedy}")
        held = read_json(file / PLAN if file.is_dir() else file)
    except OSError as error:
        raise ConfigError(f"planner.plan={file}: cannot be read ({error.strerror}); {remedy}") from error
    except ValueError as error:
        raise ConfigError(f"planner.plan={file}: is no JSON ({error}); {remedy}") from error
    if not isinstance(held, dict):
        raise ConfigError(f"planner.plan={file}: holds a {type(held).__name__}; {remedy}")
    try:
        return Plan.from_json(held)
    except ConfigError as error:
        raise ConfigError(f"planner.plan={file}: {error}.") from error


def _check(plan: Plan, file: str, mode: str, tables: Sequence[Table]) -> None:
    for table in tables:
        if table.name not in plan.replicated and not plan.of_table(table.name):
            raise ConfigError(
                f"planner.plan={file}: has no table {table.name!r}, which data and model have. It was made for others: "
                "make it again, or set data.path to that data."
            )
    try:
        plan.check(tables)
        _check_said(plan)
        check_replicas(plan, mode)
    except ConfigError as error:
        raise ConfigError(
            f"planner.plan={file}: {error}. Where data or model.embedding_dim are not those it was made for, make it "
            "again, or set planner.plan=null."
        ) from error


def _check_said(plan: Plan) -> None:
    """What is replicated is said to be so in both places: prices and TorchRec's plan go by `sharding`."""
    for name in sorted(plan.replicated):
        if plan.sharding.get(name) != "data_parallel":
            kind = plan.sharding.get(name)
            raise ConfigError(f"plan: table {name!r} is replicated, and {kind!r} in plan.sharding, not 'data_parallel'")
