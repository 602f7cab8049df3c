#!/usr/bin/env bash
# From a pre-trained checkpoint to the paper's GLUE table: a launcher of `lazyformer glue run`.
set -euo pipefail

usage() {
  cat <<'HELP'
usage: scripts/finetune_glue.sh CHECKPOINT GLUE_DATA OUT [options of `lazyformer glue run`]

Fine-tunes CHECKPOINT (a file, or NAME=FILE) by LazyFormer's Table 5 on the tasks in GLUE_DATA, the folder of the
official download (CoLA/train.tsv and so on): every task at four learning rates with five seeds, on the GPUs there are,
else on the CPU's cores. Prints the paper's table and writes it to OUT/report. Run again after a stop, it goes on.

  scripts/finetune_glue.sh checkpoints/m2x6/checkpoint_last.pt glue_data results/glue --tasks CoLA RTE --seeds 1 2 3

More models go into the same table by --checkpoint NAME=FILE...; `lazyformer glue run --help` lists all options.
HELP
}

if [[ " $* " == *" --help "* || $# -eq 0 ]]; then
  usage
  exit 0
fi
if [[ $# -lt 3 || $1 == -* || $2 == -* || $3 == -* ]]; then
  echo "error: give CHECKPOINT, GLUE_DATA and OUT first; see scripts/finetune_glue.sh --help" >&2
  exit 2
fi
checkpoint=$1 data=$2 out=$3
shift 3

root=$(cd "$(dirname "$0")/.." && pwd)
python=python3
[[ ! -x $root/.venv/bin/python ]] || python=$root/.venv/bin/python
exec "$python" -m lazyformer_fairseq.cli glue run --checkpoint "$checkpoint" --data "$data" --output "$out" "$@"
