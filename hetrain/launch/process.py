"""What one process of a run sets up for itself: device, threads, network interface, process group."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from hetrain.config import LaunchConfig
from hetrain.errors import ConfigError
from hetrain.launch.rank_environment import RankEnvironment, check_room, cores, roles_of
from hetrain.ranks import GPU_BACKEND, Ranks
from hetrain.roles import Roles
from hetrain.transport.rpc import stop as stop_rpc


def no_cuda_device() -> ConfigError:
    """The error of launch.device=cuda on a machine that cannot."""
    return ConfigError(
        "launch.device=cuda: PyTorch sees no CUDA device here.\n"
        "  Set launch.device=cpu, or install the CUDA build (see `hetrain doctor`)."
    )


def device_of(launch: LaunchConfig, environment: RankEnvironment, roles: Roles) -> torch.device:
    """The device this process computes on, the CPU for a server; ConfigError when the one asked for is not there."""
    if not roles.computes(environment.rank):
        return torch.device("cpu")
    gpus = torch.cuda.device_count() if launch.device != "cpu" else 0
    if launch.device == "cuda" and gpus == 0:
        raise no_cuda_device()
    if gpus == 0:
        return torch.device("cpu")
    first = environment.rank - environment.local_rank  # of this machine's ranks
    nproc = min(environment.local_world_size, roles.workers - first)
    if nproc > gpus:
        raise ConfigError(
            f"launch.nproc={nproc}: this machine has {gpus} GPU(s) and each worker needs its own.\n"
            f"  Set launch.nproc={gpus} or launch.device=cpu."
        )
    return torch.device("cuda", environment.local_rank)


def threads_of(launch: LaunchConfig, local_world_size: int) -> int:
    """Compute threads per process."""
    return launch.threads or max(1, cores() // local_world_size)


def use_loopback(environment: RankEnvironment) -> None:
    """Talk over the loopback interface when all ranks are here: a host name that does not resolve then does no harm."""
    if environment.world_size != environment.local_world_size:
        return
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback[0])


def _meeting_point(environment: RankEnvironment, timeout: timedelta) -> Store:
    """Where the ranks leave each other their addresses."""
    if environment.world_size == 1:
        return dist.HashStore()  # type: ignore[attr-defined]
    store, _, _ = next(rendezvous("env://", environment.rank, environment.world_size, timeout=timeout))
    # torchrun's restarts share one store in torch 2.13, where the addresses of the dead would be found.
    return PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


@contextmanager
def process_group(
    launch: LaunchConfig, environment: RankEnvironment, servers: int = 0
) -> Iterator[tuple[Ranks, torch.device]]:
    """Join the other ranks: gloo for CPU tensors, NCCL as well on GPUs. A run of one process has a group of one.

    servers: the run's last ranks, which own rows and compute nothing (cluster.servers). They have no GPU, so that with
    them this group is gloo's alone, on every rank.
    """
    check_room(launch, environment.local_world_size, servers)
    roles = roles_of(environment, servers)
    device = device_of(launch, environment, roles)
    torch.set_num_threads(threads_of(launch, environment.local_world_size))
    use_loopback(environment)
    os.environ.update(environment.variables())
    backend = "gloo"  # by this name: those who ask for the backend do not know "cpu:gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = backend if servers else GPU_BACKEND
    timeout = timedelta(seconds=launch.timeout_s)
    dist.init_process_group(
        backend,
        rank=environment.rank,
        world_size=environment.world_size,
        store=_meeting_point(environment, timeout),
        timeout=timeout,
    )
    try:
        yield Ranks(environment.rank, environment.world_size, dist.group.WORLD, servers), device
    finally:
        stop_rpc()
        dist.destroy_process_group()
