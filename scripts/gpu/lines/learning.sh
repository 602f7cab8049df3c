# shellcheck shell=bash disable=SC2154
# Trains four patterns with about 30 million parameters on the same ten million words (read at most ten times), and then
# evaluates them on BLiMP.
#
# The settings are based on estimates, not on measurements:
# - An encoder of 150 million parameters has 111 million outside its embeddings. At 6 FLOPs per token for each of these,
#   365,000 tokens/s on an H100 are 243 TFLOP/s.
# - 8 layers of width 512 have 25.2 million parameters, and the embeddings of 8,192 tokens have another 4.2 million. The
#   head is computed for only 30% of the tokens, so it counts as 1.3 million. So a token takes 6 x 26.5 million = 0.159
#   GFLOP, and the same FLOP/s would be 1.53 million tokens/s. Small models are less efficient.
# - Ten million words are 14.4 million tokens, so ten epochs are 144 million: 94 s per model at that speed, and 377 s
#   for four models. Training each for 85 s leaves a minute for the start and 80 s for BLiMP within eight minutes. 85 s
#   are enough for nine epochs at 1.53 million tokens/s, and for ten at 1.70. A trial determines the actual number, and
#   the report states how many words were read.
# - An update of 64 x 512 tokens takes 21 ms at that speed, and there are 4,400 of them. On a CPU, an update of the first
#   three models calls 720 to 860 operators that compute, and one of the fourth 1,230. At 5 us per launch, these are 4 to
#   6 ms, so launches do not limit updates of this size, and CUDA graphs would gain nothing. Updates a quarter as large
#   would be limited by launches. `--compile` would take minutes to start.
# - The size of a Muon step depends on the learning rate, but not on the batch. The recipe uses 5e-3 for 2 x 512 tokens,
#   and Muon's authors use 2e-2 for half a million tokens. We use 1e-2, a value in between.
needs babylm blimp
models=(--model 'bert=(sf)x8' --model 'lazyformer=M2x4' --model 'conv=(cf)x3 sf (cf)x4'
  --model 'modern=(s[qk_norm] f[gate=gelu])x8')
sizes=(--embed-dim 512 --ffn-embed-dim 2048 --heads 8 --tokens-per-sample 512 --batch-size 64 --budget 85s --lr 1e-2)
[[ -z $tiny ]] || sizes=(--embed-dim 8 --ffn-embed-dim 64 --heads 2 --tokens-per-sample 32 --batch-size 4 --updates 4)
part 440 training "${lazyformer[@]}" compare run "$DATA/babylm" "$work/models" --task masked-lm --recipe laptop \
  --equal-parameters --word-budget 100M --seeds 1 --device "$device" --precision "$precision" "${models[@]}" "${sizes[@]}"
trained=$("$python" "$root/scripts/examples/babylm_table.py" --trained "$work") || trained=""
if [[ -n $trained ]]; then
  mapfile -t trained <<<"$trained"
  part 160 BLiMP "${lazyformer[@]}" evaluate "${trained[@]}" --data "$DATA/blimp" --output "$work/blimp" \
    --device "$device" --precision "$precision" --max-tokens 262144
fi
