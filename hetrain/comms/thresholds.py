"""DCT-DP: of a gradient what is large is sent, and the rest waits for the next step (arXiv 2010.08899).

Per tensor f = gradient + what waited. A threshold, the k-th largest |f|, is found every `refresh_steps`; entries of at
least that magnitude are sent. What is not sent, and what the sent values lost in rounding, waits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hetrain.codec import kept
from hetrain.comms.above import above
from hetrain.comms.sparse_message import Sparse, arrives, pack
from hetrain.config import DctConfig

STRAY = 1.5  # a tensor of which so many times k entries would be sent, or k by so much, gets a new threshold at once
_LEAST = torch.finfo(torch.float32).tiny  # a threshold: zeros are never sent


@dataclass(frozen=True)
class Parts:
    """Tensors, or pieces of such, one behind the other in a flat vector [P]; those that travel whole."""

    sizes: Sequence[int]
    whole: Sequence[bool]

    @cached_property
    def elements(self) -> int:
        """P."""
        return sum(self.sizes)

    @cached_property
    def first(self) -> int:
        """Elements that travel whole."""
        return sum(size for size, whole in zip(self.sizes, self.whole, strict=True) if whole)

    @cached_property
    def large(self) -> list[int]:
        """Sizes of the others."""
        return [size for size, whole in zip(self.sizes, self.whole, strict=True) if not whole]

    def ordered(self, flat: Tensor) -> Tensor:
        """What travels whole first; `flat` itself where it does."""
        if self._in_order:
            return flat
        pieces = flat.split(list(self.sizes))
        return torch.cat([pieces[i] for i in self._order])

    def flat(self, ordered: Tensor) -> Tensor:
        """The inverse of `ordered`."""
        if self._in_order:
            return ordered
        pieces = dict(zip(self._order, ordered.split([self.sizes[i] for i in self._order]), strict=True))
        return torch.cat([pieces[i] for i in range(len(self.sizes))])

    @cached_property
    def _order(self) -> list[int]:
        return sorted(range(len(self.sizes)), key=lambda i: not self.whole[i])

    @cached_property
    def _in_order(self) -> bool:
        return self._order == list(range(len(self.sizes)))


class Compressor:
    """One sender's part: what waits, and the thresholds. Every `compress` must be received."""

    def __init__(self, parts: Parts, dct: DctConfig) -> None:
        self.parts, self._dct = parts, dct
        sparse = dct.dense_sparsity > 0
        self._first = parts.first if sparse else parts.elements
        large = parts.large if sparse else []
        self._sizes = torch.tensor(large, dtype=torch.int64)
        self._most = torch.tensor([kept(size, dct.dense_sparsity) for size in large], dtype=torch.int64)
        self.sent = self.seen = 0  # values, since the start
        self.restart(0)

    def restart(self, step: int) -> None:
        """Nothing waits, and thresholds are to be found; `step` steps were taken before."""
        self._step, self._found = step, step
        self._waiting = torch.zeros(self.parts.elements)  # ordered
        self._thresholds = torch.empty(0)  # of the large parts; [0]: to be found

    def hold(self, waiting: Tensor) -> None:
        """Send `waiting` [P] with the next gradient, as if it had not been sent so far."""
        self._waiting = self.parts.ordered(waiting).clone()  # compress adds to it in place

    @property
    def waiting(self) -> Tensor:
        """[P] what was not sent, in the order of the flat vector; the next `compress` may change it."""
        return self.parts.flat(self._waiting)

    def compress(self, gradient: Tensor) -> Tensor:
        """A message (comms/sparse_message.py) of what is sent now of `gradient` [P] and of what waited."""
        f = self._waiting = self._waiting.to(gradient.device).add_(self.parts.ordered(gradient))
        first = self._first if self._step >= self._dct.dense_warmup_steps else len(f)
        positions = self._chosen(f[first:]) if first < len(f) else torch.empty(0, dtype=torch.int64, device=f.device)
        sent = Sparse(first, positions, torch.cat([f[:first], f[first:][positions]]))
        message = pack(sent, len(f))
        Sparse(first, positions, arrives(message, sent)).add_to(f, -1.0)
        self._step += 1
        self.sent += first + len(positions)
        self.seen += len(f)
        return message

    def _chosen(self, f: Tensor) -> Tensor:
        """[K] positions that are sent of the large parts `f`. Not-a-numbers are among them: they must be seen."""
        if not len(self._thresholds) or self._step - self._found >= self._dct.refresh_steps:
            self._thresholds, self._found = torch.zeros(len(self._sizes)), self._step
            self._find(f, range(len(self._sizes)))
        positions, counts = above(f, self._sizes, self._thresholds)
        stray = torch.nonzero((counts > STRAY * self._most) | (STRAY * counts < self._most))[:, 0].tolist()
        if not stray:
            return positions
        self._find(f, stray)
        return above(f, self._sizes, self._thresholds)[0]

    def _find(self, f: Tensor, numbers: Sequence[int]) -> None:
        """New thresholds of these of the large parts `f`."""
        pieces = f.split(self._sizes.tolist())
        for i in numbers:
            kth = float(torch.topk(pieces[i].abs(), int(self._most[i]), sorted=False).values.min())
            self._thresholds[i] = max(kth, _LEAST)

    def state_dict(self) -> dict[str, Any]:
        """Everything that later messages depend on."""
        return {
            "step": self._step,
            "found": self._found,
            "sparsity": self._dct.dense_sparsity,
            "waiting": self.waiting.to("cpu", copy=True),
            "thresholds": self._thresholds.clone(),
            "counts": [self.sent, self.seen],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken; thresholds of another sparsity, or of other parts, are found anew."""
        self._step, self._found = state["step"], state["found"]
        self.hold(state["waiting"])
        fits = state["sparsity"] == self._dct.dense_sparsity and len(state["thresholds"]) == len(self._sizes)
        self._thresholds = state["thresholds"].clone() if fits else torch.empty(0)
        self.sent, self.seen = state["counts"]
