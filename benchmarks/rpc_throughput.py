"""Pulls and pushes of 1 MiB over the asynchronous transport against torch.distributed.rpc itself, two local processes.

    python benchmarks/rpc_throughput.py [--rows 2048] [--dim 128] [--requests 200] [--rounds 5] [--in-flight 1]

raw: a call that takes or gives the same bytes as one uint8 tensor, and does nothing with them. transport: the same
through transport/rpc.py. same work: a plain RPC
of row numbers and gradients as tensors, whose handler updates (SGD) or reads the rows and does no more. ours: an
OwnerService answered through the codec (transport/wire.py). Medians over rounds of messages per second and MB/s of
floats; `--in-flight`: messages on their way at once.
"""

import argparse
import multiprocessing
import os
import socket
import time
from collections import deque
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

NUMBERS = (
    ("rows", 2048),
    ("dim", 128),
    ("table-rows", 200_000),
    ("requests", 200),
    ("rounds", 5),
    ("in-flight", 1),
)
NOTHING = torch.empty(0, dtype=torch.uint8)
_KEPT: dict[int, Tensor] = {}


def raw(taken: Tensor, give: int) -> Tensor:
    """Take a tensor, give one of `give` bytes."""
    if give not in _KEPT:
        _KEPT[give] = torch.zeros(give, dtype=torch.uint8)
    return _KEPT[give]


_TABLE: list[Tensor] = []


def raw_pull(rows: Tensor) -> Tensor:
    """The rows."""
    return _TABLE[0].index_select(0, rows)


def raw_push(rows: Tensor, gradient: Tensor) -> Tensor:
    """One step of SGD."""
    value = _TABLE[0].index_select(0, rows)
    _TABLE[0].index_copy_(0, rows, value.sub_(gradient, alpha=0.1))
    return rows[:1]


def per_second(start_call: Callable[[], Callable[[], object]], args: argparse.Namespace) -> float:
    """Median calls per second; `start_call` gives what waits for the answer."""
    rates, requests = [], args.requests
    for _ in range(args.rounds + 1):
        start, flying = time.perf_counter(), deque[Callable[[], object]]()
        for _ in range(requests):
            flying.append(start_call())
            if len(flying) >= args.in_flight:
                flying.popleft()()
        while flying:
            flying.popleft()()
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


def measure(args: argparse.Namespace, asking: Asking, transport: RpcTransport) -> None:
    """Rank 0 asks rank 1."""
    rows = torch.randperm(args.table_rows)[: args.rows].sort().values
    gradient, none = torch.randn(args.rows, args.dim), rows[:0]
    nbytes = gradient.numel() * 4
    message = torch.zeros(nbytes, dtype=torch.uint8)

    def ask(pushed: RowsAsked | None, wanted: Tensor) -> Callable[[], object]:
        part = pushed or RowsAsked(none, gradient[:0], none, wanted)
        whole = Ask(0, 0, int(pushed is not None), 0, NO_GATE, False, False, torch.empty(0), [part])
        pending = asking.send([(1, whole)])[0]
        return lambda: asking.receive(pending)

    def plain(function: Callable[..., Tensor], *given: object) -> Callable[[], object]:
        future = rpc.rpc_async("rank1", function, given)
        return lambda: future.wait()

    def carried(name: str, given: Tensor) -> Callable[[], object]:
        pending = transport.call(1, name, given)
        return lambda: transport.wait(pending)

    push = RowsAsked(rows, gradient, none, none)
    cells = {
        "pull": (
            lambda: plain(raw, NOTHING, nbytes),
            lambda: carried("give", NOTHING),
            lambda: plain(raw_pull, rows),
            lambda: ask(None, rows),
        ),
        "push": (
            lambda: plain(raw, message, 1),
            lambda: carried("take", message),
            lambda: plain(raw_push, rows, gradient),
            lambda: ask(push, none),
        ),
    }
    for name, calls in cells.items():
        bare, *others = (per_second(call, args) for call in calls)
        print(f"{name} {nbytes / 2**20:g} MiB: raw {bare:,.0f}/s {bare * nbytes / 1e6:,.0f} MB/s", end="")
        for kind, rate in zip(("transport", "same work", "ours"), others, strict=True):
            print(f", {kind} {rate:,.0f}/s {rate / bare:.2f}x", end="")
        print()


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
    _TABLE.append(torch.randn(args.table_rows, args.dim))
    service = service_of(space, placement) if rank == 1 else None
    asking = Asking(transport, service, [(args.dim, 0)], Traffic())
    transport.handle("give", lambda _, reply: reply(raw(NOTHING, args.rows * args.dim * 4)))
    transport.handle("take", lambda _, reply: reply(NOTHING))
    transport.open()
    if rank == 0:
        measure(args, asking, transport)
    transport.barrier()
    stop()
    dist.destroy_process_group()


def main() -> None:
    """Start both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in NUMBERS:
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
