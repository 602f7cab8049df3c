#!/usr/bin/env bash
# Rows of the records in docs/compare.md, or a track: its models and its baseline, by the rules of that page.
set -euo pipefail
# shellcheck source=scripts/common.sh
source "$(dirname "$0")/common.sh"

usage() {
  cat <<'HELP'
usage: scripts/equal_footing.sh TRACK[/ROW,...] DATA OUT [options of `lazyformer compare`]
       scripts/equal_footing.sh --list

Trains the models of some rows, or of all of a track, and the baseline of the track as docs/compare.md rules, and writes
curves, tables and pictures to OUT. Stop it at any time; rerun to resume. --list prints the rows.

DATA is the track's corpus, which the page builds by one command. Data with other checksums is refused; to try the rules
on a text of yours, give --any-data: the result is then no record.
Options that follow win. With other seeds (three or more) it is still a record; with other options it is not.
HELP
}

# TRACK/ROW: its model.
rows() {
  cat <<'ROWS'
cpu-512/lazyformer M2x3 M1
cpu-512/lazyformer_m6 M6 M1
cpu-512/par (sff)x3 (f)x5
cpu-512/lazy_par sfflff sff (f)x5
cpu-512/sandwich (s)x2 (sf)x5 (f)x2
cpu-512/conv (cf)x3 sf (cf)x3
cpu-512/window (s[window=64] f)x6 sf
cpu-512/shared_keys (sfkf)x3 sf
cpu-512/modern (s[qk_norm] f[gate=gelu])x7
cpu-512/roberta fairseq:roberta_base; layers=7
cpu-512/hf_bert hf:bert; layers=7
cpu-512/hf_modernbert hf:modernbert; layers=7; ffn=512
cpu-2048/lazyformer M2x3 M1
cpu-2048/lazyformer_m6 M6 M1
cpu-2048/conv (cf)x3 sf (cf)x3
cpu-2048/window (s[window=256] f)x6 sf
ROWS
}

any_data="" words=()
for word; do
  if [[ $word == --any-data ]]; then any_data=yes; else words+=("$word"); fi
done
set -- "${words[@]}"
case ${1:---help} in
  --help) usage; exit 0 ;;
  --list) rows; exit 0 ;;
esac
[[ $# -ge 3 ]] || fail 2 "give TRACK or TRACK/ROW,..., DATA and OUT; see scripts/equal_footing.sh --help"
asked=$1 track=${1%%/*} data=$2 out=$3
shift 3

IFS=, read -ra names <<<"${asked#"$track"}"
models=(--model 'bert=(sf)x7')
while read -r name model; do
  [[ $name == "$track"/* ]] || continue
  [[ ${#names[@]} -eq 0 || ",${asked#"$track"/}," == *",${name#*/},"* ]] && models+=(--model "${name#*/}=$model")
done < <(rows)
[[ ${#models[@]} -gt 2 && (${#names[@]} -eq 0 || ${#models[@]} -eq $((2 + 2 * ${#names[@]}))) ]] || fail 2 "$asked: no such row or track; scripts/equal_footing.sh --list prints them"

# What docs/compare.md calls the rules of a track.
rules=(--task masked-lm --recipe laptop --seeds 1,2,3 --equal-parameters --baseline bert --device cpu --alone
  --embed-dim 192 --ffn-embed-dim 768 --heads 6 --lr 2.5e-3,5e-3,1e-2 --rate-updates 250 --validation-tokens 31232)
export OMP_NUM_THREADS=1
checksums=(2ca08a60aa50a1ea7bf814d151a7297d4a8a2d19af7fbb2dccb5cd1f318d1de3
  85213b5a3cac8fd5633547a5bd60edf8bef79da7c0da8bba33823bf204bf3b20)
case $track in
  cpu-512) rules+=(--tokens-per-sample 512 --batch-size 2 --budget 10min) ;;
  cpu-2048) rules+=(--tokens-per-sample 2048 --batch-size 1 --budget 30min) ;;
esac

if [[ ! $any_data ]]; then
  files=("$data/shard0/train.bin" "$data/shard0/valid.bin")
  for number in 0 1; do
    [[ -f ${files[number]} ]] || fail 2 "${files[number]}: no such file; docs/compare.md has the command that builds it"
    read -r found _ < <(sha256sum "${files[number]}")
    [[ $found == "${checksums[number]}" ]] ||
      fail 2 "${files[number]}: SHA-256 $found is not the track's, ${checksums[number]}; build the corpus as docs/compare.md does, or say --any-data"
  done
fi

# An option that the user gives replaces the track's.
options=()
while [[ ${#rules[@]} -gt 0 ]]; do
  flag=${rules[0]}
  rules=("${rules[@]:1}")
  words=("$flag")
  if [[ ${#rules[@]} -gt 0 && ${rules[0]} != --* ]]; then
    words+=("${rules[0]}")
    rules=("${rules[@]:1}")
  fi
  [[ " $* " == *" $flag"[\ =]* || ( $flag == --budget && " $* " == *" --updates"[\ =]* ) ]] || options+=("${words[@]}")
done

exec bash "$(dirname "$0")/lazyformer.sh" compare "$data" "$out" "${models[@]}" "${options[@]}" "$@"
