#!/usr/bin/env bash
# Fine-tunes a checkpoint on your own labels, and labels new texts.
set -euo pipefail
# shellcheck source=scripts/common.sh
source "$(dirname "$0")/../common.sh"

usage() {
  cat <<'HELP'
usage: scripts/examples/finetune_labels.sh OUT
       scripts/examples/finetune_labels.sh OUT CHECKPOINT LABELS TEXTS [options of `lazyformer finetune`]

Fine-tunes CHECKPOINT on LABELS, reports its scores, labels TEXTS, and exports the model. You can stop it at any time and
run it again to resume. With only OUT, it fine-tunes a tiny model from the tests on generated sentences, which takes half
a minute on one core.

OUT         output folder
CHECKPOINT  pre-trained model: a folder of checkpoints, or an export
LABELS      folder with train.tsv and dev.tsv, whose first line is text<tab>label
TEXTS       .txt file with one text per line

For other formats (pairs, regression, several labels per text, word tags) and all options, see docs/finetuning.md.
HELP
}

# Print labeled sentences. The label says whether the place that the sentence mentions is indoors or outdoors.
make_sentences() {
  for first in Anna Ben Cara Dan Eva Finn; do
    for second in Hugo Lea Max Nina Otto; do
      for place in house:indoors window:indoors mirror:indoors garden:outdoors river:outdoors forest:outdoors; do
        printf '%s sees %s near the %s.\t%s\n' "$first" "$second" "${place%:*}" "${place#*:}"
      done
    done
  done
}

help_if_asked "$@"
[[ $# -eq 1 || $# -ge 4 ]] || fail 2 "pass only OUT, or OUT, CHECKPOINT, LABELS and TEXTS; see scripts/examples/finetune_labels.sh --help"
use_checkout
lazyformer() { "$python" -m lazyformer_fairseq.cli "$@"; }
if [[ $# -eq 1 ]]; then
  places=$1/places
  mkdir -p "$places"
  { printf 'text\tlabel\n'; make_sentences | grep -v '^Finn'; } >"$places/train.tsv"
  { printf 'text\tlabel\n'; make_sentences | grep '^Finn'; } >"$places/dev.tsv"
  printf '%s\n' 'Gina sees Jan near the river.' 'Gina sees Jan near the window.' >"$places/texts.txt"
  set -- "$1" "$root/tests/fixtures/checkpoints/m2x2" "$places" "$places/texts.txt" --lrs 1e-2 --seeds 1 --gpus none
fi
out=$1 checkpoint=$2 labels=$3 texts=$4
shift 4

lazyformer finetune "$checkpoint" --data "$labels" --output "$out/results" "$@"
lazyformer predict "$out/results" "$texts" --output "$out/predictions.tsv"
lazyformer export "$out/results" "$out/model"
cat "$out/predictions.tsv"
