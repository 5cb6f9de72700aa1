"""The hosts of an emulated network (netlab.py): namespaces joined by a bridge, links capped by token buckets."""

import json
import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PREFIX = "hetlab"  # of every namespace made here: PREFIX.<pid>.<start time>.<host>
INTERFACE = "eth0"  # namespaces are apart: all hosts of all labs may use the same


class LabError(Exception):
    """What went wrong and what to do; shown without a traceback."""


class Stopped(Exception):  # noqa: N818 - not an error
    """A signal came before the job was started."""


@dataclass(frozen=True)
class Host:
    """One host of the lab: its rank numbers and the rate of its link in bits per second (None: not capped)."""

    ranks: tuple[int, ...]
    rate: int | None


def command(*words: str) -> str:
    """Output of `ip` or `tc`; LabError with what it said. In a session of its own, so that Ctrl-C does not cut it."""
    result = subprocess.run(words, capture_output=True, text=True, check=False, start_new_session=True)
    if result.returncode:
        raise LabError(f"`{' '.join(words)}` failed ({result.returncode}): {result.stderr.strip()}")
    return result.stdout


def started_at(pid: int) -> str | None:
    """The kernel's start time of a process, which tells it from a later one of the same number; None: not running."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *fields = text.rpartition(")")[2].split()
    return None if state in "ZX" else fields[18]


def namespaces() -> list[str]:
    """Names of all labs' namespaces."""
    names = (line.split()[0] for line in command("ip", "netns", "list").splitlines() if line.split())
    return [name for name in names if name.startswith(f"{PREFIX}.")]


def remove(names: Sequence[str]) -> None:
    """Kill what runs in these namespaces, then delete them. LabError, after all were tried, for those still there."""
    failed: list[LabError] = []
    for name in names:
        try:
            for pid in command("ip", "netns", "pids", name).split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            command("ip", "netns", "delete", name)
        except LabError as error:
            failed.append(error)
    if failed and set(names) & set(namespaces()):  # else another lab, which starts now, was faster
        raise failed[0]


def remove_leftovers() -> None:
    """Remove the namespaces of labs that are no more."""
    parts = [(name, name.split(".")) for name in namespaces()]
    remove([name for name, (_, pid, started, _) in parts if started_at(int(pid)) != started])


class Lab:
    """Namespaces joined by a bridge. `caught`: stop signals, which end setting up between two steps."""

    def __init__(self, hosts: Sequence[Host], latency: str | None, caught: list[int]) -> None:
        self._hosts, self._latency, self._caught = hosts, latency, caught
        self._tag = f"{PREFIX}.{os.getpid()}.{started_at(os.getpid())}"
        self._switch = f"{self._tag}.switch"

    def __enter__(self) -> "Lab":
        try:
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        remove([name for name in namespaces() if name.startswith(f"{self._tag}.")])

    def name(self, host: int) -> str:
        """The namespace of a host."""
        return f"{self._tag}.h{host}"

    def address(self, host: int) -> str:
        """The address of a host."""
        return f"10.213.0.{host + 1}"

    def counters(self, host: int) -> tuple[int, int]:
        """Bytes that a host's interface sent and received."""
        found = json.loads(command("ip", "-n", self.name(host), "-j", "-s", "link", "show", INTERFACE))[0]["stats64"]
        return int(found["tx"]["bytes"]), int(found["rx"]["bytes"])

    def _step(self, *words: str) -> None:
        if self._caught:
            raise Stopped
        command(*words)

    def _build(self) -> None:
        self._step("ip", "netns", "add", self._switch)
        self._step("ip", "-n", self._switch, "link", "add", "bridge", "type", "bridge")
        self._step("ip", "-n", self._switch, "link", "set", "bridge", "addrgenmode", "none", "up")
        # Segments that every bucket on their way has room for: none need be cut, which costs CPU time.
        segment = str(min([65_536, *(burst_of(host.rate) * 7 // 8 for host in self._hosts if host.rate is not None)]))
        for number, host in enumerate(self._hosts):
            name, port = self.name(number), f"port{number}"
            self._step("ip", "netns", "add", name)
            self._step("ip", "-n", name, "link", "set", "lo", "up")
            peer = ("peer", "name", port, "netns", self._switch)
            self._step("ip", "link", "add", INTERFACE, "netns", name, "type", "veth", *peer)
            self._step("ip", "-n", name, "address", "add", f"{self.address(number)}/24", "dev", INTERFACE)
            self._step("ip", "-n", self._switch, "link", "set", port, "master", "bridge")
            # Without addresses of IPv6 nothing is sent that the job did not send, but for ARP.
            for space, device in ((name, INTERFACE), (self._switch, port)):
                self._step("ip", "-n", space, "link", "set", device, "addrgenmode", "none", "up")
            self._step("ip", "-n", name, "link", "set", INTERFACE, "gso_max_size", segment)
            self._shape(name, INTERFACE, host.rate, self._latency)
            self._shape(self._switch, port, host.rate, None)

    def _shape(self, space: str, device: str, rate: int | None, latency: str | None) -> None:
        """Cap and delay what `device` sends."""
        add = ("tc", "-n", space, "qdisc", "add", "dev", device)
        parent = ["root"]
        if latency is not None:
            try:
                self._step(*add, "root", "handle", "1:", "netem", "delay", latency, "limit", "100000")
            except LabError as error:
                raise LabError(
                    f"--latency {latency}: this kernel has no netem ({error}).\n"
                    "  Load it (`modprobe sch_netem`), use a kernel that has it, or leave --latency out."
                ) from error
            parent = ["parent", "1:1", "handle", "10:"]
        if rate is not None:
            burst = str(burst_of(rate))
            self._step(*add, *parent, "tbf", "rate", f"{rate}bit", "burst", burst, "latency", "50ms")


def burst_of(rate: int) -> int:
    """Bytes a link may send at once after a pause: what the bucket's timer needs to meet the rate, and a frame's worth.

    Small, since a bucket as large as the messages of a step would let them pass as if the link were not capped.
    """
    return max(rate // 8 // 5000, 16_000)
