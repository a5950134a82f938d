#!/usr/bin/env bash
# Trains a recipe on all GPUs of this machine, or in one process on a CPU; the other launchers call it:
#
#   bash scripts/launch.sh RECIPE DATA [flag of main.py ...]
#
# RECIPE is a name under configs/, DATA the folder that holds the images. NPROC=4 sets the number of processes.
# For several machines, set NNODES, RDZV_ENDPOINT (HOST:PORT of one of them) and RDZV_ID (any name for the job), and
# start the same command on each. For machines that come and go see elastic.sh, for the exit codes torchrun.py.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

if (($# < 2)) || [[ $1 == -* || $2 == -* ]]; then # a flag in the place of RECIPE or DATA
  echo "usage: ${USAGE:-bash scripts/launch.sh RECIPE DATA} [flag of main.py ...]" >&2
  exit 2
fi
recipe=$1 data=$2
shift 2

trap 'exit 75' TERM USR1 # stopped before training
if ! find_python requirements.txt; then
  echo "No Python here meets requirements.txt; 'bash scripts/quickstart.sh' installs what is missing into .venv" >&2
  exit 1
fi
processes=${NPROC:-$("$PYTHON" -c 'import torch; print(max(1, torch.cuda.device_count()))')}
if [[ -n ${NNODES:-} ]]; then
  where=(--nnodes "$NNODES" --rdzv-backend c10d --rdzv-endpoint "$RDZV_ENDPOINT" --rdzv-id "$RDZV_ID")
else
  where=(--standalone)
fi
exec "$PYTHON" "$ROOT/scripts/torchrun.py" "${where[@]}" --max-restarts "${MAX_RESTARTS:-0}" \
  --nproc-per-node "$processes" "$ROOT/main.py" --config "$recipe" --datapath "$data" "$@"
