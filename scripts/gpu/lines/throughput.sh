# shellcheck shell=bash disable=SC2154
# Whole updates in turn, the lengths that have bars first.
options=(--budget 450)
[[ -z $tiny ]] || options=(--tiny)
part 500 throughput "$python" "$here/throughput.py" "$work/throughput.json" "${options[@]}" --device "$device" \
  --precision "$precision"
