#!/usr/bin/env bash
# Lints and tests, several files at a time; installs what is missing first. Takes pytest's flags:
#
#   bash scripts/test.sh tests/utils -x
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$ROOT"
ready_python requirements-dev.txt

"$PYTHON" -m ruff check
"$PYTHON" -m ruff format --check
# More processes than cores, since a third of the tests' time is spent waiting. Each takes up to 2 GB.
CORES=$("$PYTHON" -c 'import os; print(len(getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count()))(0)))')
PROCESSES=$((CORES < 6 ? CORES + (CORES + 1) / 2 : 8))
# Keep the order of the files, in which the slowest do not come last.
"$PYTHON" -m pytest -n "$PROCESSES" --dist loadfile --no-loadscope-reorder "$@"
