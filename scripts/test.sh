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
# The types take half a minute of one core at first, and the tests begin meanwhile.
types=$(mktemp)
"$PYTHON" -m mypy >"$types" 2>&1 &
checking=$!
trap 'kill "$checking" 2>/dev/null || true; rm -f "$types"' EXIT
code=0
run_pytest "$@" || code=$?
wait "$checking" || code=1
cat "$types"
exit "$code"
