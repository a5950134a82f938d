#!/usr/bin/env bash
# Trains the default (a small convolutional network on handwritten digits); at its end stands how to see the curves.
# Installs what is missing first. Flags are main.py's: bash scripts/quickstart.sh --epochs 5
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$ROOT"
ready_python requirements.txt

# One process needs no torchrun: the program is the same, and begins some seconds earlier without it.
"$PYTHON" main.py "$@"
