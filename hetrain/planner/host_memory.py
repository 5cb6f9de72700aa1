"""How much memory this machine has for us. No torch."""

import os
from pathlib import Path

CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def host_memory() -> int:
    """Bytes of this host, or of the container it is confined to."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for name in CGROUP_LIMITS:
        path = Path(name)
        if path.exists() and (text := path.read_text().strip()).isdigit():
            return min(total, int(text))
    return total
