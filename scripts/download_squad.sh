#!/usr/bin/env bash
# Downloads SQuAD 1.1, as its authors distribute it.
set -euo pipefail
# shellcheck source=scripts/prepare_text.sh
source "$(dirname "$0")/prepare_text.sh"

usage() {
  cat <<'HELP'
usage: scripts/download_squad.sh FOLDER [options]

Downloads train-v1.1.json and dev-v1.1.json of SQuAD (Rajpurkar et al., 2016; CC BY-SA 4.0), 35 MB, into FOLDER, as
`lazyformer finetune --task squad --data FOLDER` reads it. Stopped at any moment, it goes on when the same command is run
again. Prints bytes, questions and SHA-256 of each file: nobody publishes sums of them, so compare those of two downloads.

options (defaults in brackets)
  --url URL   of the files [https://rajpurkar.github.io/SQuAD-explorer/dataset]
  --dry-run   say what would be downloaded, download nothing
  --help
HELP
}

help_if_asked "$@"
[[ $1 != -* ]] || fail 2 "give FOLDER first; see scripts/download_squad.sh --help"
folder=${1%/}
shift
url=https://rajpurkar.github.io/SQuAD-explorer/dataset dry_run=''
while [[ $# -gt 0 ]]; do
  case $1 in
  --url)
    [[ $# -ge 2 ]] || fail 2 "$1 needs a value"
    url=${2%/} && shift 2
    ;;
  --dry-run) dry_run=yes && shift ;;
  *) fail 2 "$1: no such option; see scripts/download_squad.sh --help" ;;
  esac
done
python=$(command -v python3) || fail 1 "python3 is not there: install it"
for file in train-v1.1.json dev-v1.1.json; do
  if [[ -n $dry_run ]]; then
    echo "would download $url/$file to $folder/$file" >&2
    continue
  fi
  [[ -e $folder/$file ]] || download "$url/$file" "$folder/$file"
  "$python" -S -E - "$folder/$file" <<'PYTHON' || fail 1 "$folder/$file: is no SQuAD; remove it and run this again"
import hashlib, json, sys
from pathlib import Path

path = Path(sys.argv[1])
content = path.read_bytes()
try:
    articles = json.loads(content)["data"]
    paragraphs = [paragraph for article in articles for paragraph in article["paragraphs"]]
    questions = sum(len(paragraph["qas"]) for paragraph in paragraphs)
except (ValueError, KeyError, TypeError) as error:
    sys.exit(f"{path}: {error!r}")
counts = f"{questions:,} questions on {len(paragraphs):,} paragraphs of {len(articles):,} articles"
print(f"{path.name}: {len(content):,} bytes, {counts}, SHA-256 {hashlib.sha256(content).hexdigest()}")
PYTHON
done
[[ -n $dry_run ]] || echo "Next: lazyformer finetune CHECKPOINT --task squad --data $(printf '%q' "$folder") --output RESULTS"
