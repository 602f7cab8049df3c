#!/usr/bin/env bash
# Runs one line of the GPU measurement plan and writes its report, in nine minutes, on a machine without a network.
set -euo pipefail
# shellcheck source=scripts/common.sh
source "$(dirname "$0")/../common.sh"

usage() {
  cat <<'HELP'
usage: [WHEELS=FOLDER] [DATA=FOLDER] [PYTHON=PYTHON] scripts/gpu/run.sh LINE OUT [--tiny]

Runs a line of the plan and writes OUT/LINE: report.md (a verdict and tables), report.json, and the output of the
commands. The folder exists only once it is complete. If nine minutes are not enough, the last parts are cut short, and
the report lists them.

LINE, in order of importance (in parentheses, what DATA must contain):
  throughput   updates of transformers' and our ModernBERT and BERT, at 1,024, 8,192 and 512 tokens
  learning     four patterns with 30 million parameters on ten million words, ten times; then BLiMP  (babylm, blimp)
  correctness  all tests that need a GPU, in parallel
  documents    attention within documents, and fine-tuning without padding  (babylm, glue, documents.txt)
  base-size    BERT base on the words of `learning`; then BLiMP, RTE and CoLA  (babylm, blimp, glue)
  base-best    the same for the best pattern in OUT/learning  (babylm, blimp, glue)
  rest         models and their baselines, back ends, attention variants, other sublayers, and a search  (babylm)

DATA   folder with the data listed in parentheses: babylm is the output of `lazyformer corpus`, blimp and glue are the
       official files, and documents.txt has one paragraph per line
WHEELS folder with wheels of missing packages, which are installed in OUT/site. The required packages are torch (CUDA),
       numpy, scipy, scikit-learn, matplotlib and fairseq's other dependencies; `correctness` also requires pytest and
       pytest-xdist; transformers is optional

--tiny tests a line on a CPU with tiny models.
HELP
}

# part SECONDS NAME COMMAND: run a command with a time limit, write its output to NAME.txt, and record how long it took
# and how it ended. Time for the report is always reserved.
part() {
  local limit=$1 name=$2 left=$((MINUTES * 60 - SECONDS - FOR_THE_REPORT)) began=$SECONDS status=0 end=done
  shift 2
  if ((limit > left)); then limit=$left; fi
  echo "== $name"
  if ((limit < 5)); then
    end="no time was left"
  else
    timeout --signal=INT --kill-after=10 "$limit" "$@" 2>&1 | tee "$work/$name.txt" || status=$?
    if ((status == 124 || status == 137)); then
      end="cut after $limit s"
    elif ((status)); then
      end="failed, exit code $status"
    fi
  fi
  printf '%s\t%s\t%s\n' "$name" $((SECONDS - began)) "$end" >>"$work/parts.tsv"
}

# needs NAME...: exit with an error unless DATA contains these files or folders.
needs() {
  for name; do
    [[ -e ${DATA:-}/$name ]] || fail 1 "${DATA:-DATA}/$name does not exist, but \`$line\` needs it; see scripts/gpu/run.sh --help"
  done
}

MINUTES=9 FOR_THE_REPORT=20
help_if_asked "$@"
line=$1 out=${2:-} device=cuda tiny=""
[[ $# -ge 2 ]] || fail 2 "pass LINE and OUT; see scripts/gpu/run.sh --help"
shift 2
for word; do
  [[ $word == --tiny ]] || fail 2 "$word: no such option; see scripts/gpu/run.sh --help"
  device=cpu tiny=yes
done
use_checkout
python=${PYTHON:-$python} here=$root/scripts/gpu
[[ -f $here/lines/$line.sh ]] || fail 2 "$line: no such line; see scripts/gpu/run.sh --help"
mkdir -p "$out"
out=$(cd "$out" && pwd) work=$out/$line.unfinished
[[ ! -e $out/$line ]] || fail 1 "$out/$line already exists; remove it or use another OUT"
[[ -z ${DATA:-} ]] || DATA=$(cd "$DATA" && pwd)

if [[ -n ${WHEELS:-} ]]; then
  compgen -G "$WHEELS/*.whl" >/dev/null || fail 1 "$WHEELS contains no wheels (*.whl)"
  if [[ ! -d $out/site ]]; then
    "$python" -m pip install --quiet --no-index --no-deps --target "$out/site.unfinished" "$WHEELS"/*.whl
    mv "$out/site.unfinished" "$out/site"
  fi
  export PYTHONPATH=$PYTHONPATH:$out/site
fi
if [[ $device == cuda ]] && ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  fail 1 "torch finds no GPU here; to test the line on a CPU, use --tiny"
fi
precision=fp32
[[ -n $tiny ]] || precision=$("$python" -c "from lazyformer_fairseq.executors.nvidia_smi import precision_here as here; print(here())")
lazyformer=("$python" -m lazyformer_fairseq.cli)

rm -rf "$work"
mkdir "$work"
# shellcheck source=/dev/null
source "$here/lines/$line.sh"
"$python" "$here/report.py" "$line" "$work" --seconds "$SECONDS" ${tiny:+--tiny}
mv "$work" "$out/$line"
echo "results: $out/$line"
! grep -q "failed" "$out/$line/parts.tsv"
