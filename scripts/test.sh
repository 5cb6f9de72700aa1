#!/usr/bin/env bash
# The set-up of a user, then lint, format, types and tests.
# Usage: scripts/test.sh [PYTEST ARGUMENTS ...]
set -uo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh dev || exit 1
BIN=${HETRAIN_VENV:-.venv}/bin
failed=()
"$BIN/ruff" check . || failed+=("ruff check")
"$BIN/ruff" format --check . || failed+=("ruff format")
"$BIN/mypy" || failed+=(mypy)
"$BIN/python" -m pytest -n 2 --dist worksteal "$@" || failed+=(pytest)
if [ ${#failed[@]} -gt 0 ]; then
    printf 'failed: %s\n' "${failed[@]}" >&2
    exit 1
fi
