#!/usr/bin/env bash
# Kills and continues small trainings, with different settings in each round, until the time is up:
#
#   bash scripts/lab/soak.sh [MINUTES]     # default 30; the last round is completed
#
# Prints where the kills of each round landed, and at the end the number of kills survived. If the bits of a round differ
# from those of the run that was not killed, it stops with exit code 1 and keeps that round's folders.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../environment.sh"

minutes=${1:-30}
if (($# > 1)) || ! [[ $minutes =~ ^[0-9]{1,5}$ ]] || ((10#$minutes == 0)); then
  echo "usage: bash scripts/lab/soak.sh [MINUTES]   (a whole number, at least 1)" >&2
  exit 2
fi
if ! find_python requirements.txt; then
  echo "No Python here meets requirements.txt; 'bash scripts/quickstart.sh' installs what is missing into .venv" >&2
  exit 1
fi

timm="--image-size 32 --drop 0.2 --drop-path 0.2 --epochs 3"
rounds=(
  "--ranks 1 --arch conv2 --epochs 5"
  "--ranks 2 --arch fc --epochs 8 --ema-decay 0.9 --amp fp16 --init-scale 1e9 --accumulate 2 --batch-size 16"
  "--ranks 3 --arch conv2 --epochs 6 --ema-decay 0.99 --optimizer adamw --lr 0.001"
  "--ranks 1 --arch fc --epochs 6 --amp bf16 --accumulate 3 --batch-size 20 --augment shift"
  "--ranks 3 --arch fc --epochs 8 --amp fp16 --batch-size 16 --save-every-steps 1"
  "--ranks 2 --arch conv2 --epochs 5 --loader stream --workers-cycle 0 2 1"
  "--ranks 1 --arch fc --epochs 8 --loader stream --workers 2 --mixup 0.2 --label-smoothing 0.1 --lr-policy multistep"
  # batch norm
  "--ranks 2 --arch vgg11 --epochs 2 --ema-decay 0.99"
  "--ranks 1 --config digits/airbench --epochs 3"
  "--ranks 2 --arch conv2 --epochs 5 --sam-rho 0.05 --swa-start-epoch 3"
  # dropout, skipped blocks
  "--ranks 1 --arch timm/test_vit $timm --optimizer adamw --lr 0.001 --amp bf16 --model-kwargs attn_drop_rate=0.1"
  "--ranks 2 --arch timm/test_efficientnet $timm --amp fp16 --cutmix 1"
  "--ranks 1 --arch timm/test_convnext $timm --optimizer schedulefree-adamw --lr 0.002 --auto-augment ta_wide"
  "--ranks 2 --arch timm/test_vit $timm --optimizer adamw --lr 0.001 --shard-model --ema-decay 0.99"
)
folder=$(mktemp -d "${TMPDIR:-/tmp}/soak.XXXXXX")
different=
trap '[[ -n $different ]] || rm -rf "$folder"' EXIT
trap 'exit 130' INT TERM
end=$((SECONDS + 60 * 10#$minutes))
kills=0
for ((round = 1; SECONDS < end; round++)); do
  flags="${rounds[(round - 1) % ${#rounds[@]}]} --device cpu --kills 10 --seed $round --kill-seed $round"
  echo "round $round: verify_resume.py $flags"
  code=0
  # shellcheck disable=SC2086 # the flags are words
  output=$("$PYTHON" "$ROOT/scripts/verify_resume.py" $flags --keep "$folder/$round" 2>&1) || code=$?
  verdict=${output##*$'\n'}
  if [[ $code -eq 1 || ! $verdict =~ ^"verdict: EQUAL after "([0-9]+) ]]; then
    different=yes
    printf '%s\n\nits folders: %s\nkills survived: %d\n' "$output" "$folder/$round" "$kills"
    exit 1
  fi
  kills=$((kills + BASH_REMATCH[1]))
  printf '%s\n%s, %d min\n' "$(grep '^landed: ' <<< "$output")" "$verdict" "$((SECONDS / 60))"
  rm -rf "${folder:?}/$round"
done
echo "kills survived: $kills"
