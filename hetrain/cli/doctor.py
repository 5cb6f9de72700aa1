"""`hetrain doctor`: what this machine has for training, and what each lack means."""

import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hetrain.launch import versions

GIB = 1 << 30
LOW_MEMORY_GIB = 4
LOW_DISK_GIB = 5


@dataclass(frozen=True)
class Finding:
    """One line of the report. `lack` says what its absence means; `fatal` that training cannot run."""

    name: str
    value: str
    lack: str = ""
    fatal: bool = False


def main() -> int:
    """Print the report; 1 when training cannot run here."""
    found = [*_versions(), *_libraries(), *_machine()]
    for finding in found:
        mark = "FAIL" if finding.fatal else "warn" if finding.lack else "ok"
        print(f"{mark:<5} {finding.name:<14} {finding.value}")
        if finding.lack:
            print(f"{'':<21}{finding.lack}")
    fatal = any(finding.fatal for finding in found)
    print(f"\ntraining cannot run here. {versions.INSTALL}" if fatal else "\nready to train")
    return 1 if fatal else 0


def _versions() -> Iterator[Finding]:
    python = sys.version.split()[0]
    if sys.version_info[:2] == versions.PYTHON:
        yield Finding("python", python)
    else:
        tested = ".".join(map(str, versions.PYTHON))
        yield Finding("python", python, f"tested with {tested}", fatal=sys.version_info[:2] < versions.PYTHON)
    for row in versions.found():
        if row.fits:
            yield Finding(row.name, f"{row.version} (tested: {row.tested})")
        else:
            lack = f"tested with {row.tested}; other versions load kernels that do not match"
            yield Finding(row.name, row.version or "missing", lack, fatal=True)


def _libraries() -> Iterator[Finding]:
    from hetrain.launch.quiet import quiet_third_parties

    quiet_third_parties()
    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        yield Finding("kernels", str(error), "nothing can be computed without torch", fatal=True)
        return
    try:
        import fbgemm_gpu  # noqa: F401
        import torchrec  # noqa: F401
    except (ImportError, OSError) as error:
        text = str(error).splitlines()[0]
        lack = "fbgemm-gpu does not fit this torch (a CUDA build beside a CPU torch does this)"
        yield Finding("kernels", text, lack, fatal=True)
    else:
        yield Finding("kernels", "torchrec and fbgemm-gpu load")
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    if gpus:
        yield Finding("device", f"{len(gpus)} GPU: {', '.join(sorted(set(gpus)))}")
    elif shutil.which("nvidia-smi"):
        lack = f"this torch ({torch.__version__}) cannot use the GPU: training runs on the CPU"
        yield Finding("device", "cpu; a GPU is present", lack)
    else:
        yield Finding("device", "cpu (no GPU: row caches and models run on the CPU, slower on wide models)")
    gloo, nccl = dist.is_gloo_available(), dist.is_nccl_available()
    lack = "" if gloo else "processes cannot talk to each other: only launch.nproc=1 would start"
    yield Finding("gloo", "yes" if gloo else "no", lack, fatal=not gloo)
    yield Finding(
        "nccl", "yes" if nccl else "no", "several GPUs cannot talk to each other" if gpus and not nccl else ""
    )


def _machine() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Finding("cores", str(cores), "" if cores > 1 else "two processes will share one core; set launch.nproc=1")
    total, free = _memory_gib()
    lack = ""
    if free < LOW_MEMORY_GIB:
        lack = "each process needs about 1 GiB for its libraries, and the embedding tables come on top"
    yield Finding("memory", f"{free:.1f} GiB free of {total:.1f}", lack)
    disk = shutil.disk_usage(Path.cwd())
    lack = "prepared data and checkpoints (each as big as all tables with their state) are written here"
    yield Finding(
        "disk", f"{disk.free / GIB:.1f} GiB free in {Path.cwd()}", lack if disk.free < LOW_DISK_GIB * GIB else ""
    )


def _memory_gib() -> tuple[float, float]:
    """(total, available) memory of this machine."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(line.split(":") for line in meminfo.read_text().splitlines())
        kib = {key: int(fields[key].split()[0]) for key in ("MemTotal", "MemAvailable")}
        return kib["MemTotal"] * 1024 / GIB, kib["MemAvailable"] * 1024 / GIB
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    return total, total
