"""What a planner must know of the machines: memory and bandwidths per rank, and how ranks are grouped."""

import os
from dataclasses import dataclass

import torch

from hetrain.planner.cluster import GIB, Cluster
from hetrain.planner.host_memory import host_memory

USABLE = 0.85  # share of a rank's memory that tables may take: the rest is for the dense part, batches and buffers

# GB/s. A rank on a CPU shares its host's memory channels; between processes of one host gloo moves about 1 GB/s
# (measured, loopback); 10 GbE is a common link between CPU hosts. For GPUs: NVLink and 100 Gbit, as TorchRec assumes.
CPU_MEMORY, CPU_INTRA_HOST, CPU_INTER_HOST = 10.0, 1.0, 1.25
GPU_MEMORY, GPU_INTRA_HOST, GPU_INTER_HOST = 897.0, 600.0, 12.5


@dataclass(frozen=True)
class DeviceSet:
    """Ranks as TorchRec's planner knows them, equal, with one memory each; of hosts the last may have fewer ranks.

    `memory`: bytes usable for tables on each; bandwidths in GB/s of one rank.
    """

    kind: str  # cpu | cuda
    world_size: int
    ranks_per_host: int
    memory: int
    memory_gb_s: float
    intra_host_gb_s: float
    inter_host_gb_s: float

    def as_cluster(self) -> Cluster:
        """As our own strategies know them: on full hosts alone, with the device's memory and speed only."""
        on_gpu = self.kind == "cuda"
        return Cluster(
            *(self.kind, self.world_size // self.ranks_per_host, self.ranks_per_host),
            *(self.memory if on_gpu else 0, 0 if on_gpu else self.memory),
            *(self.memory_gb_s, self.memory_gb_s, self.intra_host_gb_s, self.inter_host_gb_s),
        )


def devices_of(cluster: Cluster) -> DeviceSet:
    """What TorchRec's planner is told of a cluster: the memory that ranks compute in."""
    speed = cluster.hbm_gb_s if cluster.kind == "cuda" else cluster.ddr_gb_s
    return DeviceSet(
        *(cluster.kind, cluster.world_size, cluster.ranks_per_node, cluster.device_bytes),
        *(speed, cluster.intra_gb_s, cluster.inter_gb_s),
    )


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
