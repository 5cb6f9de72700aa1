"""One step's examples on one rank."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable


@dataclass
class Batch(Pipelineable):
    """B examples of this rank; every rank's batch of a lockstep step has its own B, 0 included.

    TorchRec's own Batch has no place for weights or for the size of the whole step's batch.
    """

    dense: Tensor  # [B, I] float32
    sparse: KeyedJaggedTensor  # F keys, stride B, int64 ids
    labels: Tensor  # [B] float32, 0 or 1
    global_size: int  # examples of all ranks in this step
    weights: Tensor | None = None  # [B] float32; 0 marks padding; None: all 1

    @property
    def size(self) -> int:
        """Examples on this rank, padding included."""
        return int(self.labels.shape[0])

    def to(self, device: torch.device, non_blocking: bool = False) -> "Batch":
        """The same batch on `device`."""
        return Batch(
            self.dense.to(device, non_blocking=non_blocking),
            self.sparse.to(device, non_blocking=non_blocking),
            self.labels.to(device, non_blocking=non_blocking),
            self.global_size,
            None if self.weights is None else self.weights.to(device, non_blocking=non_blocking),
        )

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the tensors alive for `stream`."""
        self.dense.record_stream(stream)
        self.sparse.record_stream(stream)
        self.labels.record_stream(stream)
        if self.weights is not None:
            self.weights.record_stream(stream)

    def pin_memory(self) -> "Batch":
        """The same batch in page-locked memory."""
        return Batch(
            self.dense.pin_memory(),
            self.sparse.pin_memory(),
            self.labels.pin_memory(),
            self.global_size,
            None if self.weights is None else self.weights.pin_memory(),
        )
