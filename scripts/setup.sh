#!/usr/bin/env bash
# Makes .venv with the tested versions: the CUDA build where nvidia-smi is, else the CPU build. Quick the second time.
# Usage: scripts/setup.sh [dev]    dev: also what tests, lint and types need
# Settings: HETRAIN_VENV (folder, default .venv), HETRAIN_PYTHON (default: the newest of 3.11, 3.12, 3.13 found),
#           HETRAIN_BUILD=cpu|cuda, HETRAIN_TORCH_INDEX (where to take torch from; default: pip's own index)
set -euo pipefail
cd "$(dirname "$0")/.."

TORCH=2.13.0 TORCHREC=1.8.0 FBGEMM=1.8.0
VENV=${HETRAIN_VENV:-.venv}
EXTRA=${1:-}

find_python() {
    local candidate
    for candidate in ${HETRAIN_PYTHON:-} python3.11 python3.12 python3.13 python3 python; do
        if command -v "$candidate" >/dev/null 2>&1 &&
            "$candidate" -c 'import sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "setup: no Python 3.11, 3.12 or 3.13 found (tested: 3.11)." >&2
    echo "  Install python3.11 with its venv module, or set HETRAIN_PYTHON to its path." >&2
    exit 1
}

build() {
    if [ -n "${HETRAIN_BUILD:-}" ]; then
        echo "$HETRAIN_BUILD"
    elif command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU; then
        echo cuda
    else
        echo cpu
    fi
}

BUILD=$(build)
WANTED="$BUILD $(cat pyproject.toml scripts/setup.sh | cksum | tr ' ' '-') $PWD"
STAMP=$VENV/.hetrain-setup
if [ -f "$STAMP" ] && grep -qxF "$WANTED" "$STAMP" && { [ -z "$EXTRA" ] || grep -qxF "$EXTRA" "$STAMP"; }; then
    exit 0
fi

echo "setup: into $VENV, about 1 GB for the CPU build and 6 GB for CUDA's; takes minutes the first time"
if [ ! -x "$VENV/bin/python" ]; then
    PYTHON=$(find_python)
    "$PYTHON" -m venv "$VENV"
fi
pip() { "$VENV/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }

say() { echo "setup: $*"; }

say "torch $TORCH ($BUILD)"
KERNELS="fbgemm-gpu==$FBGEMM"
if [ "$BUILD" = cpu ]; then
    KERNELS="fbgemm-gpu-cpu==$FBGEMM"
fi
# PyPI's Linux wheel of torch may bring CUDA's libraries (3 GB) along and computes on the CPU all the same; an index of
# CPU builds saves that download.
if [ -n "${HETRAIN_TORCH_INDEX:-}" ]; then
    pip install "torch==$TORCH" --index-url "$HETRAIN_TORCH_INDEX"
else
    pip install "torch==$TORCH"
fi

say "the other libraries"
"$VENV/bin/python" - "$EXTRA" >"$VENV/requirements.txt" <<'PY'
import sys, tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
print("\n".join(project["dependencies"] + project["optional-dependencies"].get(sys.argv[1], [])))
PY
pip install -r "$VENV/requirements.txt" hatchling editables

# torchrec would pull in the CUDA build of fbgemm-gpu; it is installed alone and its needs are ours (pyproject.toml).
say "torchrec $TORCHREC, ${KERNELS%%=*} $FBGEMM, hetrain"
pip install --no-deps "$KERNELS" "torchrec==$TORCHREC"
pip install --no-deps --no-build-isolation -e .
printf '%s\n%s\n' "$WANTED" "$EXTRA" >"$STAMP"
