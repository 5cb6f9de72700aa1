"""Runs a function on real gloo processes and returns what each rank returned."""

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

PRELOAD = ["torch", "torchrec", "fbgemm_gpu", "numba", "tests.engine.store_cases"]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _worker(rank: int, world_size: int, port: int, fn: Callable[..., Any], args: tuple[Any, ...], out: Any) -> None:
    import torch
    import torch.distributed as dist

    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world_size),
        GLOO_SOCKET_IFNAME="lo",
    )
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    try:
        out.send((True, fn(rank, world_size, *args)))
    except BaseException:  # noqa: BLE001 - carried to the parent, which raises it
        out.send((False, traceback.format_exc()))
    finally:
        dist.destroy_process_group()


def run_ranks(world_size: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 120) -> list[Any]:
    """`fn(rank, world_size, *args)` on `world_size` processes; `fn` is a module-level function.

    Tensors come back by value: return numpy arrays, numbers or plain containers of them.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    port = free_port()
    pipes, processes = [], []
    for rank in range(world_size):
        receive, send = context.Pipe(duplex=False)
        process = context.Process(target=_worker, args=(rank, world_size, port, fn, args, send), daemon=True)
        process.start()
        send.close()
        pipes.append(receive)
        processes.append(process)
    results: list[Any] = []
    try:
        for rank, pipe in enumerate(pipes):
            if not pipe.poll(timeout_s):
                raise TimeoutError(f"rank {rank} gave no answer in {timeout_s} s")
            ok, value = pipe.recv()
            if not ok:
                raise AssertionError(f"rank {rank} failed:\n{value}")
            results.append(value)
    finally:
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()
    return results
