"""What each rank of a run does: read data and compute, own rows, or both. No torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Roles:
    """Ranks `0 .. workers - 1` compute; the last `servers` own all rows. Without servers every rank does both."""

    world_size: int = 1
    servers: int = 0  # cluster.servers; fewer than world_size

    @property
    def workers(self) -> int:
        """Ranks that read data and compute."""
        return self.world_size - self.servers

    @property
    def owners(self) -> range:
        """Ranks that own rows."""
        return range(self.workers if self.servers else 0, self.world_size)

    def computes(self, rank: int) -> bool:
        """Whether `rank` is a worker."""
        return rank < self.workers

    def owns(self, rank: int) -> bool:
        """Whether `rank` holds rows for others."""
        return rank in self.owners

    def name(self, rank: int) -> str:
        """`rank` as errors call it."""
        if not self.servers:
            return f"rank {rank}"
        return f"{'worker' if self.computes(rank) else 'server'} rank {rank}"
