# shellcheck shell=bash disable=SC2154
# Times models and their baselines, back ends, attention variants, and sublayers that no other line covers.
needs babylm
bench=("${lazyformer[@]}" bench)
if [[ $device == cuda ]]; then
  echo "== compiling" # in parallel, to fill Triton's cache; uses batch size 1, for which no tile sizes are cached
  export TRITON_CACHE_AUTOTUNING=0
  for pattern in s sl slllll; do
    timeout --kill-after=10 60 "${bench[@]}" attention --patterns "$pattern" --backend fused --lengths 512 --rounds 2 \
      --device cuda &>/dev/null &
  done
  for arch in bert_base lazyformer_m2x6_s lazyformer_m6x2_s; do # also with a bias
    timeout --kill-after=10 60 "${bench[@]}" models --arch $arch --baseline-arch bert_tiny --backend fused \
      --baseline-backend fused --lengths 512 --rounds 2 --precision "$precision" --device cuda \
      --output "$work/compiling/$arch" &>/dev/null &
  done
  wait
  rm -rf "$work/compiling"
  export TRITON_CACHE_AUTOTUNING=1 # parts reuse the tile sizes that earlier parts found
fi

models=(--arch lazyformer_m2x6_s,lazyformer_m6x2_s --pattern m2x6_w3072=M2x6 --backend fused,recompute
  --baseline-backend recompute,fused --precision "$precision")
sizes=(--lengths 8192,512,4096 --tokens 32768 --what encoder,training --rounds 20 --budget 2.2min)
[[ -z $tiny ]] || sizes=(--arch lazyformer_m2x6_s_tiny,lazyformer_m6x2_s_tiny --baseline-arch bert_tiny --lengths 16
  --tokens 16 --what training --rounds 2)
part 190 models "${bench[@]}" models "${models[@]}" "${sizes[@]}" --device "$device" --output "$work/models"

sizes=(--patterns s,sl,slllll --lengths 512,2048,8192 --tokens 8192 --rounds 5 --budget 0.7min)
[[ -z $tiny ]] || sizes=(--patterns s,sl --lengths 16 --heads 2x8 --rounds 2)
part 95 "back ends" "${bench[@]}" attention --backend auto,eager,materialize,recompute,fused "${sizes[@]}" \
  --device "$device"

sizes=(--lengths 4096,16384 --rounds 5 --budget 0.6min)
[[ -z $tiny ]] || sizes=(--lengths 32 --heads 2x8 --rounds 2)
part 85 "attention variants" "${bench[@]}" attention "${sizes[@]}" --device "$device"

# Recurrences, experts, and the memory saved by reversible layers.
sizes=(--arch nbrc_base,gshard_base,reformer_base,reformer_reversible_base --lengths 512,4096 --tokens 8192 --rounds 5
  --budget 0.8min)
[[ -z $tiny ]] || sizes=(--arch nbrc_tiny,gshard_tiny --baseline-arch bert_tiny --lengths 16 --tokens 16 --rounds 2)
part 75 kinds "${bench[@]}" models "${sizes[@]}" --what training --relative-position-buckets 0 \
  --baseline-backend recompute --precision "$precision" --device "$device" --output "$work/kinds"

sizes=(--arch bert_small --sublayers 8 --max-updates 100 --batch-size 64 --tokens-per-sample 128)
[[ -z $tiny ]] || sizes=(--arch bert_tiny --sublayers 2 --max-updates 20 --batch-size 4 --tokens-per-sample 32)
part 60 search "${lazyformer[@]}" search "$DATA/babylm" "$work/search" --task masked-lm --recipe laptop \
  --budgets 0.8,1.0 --evaluations 4 --rungs 1 --no-control --device "$device" "${sizes[@]}"
