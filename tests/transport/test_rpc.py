"""One-sided calls between real ranks: an answer comes or fails, and a call itself raises nothing."""

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hetrain.errors import LostPeerError
from hetrain.transport.rpc import RpcTransport, stop
from tests.ranks import run_ranks


def _after_the_end(rank: int, world_size: int) -> tuple[float, str, list[Any]]:
    """What calls give before this rank's agent has stopped, and afterwards; and what a thread raised that called."""
    transport = RpcTransport(20)
    transport.handle("double", lambda message, reply: reply(2 * message))
    transport.open()
    peer = (rank + 1) % world_size
    answer = transport.ask(peer, "double", torch.tensor([rank + 1.0]))
    dist.barrier()
    stop()
    raised: list[Any] = []
    threading.excepthook = lambda arguments: raised.append(str(arguments.exc_value))
    late = threading.Thread(target=transport.call, args=(peer, "double", torch.zeros(1)))
    late.start()
    late.join()
    with pytest.raises(LostPeerError) as error:
        transport.ask(peer, "double", torch.zeros(1))
    return float(answer), str(error.value), raised


def test_a_call_after_the_agents_end_fails_as_a_lost_peer() -> None:
    """A stop signal may come when a rank ends anyway, and is passed on by a thread that nobody listens to."""
    for rank, (answer, error, raised) in enumerate(run_ranks(2, _after_the_end)):
        assert answer == 2 * (rank + 1)
        assert error.startswith(f"lost rank {1 - rank}, which this rank had asked something")
        assert raised == []
