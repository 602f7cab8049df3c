# shellcheck shell=bash disable=SC2154
# Times attention within documents and over all pairs, and then an epoch of RTE without and with padding.
needs babylm glue documents.txt
sizes=(--tokens-per-sample 2048 --batch-size 16 --batches 8 --precision "$precision")
[[ -z $tiny ]] || sizes=(--tokens-per-sample 32 --batch-size 2 --batches 2)
mkdir "$work/documents"
documents() { # NAME [OPTIONS]
  part 80 "$1" "$python" "$root/scripts/time_documents.py" "$DATA/documents.txt" "${sizes[@]}" \
    --json "$work/documents/$1.json" "${@:2}"
}
documents s
documents s-biased --bias
if [[ -z $tiny ]]; then
  documents s-flex --back-end flex
  documents s-varlen --varlen
fi
documents s-window-128 --s 's[window=128]'

start=(--embed-dim 768 --ffn-embed-dim 3072 --heads 12 --tokens-per-sample 512 --model 'bert=(sf)x12')
updates=40
[[ -z $tiny ]] || start=(--embed-dim 8 --ffn-embed-dim 8 --heads 2 --tokens-per-sample 128 --model bert=sf) updates=2
part 90 "a model" "${lazyformer[@]}" compare run "$DATA/babylm" "$work/models" --task masked-lm --updates 1 --seeds 1 \
  --batch-size 4 --device "$device" --precision "$precision" "${start[@]}"
part 60 "RTE's files" "${lazyformer[@]}" finetune --task glue --tasks RTE --data "$DATA/glue" --output "$work/glue" \
  --tokenizer "$DATA/babylm/tokenizer"
checkpoint=$("$python" "$root/scripts/examples/babylm_table.py" --trained "$work") || true
part 90 RTE "$python" "$root/scripts/time_glue_batches.py" "$work/glue/tasks/RTE" "${checkpoint#*=}" \
  --updates "$updates" --json "$work/rte.json"
