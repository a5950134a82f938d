#!/usr/bin/env bash
# Measures everything that needs a GPU and shows it in one table with the aims; see docs/benchmarks/h100.md:
#
#   bash scripts/lab/gpu_results.sh --cifar10 DIR --imagenette DIR --timm-train FILE --airbench DIR --hiverge DIR
#   bash scripts/lab/gpu_results.sh --list
#
# Takes the active environment's Python, or the first on PATH that has torch; unlike other scripts here it installs
# nothing and does not insist on the versions in requirements.txt, which it only compares.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../environment.sh"

PYTHON=
for candidate in "${VIRTUAL_ENV:+$VIRTUAL_ENV/bin/python}" python3 python "$ROOT/.venv/bin/python"; do
  if [[ -n $candidate ]] && "$candidate" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)' 2>/dev/null; then
    PYTHON=$candidate
    break
  fi
done
if [[ -z $PYTHON ]]; then
  echo "No Python here has torch; 'bash scripts/quickstart.sh' installs what is missing into .venv" >&2
  exit 1
fi
missing=$(missing_requirements "$PYTHON" requirements.txt) || true
if [[ -n $missing ]]; then
  echo "gpu_results.sh: not as requirements.txt has it, going on: ${missing//$'\n'/, }" >&2
fi
exec "$PYTHON" "$ROOT/scripts/lab/gpu_results.py" "$@"
