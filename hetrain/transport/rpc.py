"""One-sided calls over torch.distributed.rpc (TensorPipe): a rank asks another, which answers on threads of its own.

A call carries one tensor each way (packed by transport/wire.py) and is answered whenever its handler says so: an
answer that has to wait for other ranks keeps no thread busy. The caller waits for an event that the answer sets, so
that signals are heard meanwhile, and gives up after launch.timeout_s, naming whom it waited for.

TensorPipe uses shared memory between processes of one host. Where ranks span hosts it is told to use TCP alone: hosts
may be namespaces of one machine, between which shared memory would pass by the network that is to be tried.
"""

import os
import threading
import traceback
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_rpc import _is_current_rpc_agent_set
from torch.distributed import rpc

from hetrain.errors import ConfigError, HetrainError, LostPeerError, SilentPeerError, TrainingError
from hetrain.roles import Roles

THREADS = 8  # that answer; each needs the interpreter for a small part of its time
LAST_WORD_S = 5.0  # for the question whom everybody waits for, once a wait has taken too long

Reply = Callable[[Tensor], None]
Handler = Callable[[Tensor, Reply], None]  # (message, what answers it), on any thread

T = TypeVar("T")

_HANDLERS: dict[tuple[int, str], Handler] = {}  # by transport, in the order of their making, and name of the call
_made = 0


class Pending(Generic[T]):
    """An answer to come."""

    def __init__(self, peer: int) -> None:
        self.peer = peer
        self._there = threading.Event()
        self._answer: T | None = None
        self._error: Exception | None = None

    @property
    def there(self) -> bool:
        """Whether it has come."""
        return self._there.is_set()

    def answer(self, answer: T) -> None:
        """It comes, on any thread."""
        self._answer = answer
        self._there.set()

    def fail(self, error: Exception) -> None:
        """It will not come."""
        self._error = error
        self._there.set()

    def wait(self, timeout_s: float) -> bool:
        """Whether it came in time. Signals are handled meanwhile."""
        return self._there.wait(timeout_s)

    def value(self) -> T:
        """The answer that is there; raises what it failed with."""
        if self._error is not None:
            raise self._error
        assert self._answer is not None
        return self._answer


class RpcTransport:
    """Calls between all ranks of `group`. Every rank makes its transports in the same order.

    `handle` what other ranks may call, then `open` it; then anybody may `call`.
    """

    def __init__(self, timeout_s: float, *, group: dist.ProcessGroup | None = None, servers: int = 0) -> None:
        """`servers`: the group's last ranks."""
        global _made  # the same number on every rank, which calls carry
        self.world_size = dist.get_world_size(group) if dist.is_initialized() else 1
        self.rank = dist.get_rank(group) if dist.is_initialized() else 0
        self.roles = Roles(self.world_size, servers)
        self.timeout_s, self._group = timeout_s, group
        self._handlers: dict[str, Handler] = {}
        self._number = _made
        _made += 1

    def handle(self, name: str, handler: Handler) -> None:
        """Let `handler` answer calls of `name` here."""
        self._handlers[name] = handler
        if self.world_size > 1:
            _HANDLERS[self._number, name] = handler

    def open(self) -> None:
        """Wait until every rank answers. Collective."""
        if self.world_size > 1:
            _start(self.rank, self.world_size)
            self.barrier()

    def call(self, peer: int, name: str, message: Tensor) -> Pending[Tensor]:
        """Ask `peer`, this rank perhaps, for `name`. Raises nothing: the answer fails where the call cannot be made."""
        pending: Pending[Tensor] = Pending(peer)
        if peer == self.rank:
            self._handlers[name](message, pending.answer)
            return pending
        try:
            future = rpc.rpc_async(_name(peer), _answer, args=(self._number, name, message), timeout=0)
        except RuntimeError as error:  # this rank's own agent is stopped: it ends, and a thread of it still asks
            pending.fail(self._lost(peer, error))
            return pending
        future.add_done_callback(lambda done: self._arrived(done, pending))
        return pending

    def _arrived(self, done: torch.futures.Future[Any], pending: Pending[Tensor]) -> None:
        try:
            answer = done.value()
        except Exception as error:  # noqa: BLE001 - raised where the answer is waited for
            pending.fail(self._lost(pending.peer, error))
            return
        if isinstance(answer, Tensor):
            pending.answer(answer)
        else:
            pending.fail(_failure(*answer))

    def _lost(self, peer: int, error: Exception) -> LostPeerError:
        return LostPeerError(
            f"lost {self.roles.name(peer)}, which this rank had asked something: {error}. "
            "The first error in the other ranks' output is the cause."
        )

    def wait(self, pending: Pending[Any], whom: Callable[[], str] | None = None) -> Any:
        """The answer, once it is there.

        `whom`: told after launch.timeout_s, who it is that the peer waits for in turn; it may ask, with LAST_WORD_S.
        Raises SilentPeerError naming the peer, or whom `whom` names, and LostPeerError when the peer went away.
        """
        if not pending.wait(self.timeout_s):
            raise SilentPeerError(
                f"gave up waiting for {whom() if whom else self.roles.name(pending.peer)} "
                f"(launch.timeout_s={self.timeout_s:g}). Look at that rank's own output; raise launch.timeout_s if it "
                "is only slow."
            )
        return pending.value()

    def ask(self, peer: int, name: str, message: Tensor) -> Tensor:
        """`call`, then `wait`."""
        answer: Tensor = self.wait(self.call(peer, name, message))
        return answer

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world_size > 1:
            dist.all_reduce(torch.zeros(()), group=self._group)


def _start(rank: int, world_size: int) -> None:
    """Bring up the process's RPC agent, which lives until `stop`."""
    if _is_current_rpc_agent_set():
        return
    os.environ.setdefault("TP_SOCKET_IFNAME", os.environ.get("GLOO_SOCKET_IFNAME", ""))
    if not os.environ["TP_SOCKET_IFNAME"]:
        del os.environ["TP_SOCKET_IFNAME"]
    apart = os.environ.get("LOCAL_WORLD_SIZE", str(world_size)) != str(world_size)
    rpc.init_rpc(
        _name(rank),
        rank=rank,
        world_size=world_size,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(
            num_worker_threads=THREADS,
            init_method="env://",
            _transports=["uv"] if apart else None,
            _channels=["basic"] if apart else None,
        ),
    )


def stop() -> None:
    """End the process's RPC agent, if it has one: once nobody asks this rank for anything any more."""
    if _is_current_rpc_agent_set():
        rpc.shutdown(graceful=False)


def _name(rank: int) -> str:
    return f"rank{rank}"


# -- on the rank that is asked --------------------------------------------------------------------


@rpc.functions.async_execution
def _answer(number: int, name: str, message: Tensor) -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    try:
        _HANDLERS[number, name](message, future.set_result)
    except Exception as error:  # noqa: BLE001 - told to the rank that asks, which raises it
        text = str(error) if isinstance(error, HetrainError) else "".join(traceback.format_exception(error))
        future.set_result((type(error).__name__, text))
    return future


def _failure(kind: str, text: str) -> Exception:
    """What another rank failed with while it answered."""
    known: dict[str, type[Exception]] = {e.__name__: e for e in (ConfigError, TrainingError)}
    return known.get(kind, RuntimeError)(text)
