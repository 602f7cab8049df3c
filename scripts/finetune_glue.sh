#!/usr/bin/env bash
# From a pre-trained checkpoint to the paper's GLUE table: `lazyformer glue` prepare, run and report in one go.
set -euo pipefail

usage() {
  cat <<'HELP'
usage: scripts/finetune_glue.sh CHECKPOINT GLUE_DATA OUT [options of `lazyformer glue run`]

Fine-tunes CHECKPOINT (a file, or NAME=FILE) by LazyFormer's Table 5 on the tasks in GLUE_DATA, the folder of the
official download (CoLA/train.tsv and so on), and writes the table to OUT: every task at four learning rates with five
seeds, on the GPUs there are, else on the CPU's cores. Run again after a stop, it goes on.

  scripts/finetune_glue.sh checkpoints/m2x6/checkpoint_last.pt glue_data results/glue --tasks CoLA RTE --seeds 1 2 3

More models go into the same table by `lazyformer glue run --checkpoint A=... B=...`; see its --help for all options.
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
lazyformer=("$python" -m lazyformer_fairseq.cli glue)

# --data prepares what is not prepared yet. Failed runs leave a gap in the table, which the report marks.
status=0
"${lazyformer[@]}" run --checkpoint "$checkpoint" --data "$data" --output "$out" "$@" || status=$?
[[ $status -le 1 ]] || exit "$status"
[[ -e $out/runs/grid.json ]] || exit "$status" # refused before anything was run
"${lazyformer[@]}" report "$out"
exit "$status"
