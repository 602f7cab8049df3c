#!/usr/bin/env bash
# Trains and evaluates models under BabyLM's rules (at most ten million words, read at most ten times), and writes a table.
set -euo pipefail
# shellcheck source=scripts/common.sh
source "$(dirname "$0")/../common.sh"

usage() {
  cat <<'HELP'
usage: scripts/examples/babylm.sh TEXT BLIMP GLUE OUT [options of `lazyformer compare run`]

Prepares the text, pre-trains every model for two hours on one thread, evaluates all models on BLiMP's minimal pairs and
on BabyLM's fine-tuning tasks, and writes a table to OUT/table.md. You can stop it at any time and run it again to resume.

TEXT   folder with text files of the BabyLM corpus, at most ten million words
BLIMP  folder with BLiMP's files, https://github.com/alexwarstadt/blimp
GLUE   folder with the fine-tuning files, https://github.com/babylm/evaluation-pipeline-2025
OUT    output folder

Your own options take precedence: use --budget 10min to try the script out, and --model NAME=PATTERN for your own
models. The environment variable VOCAB_SIZE sets the vocabulary size, 8192 by default.
HELP
}

help_if_asked "$@"
[[ $# -ge 4 ]] || fail 2 "pass TEXT, BLIMP, GLUE and OUT; see scripts/examples/babylm.sh --help"
text=$1 blimp=$2 glue=$3 out=$4
shift 4
use_checkout
lazyformer() { "$python" -m lazyformer_fairseq.cli "$@"; }
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

modern='(s[rope=10000] f[gate=gelu])' parts='norm=rms; without=relative-position-buckets,local-heads' # as in ModernBERT
models=(--model 'bert=(sf)x7' --model 'lazyformer=M2x3 M1' --model 'lazyformer_m6=M6 M1' --model 'par=(sff)x3 (f)x5'
  --model 'lazy_par=sfflff sff (f)x5' --model 'conv=(cf)x3 sf (cf)x3' --model "modern=${modern}x7; $parts"
  --model "lazy_modern=($modern l f[gate=gelu])x3 $modern; $parts")
[[ " $* " != *" --model"[\ =]* ]] || models=()
length=(--budget 120min)
[[ " $* " != *" --updates"[\ =]* ]] || length=()
lazyformer corpus "babylm:$text" "$out/data" --vocab-size "${VOCAB_SIZE:-8192}" --valid-share 0.01 --word-budget 10M
lazyformer compare run "$out/data" "$out/models" --task masked-lm --recipe laptop --equal-parameters --alone \
  --device cpu --embed-dim 192 --ffn-embed-dim 768 --heads 6 --tokens-per-sample 512 --batch-size 2 --seeds 1 \
  --validation-tokens 31232 --word-budget 100M "${length[@]}" "${models[@]}" "$@"

listed=$("$python" "$root/scripts/examples/babylm_table.py" --trained "$out")
mapfile -t trained <<<"$listed"
lazyformer evaluate "${trained[@]}" --ngram "$out/data" --data "$blimp" --output "$out/blimp"
lazyformer finetune "${trained[@]}" --task babylm --data "$glue" --output "$out/glue" --gpus none
"$python" "$root/scripts/examples/babylm_table.py" "$out"
