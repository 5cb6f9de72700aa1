"""The nodes of a plan, as TorchRec hears of them: it reads how many ranks a node has from the environment alone."""

import contextlib
import os
from collections.abc import Iterator

from torchrec.distributed import comm

RANKS_OF_NODE = "LOCAL_WORLD_SIZE"


@contextlib.contextmanager
def nodes_of(ranks_per_node: int) -> Iterator[None]:
    """While open, what TorchRec shards has nodes of so many ranks, whatever machines they are on. Collective.

    Table-row-wise and grid sharding exchange within nodes and between them, in groups that TorchRec makes once per
    process; those of other nodes are forgotten.
    """
    if comm._INTRA_PG is not None and comm._INTRA_PG.size() != ranks_per_node:
        comm._INTRA_PG = comm._CROSS_PG = None
    before = os.environ.get(RANKS_OF_NODE)
    os.environ[RANKS_OF_NODE] = str(ranks_per_node)
    try:
        yield
    finally:
        if before is None:
            del os.environ[RANKS_OF_NODE]
        else:
            os.environ[RANKS_OF_NODE] = before
