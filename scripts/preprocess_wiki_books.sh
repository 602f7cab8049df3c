#!/usr/bin/env bash
# Prepares Wikipedia and books for fairseq-train, following appendix A of the LazyFormer paper.
set -euo pipefail
# shellcheck source=scripts/common.sh
source "$(dirname "$0")/common.sh"

usage() {
  cat <<'HELP'
usage: scripts/preprocess_wiki_books.sh OUT WIKI BOOKS [options of lazyformer corpus]

Converts WIKI (a MediaWiki dump, or WikiExtractor's output) and BOOKS (a folder of .txt files, one per book) to a corpus
in OUT: shards of binarized data, dictionary, tokenizer, manifest.json and report.html. If documents are identical,
the one from Wikipedia is kept. If BOOKS has another format, put the format's name before it, as in
jsonl:books.jsonl.zst. You can stop the script at any time and run it again to resume. Then run:

  scripts/pretrain.sh lazyformer_m2x6_s OUT/shard0:OUT/shard1:...

You can append options of `lazyformer corpus`, such as --workers 16 or --near-duplicates; `lazyformer corpus --help`
lists all of them. Options of this script:
  --dry-run    print the command without running it
  --help
HELP
}

help_if_asked "$@"
[[ $# -ge 3 && $1 != -* && $2 != -* && $3 != -* ]] ||
  fail 2 "pass OUT, WIKI and BOOKS first; see scripts/preprocess_wiki_books.sh --help"
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
