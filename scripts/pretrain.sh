#!/usr/bin/env bash
# Pre-trains one arch by the paper's Table 5 (LazyFormer), on the GPUs there are; several, or several nodes, through
# torchrun.
set -euo pipefail
# shellcheck source=scripts/launch.sh
source "$(dirname "$0")/launch.sh"

usage() {
  cat <<'HELP'
usage: scripts/pretrain.sh ARCH DATA [options of this script] [options of fairseq-train]

Pre-trains ARCH (lazyformer_m2x6_s, bert_base, par_bert_base, ...) on DATA, a folder of binarised data or several as
a:b:c, in the setting of LazyFormer's Table 5: 1,000,000 updates of 256 sequences of 512 tokens, Adam (0.9, 0.999),
epsilon 1e-6, peak rate 1e-4, 1% warm-up, linear decay to zero, clip 1.0, dropout 0.1, weight decay 0.01.
Any option of fairseq-train may follow and wins: --max-update 1000, --save-dir DIR, --sublayer-pattern '(sff)x5 (f)x9'.

Run again, it resumes from its last checkpoint, on as many GPUs as there are then. It saves every 5,000 updates and
keeps three of these, and for good those of every 100,000th update (--keep-updates-list), as the paper fine-tunes some.

options of this script (defaults in brackets)
  --sequences-per-gpu N   in one forward pass [16; 4 on a CPU]; as many as fit the memory
  --sequences-per-update N   [256]; must be a multiple of nodes x gpus
HELP
  launch_help
}

if [[ " $* " == *" --help "* || $# -eq 0 ]]; then
  usage
  exit 0
fi
[[ $# -ge 2 && $1 != -* && $2 != -* ]] || fail "give ARCH and DATA first; see scripts/pretrain.sh --help"
arch=$1 data=$2
shift 2

per_gpu='' per_update=256 fairseq_options=()
while [[ $# -gt 0 ]]; do
  take_launch_option "$@"
  if [[ $taken -eq 0 && $1 =~ ^--sequences-per-(gpu|update)$ ]]; then
    [[ $# -ge 2 ]] || fail "$1 needs a value"
    is_whole_number "$2" || fail "$1 $2: give a whole number"
    if [[ $1 == --sequences-per-gpu ]]; then per_gpu=$2; else per_update=$2; fi
    taken=2
  elif [[ $taken -eq 0 ]]; then
    fairseq_options+=("$1") taken=1
  fi
  shift "$taken"
done

settle_devices
settle_launcher
[[ $per_update -gt 0 && $((per_update % world)) -eq 0 ]] ||
  fail "$per_update sequences an update do not divide among $world processes; give --sequences-per-update N"
share=$((per_update / world)) # of one process
per_gpu=${per_gpu:-$((found > 0 ? 16 : 4))}
[[ $per_gpu -gt 0 ]] || fail "--sequences-per-gpu 0: give at least 1"
while [[ $((share % per_gpu)) -ne 0 ]]; do per_gpu=$((per_gpu - 1)); done
update_freq=$((share / per_gpu))

echo "an update is $per_update sequences: $world processes x $per_gpu sequences x update-freq $update_freq" >&2
run_or_print "${launch[@]}" -m fairseq_cli.train "$data" \
  --user-dir "$root/lazyformer_fairseq" --task full_sentences_masked_lm --tokens-per-sample 512 \
  --arch "$arch" --criterion masked_lm_accuracy \
  --optimizer fused_adam --adam-betas '(0.9, 0.999)' --adam-eps 1e-6 --weight-decay 0.01 --clip-norm 1.0 \
  --lr-scheduler linear_warmup --lr 1e-4 --warmup-ratio 0.01 --max-update 1000000 \
  --batch-size "$per_gpu" --required-batch-size-multiple 1 --update-freq "$update_freq" \
  --distributed-world-size "$world" "${device_options[@]}" \
  --save-dir "checkpoints/$arch" --no-epoch-checkpoints \
  --save-interval-updates 5000 --keep-interval-updates 3 --keep-updates-list "$(seq -s , 100000 100000 900000)" \
  --num-workers 2 --log-format simple --log-interval 100 --seed 1 "${fairseq_options[@]}"
