"""Runs a hetrain job on hosts of its own on this machine, joined by links of a given speed.

Every host is a network namespace with one interface, `eth0`, at a bridge in a further namespace. A link is capped in
both directions by a token bucket (`tc tbf`). Ranks start as torchrun would start them: RANK, WORLD_SIZE, ... and the
address of rank 0's own host. What every host sent and received is read from the kernel's counters.

    sudo .venv/bin/python scripts/netlab.py --hosts 2 --rate 1gbit -- train consistency=het
    sudo .venv/bin/python scripts/netlab.py --hosts 4 --rate 250mbit --ranks-per-host 2 --json out.json -- \\
        train +experiment=criteo_het data=criteo data.path=data/criteo
    sudo .venv/bin/python scripts/netlab.py --preset paper --workers 2 --rate 250mbit -- train consistency=het

Output of rank 0 is shown as it comes; that of the other ranks goes to files and is shown when the job fails. The exit
code is the job's: that of the first rank that failed. Everything made is removed at the end, but for the
output of a job that failed; also after Ctrl-C or SIGTERM (passed on to the ranks, which save and stop; a second one
kills them); what a lab killed with -9 left is removed by the next one. Labs may run at the same time.

Ranks of one host talk over its loopback, which the counters of `eth0` do not see. The cap counts the headers of every
frame (957 Mbit/s of payload pass a link of 1 Gbit/s). The counters take a segment that is cut into frames later (14 to
64 KiB) as one frame: headers and ACKs add some 1 to 3% to the payload there, 5% where frames are small.
"""

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from netlab_hosts import INTERFACE, Host, Lab, LabError, Stopped, remove_leftovers

PORT = 29500  # of rank 0; namespaces are apart, so every lab may use the same
GRACE_S = 30.0  # for ranks to end after a signal, or after another rank failed
MOST_HOSTS = 200
UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
TAIL_LINES = 60


@dataclass
class Rank:
    """A started rank and, but for rank 0, the file its output goes to."""

    number: int
    process: subprocess.Popen[bytes]
    output: Path | None
    ended_at: float | None = None

    @property
    def code(self) -> int:
        """Its exit code; 128 + the number of the signal that killed it."""
        code = self.process.returncode
        return 128 - code if code < 0 else code


# -- what the user asked for ------------------------------------------------------------------------


def rate_of(text: str) -> int | None:
    """Bits per second of `1gbit`, `250mbit`, ...; None for `none`. LabError for anything else."""
    if text == "none":
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(bit|kbit|mbit|gbit)", text)
    bits = int(float(found[1]) * UNITS[found[2]]) if found else 0
    if bits < 10_000:
        raise LabError(f"--rate {text}: expected a number of bits a second like 1gbit, 250mbit or 2.5gbit, or none.")
    return bits


def latency_of(text: str | None) -> str | None:
    """A delay as tc takes it. LabError for anything but a number of us, ms or s."""
    if text is not None and not re.fullmatch(r"\d+(\.\d+)?(us|ms|s)", text):
        raise LabError(f"--latency {text}: expected a time like 500us or 2ms.")
    return text


def hosts_of(args: argparse.Namespace) -> list[Host]:
    """The hosts, in rank order. LabError for numbers that make no lab."""
    rate = rate_of(args.rate)
    if args.preset == "paper":
        if args.workers < 1:
            raise LabError(f"--workers {args.workers}: expected at least 1.")
        return [Host(tuple(range(args.workers)), None), Host((args.workers,), rate)]
    if not 2 <= args.hosts <= MOST_HOSTS:
        raise LabError(f"--hosts {args.hosts}: expected 2 to {MOST_HOSTS}; for one host no lab is needed.")
    if args.ranks_per_host < 1:
        raise LabError(f"--ranks-per-host {args.ranks_per_host}: expected at least 1.")
    per = args.ranks_per_host
    return [Host(tuple(range(h * per, (h + 1) * per)), rate) for h in range(args.hosts)]


def job_of(args: argparse.Namespace) -> list[str]:
    """The arguments of hetrain, with what the lab adds where the user does not set it."""
    job = list(args.job)
    if not job or job[0].startswith("-") or "=" in job[0]:
        raise LabError("no job given: put one after `--`, such as `-- train consistency=het`.")
    added = {"launch.threads": "1"}
    if args.preset == "paper":
        added["cluster.servers"] = "1"
    if args.json is not None and job[0] == "train":
        added["name"] = f"netlab-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    given = {argument.lstrip("+").partition("=")[0] for argument in job[1:]}
    return job + [f"{key}={value}" for key, value in added.items() if key not in given]


def check_python() -> None:
    """LabError where there is no hetrain, which this script takes parts of, to run."""
    if importlib.util.find_spec("hetrain") is None:
        raise LabError(
            f"{sys.executable} has no hetrain: start this script with the Python that has, as .venv/bin/python."
        )


def check_machine() -> None:
    """LabError where no lab can be built, or no job can run in it."""
    if not sys.platform.startswith("linux"):
        raise LabError(f"network namespaces need Linux; this is {sys.platform}. Use a Linux machine or container.")
    if os.geteuid() != 0:
        raise LabError(
            "network namespaces need root: start with `sudo`, or in a container with NET_ADMIN and SYS_ADMIN."
        )
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise LabError(f"no `{'` and no `'.join(missing)}` found: install iproute2 (`apt-get install iproute2`).")


# -- signals: noted, never raised, so that no step of setting up or cleaning is left half done ---------


@contextmanager
def signals_noted() -> Iterator[list[int]]:
    """While open, stop signals are added to the list it yields."""
    from hetrain.stop_signals import catch, restore

    caught: list[int] = []
    before = catch(lambda number, frame: caught.append(number))
    try:
        yield caught
    finally:
        restore(before)


# -- the job --------------------------------------------------------------------------------------


class Job:
    """The ranks of a hetrain command on the hosts of a lab."""

    def __init__(self, lab: Lab, hosts: Sequence[Host], arguments: Sequence[str], logs: Path) -> None:
        self.ranks: list[Rank] = []
        self._deadline: float | None = None
        self._heard = 0  # signals passed on
        world = sum(len(host.ranks) for host in hosts)
        try:
            for number, host in enumerate(hosts):
                for local, rank in enumerate(host.ranks):
                    environment = {
                        "RANK": rank,
                        "WORLD_SIZE": world,
                        "LOCAL_RANK": local,
                        "LOCAL_WORLD_SIZE": len(host.ranks),
                        "MASTER_ADDR": lab.address(0),
                        "MASTER_PORT": PORT,
                        "GLOO_SOCKET_IFNAME": INTERFACE,
                        "NCCL_SOCKET_IFNAME": INTERFACE,
                    }
                    output = None if rank == 0 else logs / f"rank{rank}.log"
                    self.ranks.append(Rank(rank, _started(lab.name(number), environment, arguments, output), output))
        except BaseException:
            self._kill()
            raise

    def wait(self, caught: list[int]) -> int:
        """Until every rank has ended; the job's exit code. Passes signals on, ends the others when a rank fails."""
        while running := [rank for rank in self.ranks if rank.ended_at is None]:
            for rank in running:
                if rank.process.poll() is not None:
                    rank.ended_at = time.monotonic()
                    if rank.code:
                        self._end_within(GRACE_S)
            for number in caught[self._heard :]:
                self._pass_on(number)
            if self._deadline is not None and time.monotonic() > self._deadline:
                self._kill()
            time.sleep(0.02)
        failed = [rank for rank in self.ranks if rank.code]
        return min(failed, key=lambda rank: (rank.ended_at, rank.number)).code if failed else 0

    def _pass_on(self, number: int) -> None:
        self._heard += 1
        if self._heard > 1:
            self._kill()
            return
        self._end_within(GRACE_S)
        for rank in self.ranks:
            if rank.process.poll() is None:
                rank.process.send_signal(number)

    def _end_within(self, seconds: float) -> None:
        self._deadline = self._deadline or time.monotonic() + seconds

    def _kill(self) -> None:
        for rank in self.ranks:
            if rank.process.poll() is None:
                rank.process.kill()
                rank.process.wait()

    def failures(self) -> str:
        """The last lines of every rank that failed, but for rank 0, whose output was shown."""
        parts = []
        for rank in self.ranks:
            if rank.output is not None and rank.code:
                tail = rank.output.read_text(errors="replace").splitlines()[-TAIL_LINES:]
                parts.append("\n".join([f"--- rank {rank.number}, exit code {rank.code}: {rank.output}", *tail]))
        return "\n".join(parts)


def _started(
    namespace: str, environment: dict[str, str | int], arguments: Sequence[str], output: Path | None
) -> "subprocess.Popen[bytes]":
    from hetrain.launch.orphans import end_with_parent

    words = ["ip", "netns", "exec", namespace, sys.executable, "-m", "hetrain", *arguments]
    env = {**os.environ, **{key: str(value) for key, value in environment.items()}}
    target: Any = None if output is None else output.open("wb")
    try:
        return subprocess.Popen(
            words,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=target,
            stderr=None if target is None else subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches the lab alone, which passes it on once
            preexec_fn=end_with_parent,  # so that `kill -9` of a lab leaves no process
        )
    finally:
        if target is not None:
            target.close()


# -- the report -----------------------------------------------------------------------------------


def summary_of(arguments: Sequence[str]) -> dict[str, Any] | None:
    """summary.json of the run that a `train` command made; None where there is none."""
    given = dict(argument.lstrip("+").split("=", 1) for argument in arguments if "=" in argument)
    path = Path(given.get("runs", "runs")) / given.get("name", "") / "summary.json"
    return json.loads(path.read_text()) if "name" in given and path.is_file() else None


def report(
    hosts: Sequence[Host], sent: Sequence[tuple[int, int]], arguments: Sequence[str], code: int, seconds: float
) -> dict[str, Any]:
    """What --json writes. `sent`: bytes sent and received per host."""
    return {
        "job": list(arguments),
        "exit_code": code,
        "wall_seconds": seconds,
        "hosts": [
            {"ranks": list(host.ranks), "rate_bits_per_s": host.rate, "tx_bytes": tx, "rx_bytes": rx}
            for host, (tx, rx) in zip(hosts, sent, strict=True)
        ],
        "summary": summary_of(arguments) if code == 0 and arguments[0] == "train" else None,
    }


def run(args: argparse.Namespace, caught: list[int]) -> int:
    """Build the lab, run the job, report; the job's exit code."""
    hosts, latency, arguments = hosts_of(args), latency_of(args.latency), job_of(args)
    check_machine()
    remove_leftovers()
    logs = Path(tempfile.mkdtemp(prefix="netlab-"))
    keep = False
    try:
        with Lab(hosts, latency, caught) as lab:
            before = [lab.counters(number) for number in range(len(hosts))]
            started = time.monotonic()
            job = Job(lab, hosts, arguments, logs)
            code = job.wait(caught)
            seconds = time.monotonic() - started
            after = [lab.counters(number) for number in range(len(hosts))]
        if code and not caught:
            keep = bool(shown := job.failures())
            print(shown, file=sys.stderr)
        moved = [(tx - tx0, rx - rx0) for (tx, rx), (tx0, rx0) in zip(after, before, strict=True)]
        if args.json is not None:
            args.json.write_text(json.dumps(report(hosts, moved, arguments, code, seconds), indent=2) + "\n")
        figures = ", ".join(f"host {n} sent {tx / 1e6:,.1f} MB" for n, (tx, _) in enumerate(moved))
        print(f"netlab: {seconds:.1f} s, {figures}", file=sys.stderr)
        return code
    finally:
        if not keep:
            shutil.rmtree(logs, ignore_errors=True)


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=["paper"], help="paper: all workers on one host, one server on another")
    parser.add_argument("--hosts", type=int, default=2, help="number of hosts (2)")
    parser.add_argument("--ranks-per-host", type=int, default=1, help="ranks on each host (1)")
    parser.add_argument("--workers", type=int, default=2, help="with --preset paper: ranks of the workers' host (2)")
    parser.add_argument(
        "--rate",
        default="1gbit",
        help="of every host's link each way; with --preset paper of the server's; none: no cap (1gbit)",
    )
    parser.add_argument("--latency", help="added to whatever a host sends, such as 1ms; needs the kernel's netem")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write rates, bytes per host, seconds and rank 0's summary"
    )
    parser.add_argument("job", nargs="*", help="after `--`: a hetrain command, such as train consistency=het")
    return parser.parse_args(words)


def main() -> int:
    """Run; LabErrors are shown without a traceback."""
    args = parse(sys.argv[1:])
    try:
        check_python()
        with signals_noted() as caught:
            return run(args, caught)
    except LabError as error:
        print(f"netlab: {error}", file=sys.stderr)
        return 2
    except Stopped:
        return 128 + caught[0]


if __name__ == "__main__":
    sys.exit(main())
