#!/usr/bin/env bash
# Lints, checks types and tests, several files at a time; installs what is missing first. Takes pytest's flags:
#
#   bash scripts/test.sh tests/utils -x
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$ROOT"
ready_python requirements-dev.txt

"$PYTHON" -m ruff check
"$PYTHON" -m ruff format --check
"$PYTHON" -m mypy
run_pytest "$@"
