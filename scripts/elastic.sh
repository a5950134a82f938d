#!/usr/bin/env bash
# Trains a recipe on MIN to MAX machines that may come and go. Run the same command on each of them:
#
#   NNODES=2:4 RDZV_ENDPOINT=node1:29400 RDZV_ID=my-run bash scripts/elastic.sh RECIPE DATA [flag of main.py ...]
#
# RECIPE is a name under configs/ or a file. It sets global-batch-size, so that every step sees the same images at the
# same learning rate on any number of machines. DATA and the folder of the runs must be visible to all machines.
#
# Training starts as soon as MAX machines have joined, or 30 s after MIN have.
# When a machine is lost, the others end within main.py's --timeout (600 s; at once if only its processes died), meet
#   again after up to 15 s of silence and 30 s for others to join, and continue from the last checkpoint: give
#   --save-every-steps, or part of an epoch is lost. When SIGTERM or SIGUSR1 stops a machine, all save first.
# When a machine joins while there are fewer than MAX, all save, meet, and continue with it.
# Each of these uses up to one of a machine's MAX_RESTARTS (10); a machine that has none left ends the job for all.
# All meet at the machine of RDZV_ENDPOINT. When it is lost, the launchers of the others end (after 60 s if it falls
#   silent) and their processes with them, within 3 minutes; the same command with another endpoint continues the run.
# PET_RDZV_CONF=last_call_timeout=5,keep_alive_interval=2 (see torchrun's --rdzv-conf) shortens the waits.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")

if (($# < 2)) || [[ $1 == -* || $2 == -* || ${NNODES:-} != *:* || -z ${RDZV_ENDPOINT:-} || -z ${RDZV_ID:-} ]]; then
  echo "usage: NNODES=MIN:MAX RDZV_ENDPOINT=HOST:PORT RDZV_ID=NAME bash scripts/elastic.sh RECIPE DATA" \
    "[flag of main.py ...]" >&2
  exit 2
fi
if [[ " $* " == *" --resume"[\ =]* ]]; then
  echo "elastic.sh: each start continues its run with --resume auto; leave --resume out, or use scripts/launch.sh" >&2
  exit 2
fi
recipe=$here/../configs/$1.yaml
[[ -f $recipe ]] || recipe=$1
if [[ " $* " != *" --global-batch-size"[\ =]* ]] && ! grep -qs '^global[-_]batch[-_]size:' "$recipe"; then
  echo "elastic.sh: the recipe $1 sets no global-batch-size; give --global-batch-size N to make every step the same" \
    "on any number of machines" >&2
  exit 2
fi
export MAX_RESTARTS=${MAX_RESTARTS:-10}
exec bash "$here/launch.sh" "$@" --resume auto
