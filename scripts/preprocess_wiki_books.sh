#!/usr/bin/env bash
# Wikipedia and books -> what fairseq-train reads, by the recipe of LazyFormer's appendix A.
set -euo pipefail
# shellcheck source=scripts/common.sh
source "$(dirname "$0")/common.sh"

usage() {
  cat <<'HELP'
usage: scripts/preprocess_wiki_books.sh OUT WIKI BOOKS [options of lazyformer corpus]

Turns WIKI (a MediaWiki dump, or WikiExtractor's output) and BOOKS (a folder of .txt files, one book each)
into OUT: shards of binarised data, dictionary, tokenizer, manifest.json and report.html. Of equal documents Wikipedia's
stays. BOOKS in another layout: name it, as in jsonl:books.jsonl.zst. Stopped at any moment, it goes on when run again.
Then: scripts/pretrain.sh lazyformer_m2x6_s OUT/shard0:OUT/shard1:...

Options of `lazyformer corpus` that may follow: --workers 16, --near-duplicates, ...;
`lazyformer corpus --help` has all of them. Of this script:
  --dry-run    print the command, run nothing
  --help
HELP
}

help_if_asked "$@"
[[ $# -ge 3 && $1 != -* && $2 != -* && $3 != -* ]] ||
  fail 2 "give OUT, WIKI and BOOKS first; see scripts/preprocess_wiki_books.sh --help"
out=$1 wiki=$2 books=$3
shift 3

[[ $books =~ ^(mediawiki|wikiextractor|jsonl|text|wikitext|book): ]] || books=book:$books
dry_run='' options=()
for option in "$@"; do
  if [[ $option == --dry-run ]]; then dry_run=yes; else options+=("$option"); fi
done

command=(bash "$(dirname "$0")/lazyformer.sh" corpus "$wiki" "$books" "$out" --vocab-size 32768 "${options[@]}")
if [[ -n $dry_run ]]; then
  printf '%q ' "${command[@]}"
  echo
  exit 0
fi
exec "${command[@]}"
