#!/usr/bin/env bash
# Runs the tests with the lowest versions that requirements.txt allows, on the oldest supported Python that is
# installed, in .venv-lowest, which the first run makes. Takes pytest's flags:
#
#   bash scripts/lab/test_lowest.sh -x
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../environment.sh"
cd "$ROOT"
export VIRTUAL_ENV=$ROOT/.venv-lowest

is_new "$VIRTUAL_ENV/bin/python" || make_venv "$VIRTUAL_ENV" python3.10 python3.11 python3.12 python3.13 python3 python
{
  sed -E 's/^([[:alnum:]._-]+)>=([0-9.]+),<[0-9.]+/\1==\2/' requirements.txt
  echo "-r ../requirements-dev.txt"
} > "$VIRTUAL_ENV/requirements.txt"
ready_python .venv-lowest/requirements.txt

run_pytest "$@"
