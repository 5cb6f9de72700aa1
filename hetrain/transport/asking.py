"""Asks and Answers (store/ask.py) between workers and owners: packed by the codec between ranks, as they are within."""

import time
from collections.abc import Callable, Sequence

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


class Asking:
    """One rank's end of all conversations between workers and owners."""

    def __init__(
        self,
        transport: RpcTransport,
        service: OwnerService | None,
        widths: Sequence[tuple[int, int]],
        traffic: Traffic,
        rows: str = "none",
    ) -> None:
        """`service`: where this rank owns rows. `widths`: columns of a row, and of the state sent with it, by group.

        `rows`: the option that rows and gradients are encoded by.
        """
        self._transport, self._service, self._widths = transport, service, list(widths)
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
            service.serve(ask, lambda answer: reply(_packed(codec, answer.messages(self._widths))))

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
        answer = pending.value()
        return answer if isinstance(answer, Answer) else Answer.of(self._answers[call].unpack(answer))


def _packed(codec: Codec, messages: Sequence[Message]) -> Tensor:
    return codec.pack([message.fields() for message in messages])
