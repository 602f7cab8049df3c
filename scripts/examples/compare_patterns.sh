#!/usr/bin/env bash
# Trains two patterns on the same text for the same time, and compares their losses.
set -euo pipefail
# shellcheck source=scripts/common.sh
source "$(dirname "$0")/../common.sh"

usage() {
  cat <<'HELP'
usage: scripts/examples/compare_patterns.sh OUT [TEXT [ONE OTHER [options of `lazyformer compare run`]]]

Trains a model with each pattern for two minutes on one core, with equal parameter counts. Writes a table and plots of
the loss against updates, FLOPs and time to OUT/models. You can stop it at any time and run it again to resume.

OUT         output folder
TEXT        folder of text files; default: the English prose that ships with Python
ONE, OTHER  the patterns; default: (sf)x4 (a BERT) and M2x2 (a LazyFormer)

Your own options take precedence: --budget 10min trains longer, and --seeds 1,2,3 shows the spread. The environment
variable VOCAB_SIZE sets the vocabulary size, 2000 by default. docs/compare.md explains the table and the other options.
HELP
}

help_if_asked "$@"
[[ $# -ne 3 ]] || fail 2 "pass both patterns or neither; see scripts/examples/compare_patterns.sh --help"
use_checkout
lazyformer() { "$python" -m lazyformer_fairseq.cli "$@"; }
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
out=$1 text=${2:-} one=${3:-(sf)x4} other=${4:-M2x2}
shift "$(($# < 4 ? $# : 4))"
length=(--budget 2min)
[[ " $* " != *" --updates"[\ =]* ]] || length=()

if [[ ! $text ]]; then
  text=$out/prose.jsonl
  mkdir -p "$out"
  "$python" -c 'import pathlib, sys
from lazyformer_fairseq.experiments.prose import write_prose
write_prose(pathlib.Path(sys.argv[1]))' "$text"
fi
lazyformer corpus "$text" "$out/data" --vocab-size "${VOCAB_SIZE:-2000}" --valid-share 0.05
lazyformer compare run "$out/data" "$out/models" --task masked-lm --recipe laptop --equal-parameters --alone \
  --device cpu --seeds 1 "${length[@]}" --model "one=$one" --model "other=$other" "$@"
