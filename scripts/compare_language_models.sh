#!/usr/bin/env bash
# Compares Transformer-XL, Sandwich, PAR and lazy PAR with `lazyformer compare`.
set -euo pipefail
# shellcheck source=scripts/common.sh
source "$(dirname "$0")/common.sh"

usage() {
  cat <<'HELP'
usage: scripts/compare_language_models.sh DATA OUT [options of `lazyformer compare`]

Trains four models, which differ only in their patterns, on DATA (the output of `lazyformer lm prepare`). Evaluates and
times them, and writes a table and a plot to OUT. Run the same command again to resume.
On a CPU, the models have 16 sublayers of width 64 and train for 2,000 updates each (the command's defaults). On a GPU,
they have 32 sublayers (as in the paper) of width 256 and train for 8 minutes each, or 96 minutes for four models with
three seeds. Training on a GPU uses bf16 if it is supported, and fp16 otherwise.

  scripts/compare_language_models.sh data/wikitext-2 results/compare --seeds 1 --presets 16 --model 'found=(sff)x4 (f)x4'

Your own options take precedence; `lazyformer compare run --help` lists all of them.
HELP
}

help_if_asked "$@"
[[ $# -ge 2 && $1 != -* && $2 != -* ]] || fail 2 "pass DATA and OUT first; see scripts/compare_language_models.sh --help"
data=$1 out=$2
shift 2

use_checkout

on_a_gpu=()
if [[ $("$python" -m lazyformer_fairseq.executors.nvidia_smi) -gt 0 ]]; then
  on_a_gpu=(
    --device cuda --presets 32 --embed-dim 256 --ffn-embed-dim 1024 --heads 4 --dropout 0.3
    --tgt-len 128 --mem-len 128 --batch-size 32
  )
  [[ " $* " == *" --updates"[\ =]* ]] || on_a_gpu+=(--budget 8min)
fi

exec "$python" -m lazyformer_fairseq.cli compare "$data" "$out" --task language-model "${on_a_gpu[@]}" "$@"
