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
# The types take half a minute of one core at first; the tests begin meanwhile, or are compiled for the first time.
types=$(mktemp)
"$PYTHON" -m mypy >"$types" 2>&1 &
checking=$!
trap 'kill "$checking" 2>/dev/null || true; rm -f "$types"' EXIT
if [[ ! -e tests/__pycache__ ]]; then # each of pytest's processes would compile all that it imports
  PYTHONDONTWRITEBYTECODE= "$PYTHON" -m pytest --collect-only >/dev/null || true
fi
code=0
run_pytest "$@" || code=$?
wait "$checking" || code=1
cat "$types"
exit "$code"
