"""Pulls and pushes of 1 MiB over the asynchronous transport against torch.distributed.rpc itself, two local processes.

    python benchmarks/rpc_throughput.py [--rows 16384] [--dim 16] [--requests 200] [--rounds 5]

raw: a call that takes or gives the same bytes as one uint8 tensor, and does nothing with them. ours: an owner that
applies gradients of `rows` rows (SGD), or reads them, answered through the codec (transport/wire.py). Medians over
rounds of messages per second and MB/s of floats.
"""

import argparse
import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import rpc

from hetrain.optim import RowOptimizer
from hetrain.planner.plan import Piece, Plan
from hetrain.store.ask import NO_GATE, Ask, RowsAsked
from hetrain.store.dense_shard import DenseShard
from hetrain.store.owner import Owner
from hetrain.store.service import OwnerService
from hetrain.store.space import Placement, RowSpace
from hetrain.store.worker_clocks import WorkerClocks
from hetrain.tables import Table
from hetrain.telemetry import Traffic
from hetrain.transport.asking import Asking
from hetrain.transport.rpc import RpcTransport, stop

NOTHING = torch.empty(0, dtype=torch.uint8)
_KEPT: dict[int, Tensor] = {}


def raw(taken: Tensor, give: int) -> Tensor:
    """Take a tensor, give one of `give` bytes."""
    if give not in _KEPT:
        _KEPT[give] = torch.zeros(give, dtype=torch.uint8)
    return _KEPT[give]


def per_second(call: Callable[[], object], requests: int, rounds: int) -> float:
    """Median calls per second, one after the other."""
    rates = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        for _ in range(requests):
            call()
        rates.append(requests / (time.perf_counter() - start))
    return median(rates[1:])


def service_of(space: RowSpace, placement: Placement) -> OwnerService:
    """Rows of one table on rank 1, all of them touched."""
    optimizer = RowOptimizer("sgd", 0.1, 1e-8)
    owner = Owner(space, placement, 1, optimizer, seed=1, device=torch.device("cpu"), held_back=False, workers=2)
    owner.memory["touched"].fill_(True)
    dense = DenseShard(torch.zeros(0), lambda params: torch.optim.SGD(params, lr=0.1))
    clocks = WorkerClocks(2)
    return OwnerService([owner], dense, clocks, lambda _: 1.0, copies=False, audit=False, meetings=None)


def measure(args: argparse.Namespace, asking: Asking) -> None:
    """Rank 0 asks rank 1."""
    rows = torch.randperm(args.table_rows)[: args.rows].sort().values
    gradient, none = torch.randn(args.rows, args.dim), rows[:0]
    nbytes = gradient.numel() * 4
    message = torch.zeros(nbytes, dtype=torch.uint8)

    def ask(pushed: RowsAsked | None, wanted: Tensor) -> None:
        part = pushed or RowsAsked(none, gradient[:0], none, wanted)
        whole = Ask(0, 0, int(pushed is not None), 0, NO_GATE, False, False, torch.empty(0), [part])
        asking.receive(asking.send([(1, whole)])[0])

    push = RowsAsked(rows, gradient, none, none)
    cells = {
        "pull": (lambda: rpc.rpc_sync("rank1", raw, (NOTHING, nbytes)), lambda: ask(None, rows)),
        "push": (lambda: rpc.rpc_sync("rank1", raw, (message, 1)), lambda: ask(push, none)),
    }
    for name, (theirs, ours) in cells.items():
        one, other = (per_second(call, args.requests, args.rounds) for call in (theirs, ours))
        print(
            f"{name} {nbytes / 2**20:g} MiB: raw {one:,.0f}/s {one * nbytes / 1e6:,.0f} MB/s, "
            f"ours {other:,.0f}/s {other * nbytes / 1e6:,.0f} MB/s: {other / one:.2f}x"
        )


def run(rank: int, port: int, args: argparse.Namespace) -> None:
    """One process."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"LOCAL_WORLD_SIZE": "1" if args.tcp else "2", "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    space = RowSpace([Table("t", args.table_rows, args.dim, ("f",), 0.01)], args.dim)
    plan = Plan("store", 2, (Piece("t", 1, 0, args.table_rows, 0, args.dim),), frozenset(), {})
    placement = Placement(space, plan, 2)
    transport = RpcTransport(60)
    service = service_of(space, placement) if rank == 1 else None
    asking = Asking(transport, service, [(args.dim, 0)], Traffic())
    transport.open()
    if rank == 0:
        measure(args, asking)
    transport.barrier()
    stop()
    dist.destroy_process_group()


def main() -> None:
    """Start both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rows", 16_384), ("dim", 16), ("table-rows", 200_000), ("requests", 200), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--tcp", action="store_true", help="TCP in place of shared memory, as between hosts")
    args = parser.parse_args()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    processes = [multiprocessing.get_context("spawn").Process(target=run, args=(r, port, args)) for r in (0, 1)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


if __name__ == "__main__":
    main()
