"""The versions hetrain is tested with; kernels and sharding of other ones fail in ways that are hard to read."""

import sys
from dataclasses import dataclass
from importlib import metadata

from hetrain.errors import HetrainError

PYTHON = (3, 11)
TESTED = {"torch": "2.13.0", "torchrec": "1.8.0", "fbgemm-gpu": "1.8.0"}
VARIANTS = {"fbgemm-gpu": ("fbgemm-gpu", "fbgemm-gpu-cpu")}  # the same library, built with and without CUDA
INSTALL = (
    "scripts/setup.sh installs the tested versions; by hand: pip install torch==2.13.0, then pip install --no-deps "
    "torchrec==1.8.0 fbgemm-gpu-cpu==1.8.0 (fbgemm-gpu==1.8.0 with CUDA)."
)


@dataclass(frozen=True)
class Found:
    """One library: the version on this machine (None: not installed) against the tested one."""

    name: str
    tested: str
    version: str | None

    @property
    def fits(self) -> bool:
        """Same major and minor version as the tested one: patch releases keep the binary interface."""
        return self.version is not None and self.version.split(".")[:2] == self.tested.split(".")[:2]


def installed(name: str) -> tuple[str, str] | None:
    """(distribution, version) of the first installed variant of `name`."""
    for variant in VARIANTS.get(name, (name,)):
        try:
            return variant, metadata.version(variant)
        except metadata.PackageNotFoundError:
            continue
    return None


def found() -> list[Found]:
    """The three libraries whose versions must match."""
    rows = []
    for name, tested in TESTED.items():
        hit = installed(name)
        rows.append(Found(hit[0], tested, hit[1]) if hit else Found(name, tested, None))
    return rows


def tested_triple() -> str:
    """The combination the tests run on, in words."""
    return ", ".join(f"{name} {version}" for name, version in TESTED.items())


def check_versions() -> None:
    """Raise HetrainError unless torch, torchrec and fbgemm-gpu are of the tested versions."""
    wrong = [f"{row.name} {row.version or 'is missing'}" for row in found() if not row.fits]
    if sys.version_info[:2] < PYTHON:
        wrong.append(f"Python {sys.version.split()[0]}")
    if wrong:
        raise HetrainError(
            f"unsupported versions: {', '.join(wrong)}.\n"
            f"  hetrain is tested with {tested_triple()} and Python {'.'.join(map(str, PYTHON))}; others load kernels"
            f" that do not match.\n  {INSTALL}"
        )
