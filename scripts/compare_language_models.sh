#!/usr/bin/env bash
# Transformer-XL, Sandwich, PAR and lazy PAR side by side: a launcher of `lazyformer compare`.
set -euo pipefail
# shellcheck source=scripts/common.sh
source "$(dirname "$0")/common.sh"

usage() {
  cat <<'HELP'
usage: scripts/compare_language_models.sh DATA OUT [options of `lazyformer compare`]

Trains the four models on DATA, what `lazyformer lm prepare` wrote, equal in all but their pattern, evaluates and times
them, and writes table and picture to OUT. Run again after a stop, it goes on.
On a CPU: 16 sublayers of width 64, 2,000 updates each (the command's defaults). On a GPU: the paper's 32
sublayers, width 256, 8 minutes of training each; four models with three seeds are 96 minutes. It trains in bf16 where it
has it, else in fp16.

  scripts/compare_language_models.sh data/wikitext-2 results/compare --seeds 1 --presets 16 --model 'found=(sff)x4 (f)x4'

Options that follow win; `lazyformer compare run --help` lists them all.
HELP
}

help_if_asked "$@"
[[ $# -ge 2 && $1 != -* && $2 != -* ]] || fail 2 "give DATA and OUT first; see scripts/compare_language_models.sh --help"
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
