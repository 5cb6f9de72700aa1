"""Asks and Answers (store/ask.py) between workers and owners: packed by the codec between ranks, as they are within."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from torch import Tensor

from hetrain.roles import Roles
from hetrain.store.ask import HEAD_CHANNELS, HEAD_WIDTHS, Answer, Ask, RowsAnswered, RowsAsked
from hetrain.store.messages import Message
from hetrain.store.row_codec import RowCodec
from hetrain.store.service import OwnerService
from hetrain.telemetry import Traffic
from hetrain.transport.rpc import Pending, Reply, RpcTransport
from hetrain.transport.wire import BITS, Codec, Layout, push_width, row_width

TRAIN, LOOK = "ask", "look"  # the calls: a look is counted aside
HEAD = Layout(HEAD_CHANNELS, HEAD_WIDTHS)


class DenseCoding(Protocol):
    """Dense gradients and parameters as words, float32 [n] that hold bytes, and back; [0] for [0]. Any thread."""

    def push(self, owner: int, gradient: Tensor) -> Tensor:
        """A gradient to the `owner`-th owner; each is pushed once, and in order."""
        ...

    def pushed(self, owner: int, words: Tensor) -> Tensor:
        """That gradient at the owner."""
        ...

    def pull(self, value: Tensor) -> Tensor:
        """An owner's parameters."""
        ...

    def pulled(self, owner: int, words: Tensor) -> Tensor:
        """Those of the `owner`-th owner at the worker."""
        ...


class Asking:
    """One rank's end of all conversations between workers and owners."""

    def __init__(
        self,
        transport: RpcTransport,
        service: OwnerService | None,
        widths: Sequence[tuple[int, int]],
        traffic: Traffic,
        dense: DenseCoding | None = None,
        rows: str = "none",
    ) -> None:
        """`service`: where this rank owns rows. `widths`: columns of a row, and of the state sent with it, by group.

        `dense`: how the dense part travels between ranks; None: as it is. `rows`: the option that rows and gradients
        are encoded by.
        """
        self._transport, self._service, self._widths, self._dense = transport, service, list(widths), dense
        self.waited_s = 0.0  # by this rank as a worker, since the start
        codecs = [(RowCodec(rows, dim), state) for dim, state in widths]
        asked = [HEAD, *(Layout(RowsAsked.CHANNELS, (None, push_width(c), None, None)) for c, _ in codecs)]
        answered = [HEAD, *(Layout(RowsAnswered.CHANNELS, (BITS, row_width(c), state, None)) for c, state in codecs)]
        self._asks = Codec(asked, traffic)
        self._answers = {TRAIN: Codec(answered, traffic), LOOK: Codec(answered, traffic.only_aside())}
        if service is not None:
            for call in (TRAIN, LOOK):
                transport.handle(call, self._handler(service, call))

    @property
    def roles(self) -> Roles:
        """Who computes and who owns rows."""
        return self._transport.roles

    def _handler(self, service: OwnerService, call: str) -> Callable[[Tensor, Reply], None]:
        codec = self._answers[call]

        def handle(message: Tensor, reply: Reply) -> None:
            ask = Ask.of(self._asks.unpack(message))
            if self._dense is not None:
                ask.dense = self._dense.pushed(self._place(self._transport.rank), ask.dense)
            service.serve(ask, tell(reply))

        def tell(reply: Reply) -> Callable[[Answer], None]:
            return lambda answer: reply(_packed(codec, self._coded(answer).messages(self._widths)))

        return handle

    def send(self, asks: Sequence[tuple[int, Ask]], call: str = TRAIN) -> list[Pending[Answer] | Pending[Tensor]]:
        """Start to ask owners, the other ranks first, so that they work while this one does."""
        pending: dict[int, Pending[Answer] | Pending[Tensor]] = {}
        for owner, ask in sorted(asks, key=lambda pair: pair[0] == self._transport.rank):
            if owner == self._transport.rank:
                assert self._service is not None
                here: Pending[Answer] = Pending(owner)
                pending[owner] = here
                self._service.serve(ask, here.answer)
            else:
                if self._dense is not None:
                    ask = replace(ask, dense=self._dense.push(self._place(owner), ask.dense))
                pending[owner] = self._transport.call(owner, call, _packed(self._asks, ask.messages()))
        return [pending[owner] for owner, _ in asks]

    def receive(
        self, pending: Pending[Answer] | Pending[Tensor], whom: Callable[[], str] | None = None, call: str = TRAIN
    ) -> Answer:
        """Wait for one answer; `whom` as in RpcTransport.wait."""
        start = time.perf_counter()
        try:
            self._transport.wait(pending, whom)
        finally:
            self.waited_s += time.perf_counter() - start
        found = pending.value()
        if isinstance(found, Answer):
            return found
        answer = Answer.of(self._answers[call].unpack(found))
        if self._dense is not None:
            answer.dense = self._dense.pulled(self._place(pending.peer), answer.dense)
        return answer

    def _coded(self, answer: Answer) -> Answer:
        return answer if self._dense is None else replace(answer, dense=self._dense.pull(answer.dense))

    def _place(self, owner: int) -> int:
        """Which of the owners rank `owner` is."""
        return self.roles.owners.index(owner)


def _packed(codec: Codec, messages: Sequence[Message]) -> Tensor:
    return codec.pack([message.fields() for message in messages])
