#!/usr/bin/env bash
# The measurements of docs/performance.md that need a GPU, in 9 minutes, on a machine without network.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)

usage() {
  cat <<'HELP'
usage: [OUT=FOLDER] [PYTHON=PYTHON] scripts/bench_gpu.sh [--tiny] [WHEELS]

Tests the kernels on the GPU, measures models beside their baselines, then back ends and attention variants, in bf16 or,
below compute capability 8.0, in fp16, and prints which of the speed-ups that are aimed at are reached. Needs this
checkout, Python with torch (CUDA), numpy, scipy, scikit-learn and platformdirs, and what else fairseq needs: installed
already, or as wheels in the folder WHEELS, from which they are put into FOLDER/site. pytest, pytest-xdist, transformers
and matplotlib are used where they are.

FOLDER (default results/bench_gpu, must be new) gets tests.txt, models/, bars.txt, back_ends.txt and variants.txt.
--tiny is a rehearsal on a CPU, with tiny models.
HELP
}

device=cuda tiny=() wheels=
for argument in "$@"; do
  case $argument in
    -h | --help) usage && exit 0 ;;
    --tiny) device=cpu tiny=(yes) ;;
    -*) echo "error: $argument: no such option; see scripts/bench_gpu.sh --help" >&2 && exit 1 ;;
    *) wheels=$argument ;;
  esac
done
out=${OUT:-results/bench_gpu}
[[ ! -e $out/models ]] || { echo "error: $out: holds results already; give another OUT" >&2 && exit 1; }
mkdir -p "$out"
out=$(cd "$out" && pwd)
python=${PYTHON:-python3}
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
if [[ -n $wheels ]]; then
  shopt -s nullglob
  files=("$wheels"/*.whl)
  [[ ${#files[@]} -gt 0 ]] || { echo "error: $wheels: holds no wheels (*.whl)" >&2 && exit 1; }
  "$python" -m pip install --quiet --no-index --no-deps --upgrade --target "$out/site" "${files[@]}"
  export PYTHONPATH=$PYTHONPATH:$out/site
fi
if [[ $device == cuda ]] && ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "error: torch finds no GPU here; --tiny rehearses on a CPU" >&2
  exit 1
fi

precision=$("$python" -c "from lazyformer_fairseq.executors.nvidia_smi import precision_here as here; print(here())") # the default of the other measurements

# Each part has its own limit, so that a slow one cannot take the others' time; the benchmark then writes what it has.
part() { timeout --kill-after=60 "$@"; }
cli=("$python" -m lazyformer_fairseq.cli bench)
failed=()
if [[ $device == cuda ]]; then
  echo "== compiling" # side by side, into Triton's cache; for a batch of one, of which no tiles are remembered
  export TRITON_CACHE_AUTOTUNING=0
  for pattern in s sl slllll; do
    part 60 "${cli[@]}" attention --patterns "$pattern" --backend fused --lengths 512 --rounds 2 --device cuda &>/dev/null &
  done
  for arch in bert_base lazyformer_m2x6_s lazyformer_m6x2_s; do # with a bias, as well
    part 60 "${cli[@]}" models --arch $arch --baseline-arch bert_tiny --backend fused --baseline-backend fused \
      --lengths 512 --rounds 2 --precision "$precision" --device cuda --output "$out/compiling/$arch" &>/dev/null &
  done
  wait
  rm -rf "$out/compiling"
  export TRITON_CACHE_AUTOTUNING=1 # what one part finds out about tiles the next one knows
fi
if "$python" -c 'import pytest' 2>/dev/null; then
  echo "== tests on the GPU" # without conftest.py, which wants all that the corpus builder needs; SIGINT shows failures
  side_by_side=()
  if "$python" -c 'import xdist' 2>/dev/null; then side_by_side=(-n 8); fi # torch compiles half a minute for each mask
  (cd "$root" && CUBLAS_WORKSPACE_CONFIG=:4096:8 part --signal=INT 110 "$python" -m pytest -q --noconftest \
    -p no:cacheprovider --override-ini "addopts=--import-mode=importlib" "${side_by_side[@]}" \
    tests/modules/attention/test_on_gpu.py 2>&1 | tee "$out/tests.txt") || failed+=("tests")
else
  echo "== no tests: pytest cannot be imported" | tee "$out/tests.txt"
fi

echo "== models"
models=(
  --arch lazyformer_m2x6_s,lazyformer_m6x2_s --pattern m2x6_w3072=M2x6 --backend fused,recompute --precision "$precision"
  --baseline-backend recompute,fused
  --lengths 8192,512,4096 --tokens 32768 --what encoder,training --rounds 20 --budget 2.2min
)
[[ ${#tiny[@]} -eq 0 ]] || models=(
  --arch lazyformer_m2x6_s_tiny,lazyformer_m6x2_s_tiny --pattern m2x6_w3072=M2x6 --backend fused,recompute
  --baseline-arch bert_tiny --lengths 16,32 --tokens 32 --what encoder,training --rounds 2
)
part 190 "${cli[@]}" models "${models[@]}" --device "$device" --output "$out/models" || failed+=("models")
[[ ! -e $out/models/results.json ]] || "$python" "$root/scripts/gpu_bars.py" "$out/models" | tee "$out/bars.txt" || failed+=("bars")

echo "== back ends"
back_ends=(--patterns s,sl,slllll --lengths 512,2048,8192 --tokens 8192 --rounds 5 --budget 0.7min)
[[ ${#tiny[@]} -eq 0 ]] || back_ends=(--patterns s,sl --lengths 16 --heads 2x8 --rounds 2)
part --signal=INT 95 "${cli[@]}" attention --backend auto,eager,materialize,recompute,fused "${back_ends[@]}" \
  --device "$device" >"$out/back_ends.txt" || failed+=("back ends")
cat "$out/back_ends.txt"

echo "== attention variants"
variants=(--lengths 4096,16384 --rounds 5 --budget 0.6min)
[[ ${#tiny[@]} -eq 0 ]] || variants=(--lengths 32 --heads 2x8 --rounds 2)
part --signal=INT 85 "${cli[@]}" attention "${variants[@]}" --device "$device" >"$out/variants.txt" || failed+=("attention variants")
cat "$out/variants.txt"

[[ ${#failed[@]} -eq 0 ]] || { echo "failed: ${failed[*]}" >&2 && exit 1; }
echo "results: $out"
