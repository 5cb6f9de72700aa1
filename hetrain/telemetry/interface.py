"""What the kernel counted on the network interface that this host trains over.

It stands beside our own count of payload (traffic.py) and should exceed it a little. At an MTU of 1500 headers cost 66
bytes per 1448 of payload, 5% with ACKs; 1 to 3% where segments are handed to the interface whole and counted as one
frame, as virtual interfaces do. The trainer's own questions (does any rank want to stop?) come on top, which shows in
runs of tiny messages.

A counter belongs to the interface: ranks of one host share it, so one of them reports for all, and other programs that
use it count too. Loopback is left out, as it carries everything that is local to the machine. What ranks of one host
say to each other does not pass the interface.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
NET = Path("/sys/class/net")
LOOPBACK = "772"  # ARPHRD_LOOPBACK, as /sys/class/net/<name>/type says it


class Interface:
    """Bytes that one or more interfaces sent between `start` and now, pauses left out."""

    def __init__(self, counters: tuple[Path, ...]) -> None:
        """`counters`: the kernel's files of sent bytes, one per interface."""
        self._counters = counters
        self._sent = 0
        self._mark: int | None = None  # what the counters said when counting last began

    def start(self) -> None:
        """Count from now on."""
        self._mark = self._now()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out what is sent inside. Not to be nested."""
        self._sent, self._mark = self.sent, None
        try:
            yield
        finally:
            self.start()

    @property
    def sent(self) -> int:
        """Bytes so far."""
        return self._sent + (0 if self._mark is None else self._now() - self._mark)

    def _now(self) -> int:
        return sum(int(path.read_text()) for path in self._counters)


def interface_of(env: Mapping[str, str], net: Path = NET) -> Interface | None:
    """The interfaces that gloo or NCCL was told to use, where each is one of this machine's with counters; else None.

    Names are separated by commas, as gloo takes them; NCCL's patterns (`^docker`, `=eth0`) name no interface here.
    """
    names = next((env[variable] for variable in VARIABLES if env.get(variable)), None)
    if names is None:
        return None
    folders = [net / name for name in names.split(",")]
    counters = tuple(folder / "statistics" / "tx_bytes" for folder in folders)
    readable = all(path.is_file() and _kind(folder) != LOOPBACK for path, folder in zip(counters, folders, strict=True))
    return Interface(counters) if readable else None


def reports_for_host(env: Mapping[str, str]) -> bool:
    """Whether this rank is the one of its host whose interface counts; a rank that was started alone is."""
    return env.get("LOCAL_RANK", "0") == "0"


def _kind(folder: Path) -> str:
    kind = folder / "type"
    return kind.read_text().strip() if kind.is_file() else ""
