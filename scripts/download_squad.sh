#!/usr/bin/env bash
# Downloads SQuAD 1.1 as distributed by its authors.
set -euo pipefail
# shellcheck source=scripts/prepare_text.sh
source "$(dirname "$0")/prepare_text.sh"

usage() {
  cat <<'HELP'
usage: scripts/download_squad.sh FOLDER [options]

Downloads train-v1.1.json and dev-v1.1.json of SQuAD (Rajpurkar et al., 2016; CC BY-SA 4.0; 35 MB) to FOLDER, for
`lazyformer finetune --task squad --data FOLDER`. You can stop it at any time and run the same command again to resume.
Prints the size, number of questions and SHA-256 of each file. No checksums are published, so compare the output with
that of another download.

options (defaults in brackets)
  --url URL   URL of the files [https://rajpurkar.github.io/SQuAD-explorer/dataset]
  --dry-run   print what would be downloaded without downloading it
  --help
HELP
}

help_if_asked "$@"
[[ $1 != -* ]] || fail 2 "pass FOLDER first; see scripts/download_squad.sh --help"
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
python=$(command -v python3) || fail 1 "python3 was not found; install it"
for file in train-v1.1.json dev-v1.1.json; do
  if [[ -n $dry_run ]]; then
    echo "would download $url/$file to $folder/$file" >&2
    continue
  fi
  [[ -e $folder/$file ]] || download "$url/$file" "$folder/$file"
  "$python" -S -E - "$folder/$file" <<'PYTHON' || fail 1 "$folder/$file is not in SQuAD's format; remove it and run this again"
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
