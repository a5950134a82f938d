#!/usr/bin/env bash
# Trains the default, a small convolutional network on handwritten digits, and says how to see the curves. Installs what
# is missing first. Takes main.py's flags:
#
#   bash scripts/quickstart.sh --epochs 5
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$ROOT"
ready_python requirements.txt

# One process needs no torchrun and starts some seconds earlier without it.
"$PYTHON" main.py "$@"
