#!/usr/bin/env bash
# Trains one language model in the setting of the PAR Transformer paper, on the GPUs there are; several, or several nodes,
# through torchrun.
set -euo pipefail
# shellcheck source=scripts/launch.sh
source "$(dirname "$0")/launch.sh"

usage() {
  cat <<'HELP'
usage: scripts/train_language_model.sh ARCH DATA [options of this script] [options of fairseq-train]

Trains ARCH (par_transformer_base, transformer_xl_large, par_transformer_24b, ...) on DATA, what `lazyformer lm prepare`
wrote. From the PAR Transformer paper: segments and memory of 192 tokens and 256 rows an update; *_large 384 tokens and
128 rows; *_24b 512 tokens; 40,000 updates (which the paper says of the base models). An update of *_24b is 96 rows, so
that all have the same 49,152 tokens (ours: the paper does not say).
The paper's text names no optimizer: this is Transformer-XL's Adam, peak rate 2.5e-4, cosine decay to zero, clip 0.25,
with 1,000 updates of warm-up. Dropout is the arch's, 0.1 for base.
Any option of fairseq-train may follow and wins: --max-update 1000, --save-dir DIR, --sublayer-pattern '(sff)x5 (f)x9'.

Rows are streams through the text, memory goes with them. On fewer GPUs an update takes several segments of fewer
streams, one after the other. Run again, it resumes from its last checkpoint, memory and all; with another number of
streams the memory starts empty. Then: lazyformer lm evaluate CHECKPOINT DATA --tgt-len 64 --mem-len 640 --clamp-len 400

options of this script (defaults in brackets)
  --rows-per-gpu N      streams of a GPU [an eighth of an update's rows; 4 on a CPU]; as many as fit the memory
  --rows-per-update N   [256; *_large 128; *_24b 96]; must be a multiple of nodes x gpus
HELP
  launch_help
}

if [[ " $* " == *" --help "* || $# -eq 0 ]]; then
  usage
  exit 0
fi
[[ $# -ge 2 && $1 != -* && $2 != -* ]] || fail "give ARCH and DATA first; see scripts/train_language_model.sh --help"
arch=$1 data=$2
shift 2

case $arch in
*_large*) tgt_len=384 per_update=128 ;;
*_24b*) tgt_len=512 per_update=96 ;;
*) tgt_len=192 per_update=256 ;;
esac
per_gpu=''
take_options rows "$@"
settle_devices
settle_launcher
per_gpu=${per_gpu:-$((found > 0 ? (per_update + 7) / 8 : 4))}
settle_batches rows

echo "an update is $per_update rows: $world processes x $per_gpu streams x $update_freq segments" >&2
run_or_print "${launch[@]}" -m fairseq_cli.train "$data" \
  --user-dir "$root/lazyformer_fairseq" --task stream_language_modeling --tgt-len "$tgt_len" \
  --arch "$arch" --criterion causal_lm \
  --optimizer fused_adam --adam-betas '(0.9, 0.999)' --adam-eps 1e-8 --weight-decay 0 --clip-norm 0.25 \
  --lr-scheduler cosine --lr 2.5e-4 --warmup-updates 1000 --max-update 40000 \
  --batch-size "$per_gpu" --batch-size-valid 8 --required-batch-size-multiple 1 --update-freq "$update_freq" \
  --distributed-world-size "$world" "${device_options[@]}" \
  --save-dir "checkpoints/$arch" --no-epoch-checkpoints \
  --save-interval-updates 1000 --keep-interval-updates 3 \
  --num-workers 1 --log-format simple --log-interval 100 --seed 1 "${fairseq_options[@]}"
