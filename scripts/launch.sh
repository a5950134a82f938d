#!/usr/bin/env bash
# Trains a recipe on all GPUs of this machine, or in one process on a CPU; the other launchers call it:
#
#   bash scripts/launch.sh RECIPE DATA [flag of main.py ...]
#   bash scripts/launch.sh --list
#
# RECIPE is a name under configs/, DATA the folder that holds the images; the recipes of digits need none. --list prints
# all recipes with the top-1 that they should reach and the one measured. NPROC=4 sets the number of processes.
# For several machines, set NNODES, RDZV_ENDPOINT (HOST:PORT of one of them) and RDZV_ID (any name for the job), and
# start the same command on each; for SLURM see slurm.sbatch, for machines that come and go elastic.sh, for the exit
# codes torchrun.py.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

data=()
if [[ ${1:-} == digits/* && ${2:--} == -* ]]; then
  recipe=$1
  shift
elif (($# >= 2)) && [[ $1 != -* && $2 != -* ]]; then
  recipe=$1 data=(--datapath "$2")
  shift 2
elif [[ $* != --list ]]; then # a flag in the place of RECIPE or DATA
  usage=${USAGE:-bash scripts/launch.sh RECIPE DATA}
  echo "usage: $usage [flag of main.py ...]$([[ -n ${USAGE:-} ]] || echo "   or   bash scripts/launch.sh --list")" >&2
  exit 2
fi

if [[ $* != --list && -n ${NNODES:-} && (-z ${RDZV_ENDPOINT:-} || -z ${RDZV_ID:-}) ]]; then
  echo "launch.sh: NNODES is set, so RDZV_ENDPOINT (HOST:PORT of one machine) and RDZV_ID (any name) must be too" >&2
  exit 2
fi
trap 'exit 75' TERM USR1 # stopped before training
if ! find_python requirements.txt; then
  echo "No Python here meets requirements.txt; 'bash scripts/quickstart.sh' installs what is missing into .venv" >&2
  exit 1
fi
if [[ -z ${recipe:-} ]]; then
  exec "$PYTHON" "$ROOT/scripts/list_recipes.py"
fi
processes=${NPROC:-$("$PYTHON" -c 'import torch; print(max(1, torch.accelerator.device_count()))')}
if [[ -n ${NNODES:-} ]]; then
  where=(--nnodes "$NNODES" --rdzv-backend c10d --rdzv-endpoint "$RDZV_ENDPOINT" --rdzv-id "$RDZV_ID")
else
  where=(--standalone)
fi
exec "$PYTHON" "$ROOT/scripts/torchrun.py" "${where[@]}" --max-restarts "${MAX_RESTARTS:-0}" \
  --nproc-per-node "$processes" "$ROOT/main.py" --config "$recipe" ${data[@]+"${data[@]}"} "$@"
