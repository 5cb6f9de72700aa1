"""The machines a plan is for: memory of each tier, link speeds, how ranks are grouped. They need not exist."""

from dataclasses import dataclass

from hetrain.errors import ConfigError
from hetrain.planner.piece_costs import NO_COSTS, PieceCosts

GIB = 1 << 30
KINDS = ("cuda", "cpu")
SLOWEST = 1e-6  # GB/s, a kilobyte a second: with speeds near 0 prices would be infinite


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of equal ranks. Bytes are what tables may take of one rank; GB/s (10^9 bytes) are of one rank."""

    kind: str  # cuda | cpu
    nodes: int
    ranks_per_node: int
    hbm_bytes: int  # of the device; 0 on cpu
    ddr_bytes: int  # of the host, one rank's share
    hbm_gb_s: float
    ddr_gb_s: float
    intra_gb_s: float  # between ranks of a node
    inter_gb_s: float  # between nodes
    latency_us: float = 0.0  # of one message
    host_link_gb_s: float = 32.0  # between a device and its host's memory
    piece_costs: PieceCosts = NO_COSTS  # none: prices are TorchRec's own

    def __post_init__(self) -> None:
        for name, least in (("nodes", 1), ("ranks_per_node", 1), ("hbm_bytes", 0), ("ddr_bytes", 0), ("latency_us", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"cluster.{name}={getattr(self, name)}: expected at least {least}.")
        for name in ("hbm_gb_s", "ddr_gb_s", "intra_gb_s", "inter_gb_s", "host_link_gb_s"):
            if not getattr(self, name) >= SLOWEST:
                raise ConfigError(
                    f"cluster.{name}={getattr(self, name)}: expected a speed above 0 GB/s, {SLOWEST:g} at least."
                )
        if self.kind not in KINDS:
            raise ConfigError(f"cluster.kind={self.kind!r}: expected one of {', '.join(KINDS)}.")

    @property
    def world_size(self) -> int:
        """Ranks of all nodes. Rank r is on node r // ranks_per_node."""
        return self.nodes * self.ranks_per_node

    @property
    def device_tier(self) -> str:
        """The tier of the memory that ranks compute in."""
        return "hbm" if self.kind == "cuda" else "ddr"

    @property
    def device_bytes(self) -> int:
        """Bytes of that tier on one rank."""
        return self.hbm_bytes if self.kind == "cuda" else self.ddr_bytes
