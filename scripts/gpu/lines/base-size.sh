# shellcheck shell=bash disable=SC2154
# Trains a model of BERT base's size on the words of the line `learning`, then evaluates it on BLiMP and fine-tunes it.
#
# As in that line, the estimate assumes 243 TFLOP/s. 85 million parameters in 12 layers, and a head of 6.9 million for
# 30% of the tokens, take 6 x 87 million = 0.52 GFLOP per token. That is 465,000 tokens/s, or 310 s for ten epochs of
# 14.4 million tokens. 280 s are enough for nine.
needs babylm blimp glue
model=${model:-bert=(sf)x12}
sizes=(--embed-dim 768 --ffn-embed-dim 3072 --heads 12 --tokens-per-sample 512 --batch-size 64 --budget 280s --lr 1e-2)
tuning=(--lrs 5e-5 --seeds 1 --epochs 5)
if [[ -n $tiny ]]; then
  sizes=(--embed-dim 8 --ffn-embed-dim 8 --heads 2 --tokens-per-sample 128 --batch-size 4 --updates 4)
  tuning=(--lrs 5e-5 --seeds 1 --epochs 1 --max-train-rows 32 --gpus none)
fi
part 350 training "${lazyformer[@]}" compare run "$DATA/babylm" "$work/models" --task masked-lm --recipe laptop \
  --word-budget 100M --seeds 1 --device "$device" --precision "$precision" --model "$model" "${sizes[@]}"
trained=$("$python" "$root/scripts/examples/babylm_table.py" --trained "$work") || trained=""
if [[ -n $trained ]]; then
  part 100 BLiMP "${lazyformer[@]}" evaluate "$trained" --data "$DATA/blimp" --output "$work/blimp" \
    --device "$device" --precision "$precision" --max-tokens 131072
  part 150 fine-tuning "${lazyformer[@]}" finetune "$trained" --task glue --tasks RTE,CoLA --data "$DATA/glue" \
    --output "$work/glue" "${tuning[@]}"
fi
