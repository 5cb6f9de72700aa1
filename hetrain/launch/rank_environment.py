"""Which process of the run this is, read from the variables of torchrun or Slurm. No torch."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from hetrain.config import ClusterConfig, LaunchConfig
from hetrain.errors import ConfigError
from hetrain.roles import Roles

MOST_PROCESSES, MOST_THREADS = 16, 16  # of one machine, and of one process; more where there are more cores


@dataclass(frozen=True)
class RankEnvironment:
    """One process among those of a run; `local` counts the processes of this machine."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0

    def variables(self) -> dict[str, str]:
        """The environment that torch.distributed and TorchRec read."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_room(launch: LaunchConfig, local_world_size: int, servers: int = 0) -> None:
    """ConfigError for numbers of processes or threads that would exhaust this machine.

    local_world_size: processes of this machine, workers and servers. servers: of the run, cluster.servers.
    Not a check of the config: a run saved on a large machine may be evaluated on a small one with other numbers.
    """
    most_processes = max(MOST_PROCESSES, 4 * cores())
    if servers and local_world_size > most_processes:
        raise ConfigError(
            f"launch.nproc and cluster.servers={servers}: {local_world_size} processes, expected at most "
            f"{most_processes} on this machine with {cores()} cores. Lower either of them."
        )
    for key, value, most in [
        ("nproc", local_world_size, most_processes),
        ("threads", launch.threads or 1, max(MOST_THREADS, 4 * cores())),
    ]:
        if value > most:
            raise ConfigError(
                f"launch.{key}={value}: expected at most {most} on this machine with {cores()} cores. "
                f"Leave it out to have the cores shared out."
            )


def roles_of(environment: RankEnvironment, servers: int) -> Roles:
    """What the processes of a run do, the last `servers` of them (cluster.servers) being servers.

    Raises ConfigError when none would be left to train.
    """
    if servers >= environment.world_size:
        raise ConfigError(
            f"cluster.servers={servers}: expected fewer than the {environment.world_size} processes of this run "
            "(WORLD_SIZE or SLURM_NTASKS), which count workers and servers and need at least one worker.\n"
            f"  Start at least {servers + 1} processes, or lower cluster.servers."
        )
    return Roles(environment.world_size, servers)


def check_slow_ranks(launch: LaunchConfig, roles: Roles) -> None:
    """ConfigError when launch.slow_ranks names a rank that no worker of this run has."""
    wrong = [rank for rank in launch.slow_ranks if not roles.computes(rank)]
    if wrong:
        raise ConfigError(
            f"launch.slow_ranks={launch.slow_ranks}: expected ranks of workers, which are 0 to {roles.workers - 1} in "
            f"this run. Leave {wrong[0]} out, or raise launch.nproc."
        )


def check_machines(cluster: ClusterConfig, roles: Roles) -> None:
    """ConfigError when cluster.nodes and cluster.gpus_per_node, which `hetrain plan` needs, are not those of this run.

    Either may be null. They group the workers: 2 x 2 may also be one machine's four processes.
    """
    nodes, ranks = cluster.nodes, cluster.gpus_per_node
    key, value = ("cluster.gpus_per_node", ranks) if nodes is None else ("cluster.nodes", nodes)
    if value is None:
        return
    fits = roles.workers == nodes * ranks if nodes and ranks else roles.workers % value == 0
    if not fits:
        asked = f"cluster.nodes={nodes} x cluster.gpus_per_node={ranks}" if nodes and ranks else f"{key}={value}"
        raise ConfigError(
            f"{asked}: expected the machines of this run, which has {roles.workers} workers.\n"
            "  `hetrain plan` plans for any machines; leave both out to train on these, or set launch.nproc."
        )


def read_environment(env: Mapping[str, str]) -> RankEnvironment | None:
    """What torchrun or Slurm gave this process; None when nobody else started the run's processes."""
    if "RANK" in env and "WORLD_SIZE" in env:
        return _torchrun(env)
    if "SLURM_PROCID" in env and int(env.get("SLURM_NTASKS", "1")) > 1:
        return _slurm(env)
    return None


def _torchrun(env: Mapping[str, str]) -> RankEnvironment:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in env]
    if missing:
        raise ConfigError(
            f"RANK and WORLD_SIZE are set but {' and '.join(missing)} are not.\n"
            "  Start with torchrun, or unset RANK and WORLD_SIZE to let hetrain start its own processes."
        )
    world_size = int(env["WORLD_SIZE"])
    return RankEnvironment(
        int(env["RANK"]),
        world_size,
        int(env.get("LOCAL_RANK", env["RANK"])),
        int(env.get("LOCAL_WORLD_SIZE", world_size)),
        env["MASTER_ADDR"],
        int(env["MASTER_PORT"]),
    )


def _slurm(env: Mapping[str, str]) -> RankEnvironment:
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_NODELIST") or env.get("SLURM_JOB_NODELIST", "127.0.0.1")
    tasks = int(env["SLURM_NTASKS"])
    return RankEnvironment(
        int(env["SLURM_PROCID"]),
        tasks,
        int(env.get("SLURM_LOCALID", "0")),
        _tasks_here(env, tasks),
        env.get("MASTER_ADDR", first_host(nodes)),
        # One port per job, the same on all nodes, away from the usual ones.
        int(env.get("MASTER_PORT", 20_000 + int(env.get("SLURM_JOB_ID", "0")) % 20_000)),
    )


def _tasks_here(env: Mapping[str, str], tasks: int) -> int:
    """Tasks on this node. SLURM_STEP_TASKS_PER_NODE reads like "4(x2),3": by node, repeats in brackets."""
    text = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE")
    if not text:
        nodes = int(env.get("SLURM_NNODES", "1"))
        return -(-tasks // nodes)
    counts: list[int] = []
    for count, repeat in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(repeat or 1)
    return counts[min(int(env.get("SLURM_NODEID", "0")), len(counts) - 1)]


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list: "n[03-05,9],gpu1" -> "n03"."""
    found = re.match(r"([^,\[]+)(?:\[([^\]]+)\])?([^,]*)", nodes)
    if found is None:
        raise ConfigError(f"SLURM_NODELIST={nodes!r}: cannot read the first host; set MASTER_ADDR to rank 0's host.")
    prefix, ranges, suffix = found.groups()
    number = re.split(r"[,-]", ranges)[0] if ranges else ""
    return f"{prefix}{number}{suffix}"
