"""The memory of a cache's slots, and the kernel that looks up, pools and trains them in place."""

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    DenseTableBatchedEmbeddingBagsCodegen,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor

from hetrain.optim import RowOptimizer
from hetrain.store.zeros import lazy_zeros


class SlotTable:
    """The memory of one width group and the kernel over it.

    Where updates are held back, the kernel's fused optimizer trains the slots in place. With an empty cache the
    gradient of every row has to travel, merged per row: the dense kernel leaves it in `gradients`.
    """

    def __init__(
        self, features: int, slots: int, dim: int, optimizer: RowOptimizer, device: torch.device, *, held_back: bool
    ) -> None:
        self.held_back, self._dim, self._device = held_back, dim, device
        make = self._fused if held_back else self._dense
        self._kernel = make(slots, [0] * features, optimizer)
        self.value: Tensor = self._kernel.split_embedding_weights()[0]  # [slots, D]; a slot is written, then read
        states = self._kernel.split_optimizer_states()[0] if held_back and optimizer.state_width(dim) else []
        self.state: Tensor = states[0].view(slots, -1) if states else torch.empty(slots, 0, device=device)

    def _fused(self, slots: int, tables: list[int], optimizer: RowOptimizer) -> SplitTableBatchedEmbeddingBagsCodegen:
        on_cpu = self._device.type == "cpu"
        location = EmbeddingLocation.HOST if on_cpu else EmbeddingLocation.DEVICE
        return SplitTableBatchedEmbeddingBagsCodegen(
            [(slots, self._dim, location, ComputeDevice.CPU if on_cpu else ComputeDevice.CUDA)],
            feature_table_map=tables,
            optimizer=optimizer.fbgemm,
            learning_rate=optimizer.lr,
            eps=optimizer.eps,
            stochastic_rounding=False,
            pooling_mode=PoolingMode.SUM,
            bounds_check_mode=BoundsCheckMode.NONE,  # slots are our own numbers
            device=self._device,
            **({"preallocated_host_buffers": self._lazy_buffers(slots, optimizer)} if on_cpu else {}),
        )

    def _lazy_buffers(self, slots: int, optimizer: RowOptimizer) -> dict[str, Tensor]:
        """The kernel's memory, which it would zero, and so take, at once."""
        widths = {"weights": self._dim, "momentum1": optimizer.state_width(self._dim)}
        return {name: lazy_zeros((slots * n,), torch.float32, self._device) for name, n in widths.items() if n}

    def _dense(self, slots: int, tables: list[int], _: RowOptimizer) -> DenseTableBatchedEmbeddingBagsCodegen:
        return DenseTableBatchedEmbeddingBagsCodegen(
            [(slots, self._dim)], feature_table_map=tables, use_cpu=self._device.type == "cpu"
        )

    def set_learning_rate(self, lr: float) -> None:
        """Rate of the fused step; gradients that travel meet theirs at the owner."""
        if self.held_back:
            self._kernel.set_learning_rate(lr)

    def pool(self, slots: Tensor, offsets: Tensor) -> Tensor:
        """Sums per bag, [B, F * D], of `slots` [n] cut by `offsets` [F * B + 1]."""
        pooled: Tensor = self._kernel(slots.to(self._device), offsets.to(self._device))
        return pooled

    def gradients(self, slots: Tensor) -> Tensor:
        """After backward, once, where gradients travel: those of distinct `slots`, [U] to [U, D]."""
        weights = self._kernel.weights
        gradient: Tensor = weights.grad.view(-1, self._dim).index_select(0, slots.to(self._device))
        weights.grad = None
        return gradient
