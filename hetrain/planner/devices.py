"""What a planner must know of the machines: memory and bandwidths per rank, and how ranks are grouped."""

import os
from dataclasses import dataclass

import torch

from hetrain.planner.host_memory import host_memory

GIB = 1 << 30
USABLE = 0.85  # share of a rank's memory that tables may take: the rest is for the dense part, batches and buffers

# GB/s. A rank on a CPU shares its host's memory channels; between processes of one host gloo moves about 1 GB/s
# (measured, loopback); 10 GbE is a common link between CPU hosts. For GPUs: NVLink and 100 Gbit, as TorchRec assumes.
CPU_MEMORY, CPU_INTRA_HOST, CPU_INTER_HOST = 10.0, 1.0, 1.25
GPU_MEMORY, GPU_INTRA_HOST, GPU_INTER_HOST = 897.0, 600.0, 12.5


@dataclass(frozen=True)
class DeviceSet:
    """Equal ranks: `memory` bytes usable for tables on each; bandwidths in GB/s of one rank."""

    kind: str  # cpu | cuda
    world_size: int
    ranks_per_host: int
    memory: int
    memory_gb_s: float
    intra_host_gb_s: float
    inter_host_gb_s: float


def device_set(world_size: int, device: torch.device, memory_gib: float | None) -> DeviceSet:
    """The ranks of this run. `memory_gib` is `planner.memory_gib`: None measures this host.

    Totals are used, never what happens to be free, so that every rank of a host plans alike.
    """
    local = min(world_size, int(os.environ.get("LOCAL_WORLD_SIZE", world_size)))
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory if memory_gib is None else 0
        bandwidths = (GPU_MEMORY, GPU_INTRA_HOST, GPU_INTER_HOST)
    else:
        memory = host_memory() // local if memory_gib is None else 0
        bandwidths = (CPU_MEMORY, CPU_INTRA_HOST, CPU_INTER_HOST)
    usable = int(memory * USABLE) if memory_gib is None else int(memory_gib * GIB)
    return DeviceSet(device.type, world_size, local, usable, *bandwidths)
