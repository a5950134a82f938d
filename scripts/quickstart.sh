#!/usr/bin/env bash
# Trains the default (a small convolutional network on handwritten digits) and says how to look at the curves.
# Installs what is missing first. Flags are main.py's: bash scripts/quickstart.sh --epochs 5
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$ROOT"
ready_python requirements.txt

# One process needs no torchrun: the program is the same, and begins some seconds earlier without it.
"$PYTHON" main.py "$@"

output=runs previous=
for argument in "$@"; do
  case $previous in --output) output=$argument ;; esac
  case $argument in --output=*) output=${argument#--output=} ;; esac
  previous=$argument
done
tensorboard=tensorboard
if [[ $PYTHON == */* ]]; then
  tensorboard=${PYTHON%/*}/tensorboard
fi
if [[ -d $output ]]; then
  echo "To see the curves: ${tensorboard#"$ROOT"/} --logdir $output, then open http://localhost:6006 in a browser" >&2
fi
