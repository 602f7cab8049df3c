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

per_gpu='' per_update=256
take_options sequences "$@"
settle_devices
settle_launcher
per_gpu=${per_gpu:-$((found > 0 ? 16 : 4))}
settle_batches sequences

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
