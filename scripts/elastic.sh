#!/usr/bin/env bash
# Trains a recipe on MIN to MAX machines, any of which may come and go. The same command on each of them:
#
#   NNODES=2:4 RDZV_ENDPOINT=node1:29400 RDZV_ID=my-run bash scripts/elastic.sh RECIPE DATA [flag of main.py ...]
#
# RECIPE is a name under configs/ or a file, with a global-batch-size: every step then sees the same images at the same
# learning rate on any number of machines. DATA and the folder of the runs must be visible on all of them.
#
# Training begins 30 s after MIN machines are there, at once with MAX.
# A machine is lost: the others end within main.py's --timeout (600 s; at once when its processes died but its system
#   lives), meet again after up to 15 s of its silence and 30 s for others to come, and go on from the last checkpoint:
#   give --save-every-steps, or part of an epoch is lost. One that is stopped by SIGTERM or SIGUSR1 has all save first.
# A machine comes (back) while there are fewer than MAX: all save, meet, and go on with it.
# Each of these costs a machine up to one of its MAX_RESTARTS (10); one that has none left ends the job for all.
# The machine of RDZV_ENDPOINT is the meeting point. Without it the launchers of the others end (after 60 s when it falls
#   silent) and their processes with them, within 3 minutes; start the same command again with another one, and the run
#   goes on.
# PET_RDZV_CONF=last_call_timeout=5,keep_alive_interval=2 and the like, as of torchrun's --rdzv-conf, shorten the waits.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")

if (($# < 2)) || [[ $1 == -* || $2 == -* || ${NNODES:-} != *:* || -z ${RDZV_ENDPOINT:-} || -z ${RDZV_ID:-} ]]; then
  echo "usage: NNODES=MIN:MAX RDZV_ENDPOINT=HOST:PORT RDZV_ID=NAME bash scripts/elastic.sh RECIPE DATA" \
    "[flag of main.py ...]" >&2
  exit 2
fi
recipe=$here/../configs/$1.yaml
[[ -f $recipe ]] || recipe=$1
if [[ " $* " != *" --global-batch-size"[\ =]* ]] && ! grep -qs '^global[-_]batch[-_]size:' "$recipe"; then
  echo "elastic.sh: the recipe $1 sets no global-batch-size; give --global-batch-size N, so that every step is the same" \
    "on any number of machines" >&2
  exit 2
fi
export MAX_RESTARTS=${MAX_RESTARTS:-10}
exec bash "$here/launch.sh" "$@" --resume auto
