# shellcheck shell=bash disable=SC2154
# Times whole updates, interleaved, starting with the lengths that have targets.
options=(--budget 450)
[[ -z $tiny ]] || options=(--tiny)
part 500 throughput "$python" "$here/throughput.py" "$work/throughput.json" "${options[@]}" --device "$device" \
  --precision "$precision"
