#!/usr/bin/env bash
# From nothing to a trained model: environment, sample data, `hetrain train +experiment=criteo_het`, what came out.
# Usage: scripts/quickstart.sh [KEY=VALUE ...]    overrides are passed on to `hetrain train`
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh
PATH="$(cd "${HETRAIN_VENV:-.venv}" && pwd)/bin:$PATH"
NAME=quickstart_$(date +%m%d-%H%M%S)_$$
hetrain train +experiment=criteo_het name="$NAME" "$@"
python scripts/quickstart_report.py "runs/$NAME"
