#!/usr/bin/env bash
# Lints and tests, two files at a time; installs what is missing first. Flags are pytest's: bash scripts/test.sh tests/utils -x
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$ROOT"
ready_python requirements-dev.txt

"$PYTHON" -m ruff check
"$PYTHON" -m ruff format --check
# In the files' own order: those that take longest do not come last.
"$PYTHON" -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
