#!/usr/bin/env bash
# Downloads PG-19, 28,752 English books published before 1919 from Project Gutenberg, as distributed by DeepMind.
set -euo pipefail
# shellcheck source=scripts/prepare_text.sh
source "$(dirname "$0")/prepare_text.sh"

usage() {
  cat <<'HELP'
usage: scripts/download_books.sh FOLDER [options]

Downloads PG-19 (https://github.com/deepmind/pg19; Rae et al., 2019) to FOLDER over a single connection: 11.5 GB, one
.txt file per book, without Project Gutenberg's boilerplate. You can stop it at any time and run the same command again
to resume. All files are verified against their published MD5 checksums. The collection is licensed under the Apache
License 2.0. Its books are in the public domain in the USA; elsewhere, check the law of your country. BookCorpus, which
LazyFormer was trained on, is no longer distributed.

options (defaults in brackets)
  --splits 'A B'   the splits to download: train, validation, test [all three]; `lazyformer corpus` makes its own split
  --bucket URL     URL of the files [https://storage.googleapis.com/deepmind-gutenberg]
  --list URL       URL of the list of files [https://storage.googleapis.com/storage/v1/b/deepmind-gutenberg/o]
  --dry-run        print what would be downloaded without downloading it
  --help
HELP
}

# Read a page of the listing from standard input. Print the token of the next page, which may be empty, and then a line
# `name size md5` for each file. Values from the server are printed only if they have the expected format, so that none
# of them can act as a separator or a path.
parse_page() {
  "$python" -S -E -c '
import base64, json, re, sys

def refuse(what):
    sys.exit(f"a page of the listing {what}")

try:
    page = json.load(sys.stdin)
    token = page.get("nextPageToken", "")
    items = [(item["name"], item["size"], item["md5Hash"]) for item in page.get("items", [])]
except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
    refuse(f"does not have the format of Google Cloud Storage ({type(error).__name__})")
if not isinstance(token, str) or not re.fullmatch(r"[\x21-\x7e]*", token):
    refuse("has an invalid token for the next page")
print(token)
for name, size, md5 in items:
    if not re.fullmatch(rf"(?:{sys.argv[1]})/[0-9]{{1,12}}\.txt", str(name)):
        continue
    if not re.fullmatch(r"[0-9]{1,12}", str(size)):
        refuse(f"has an invalid size of {name}: {str(size)[:40]!r}")
    if not re.fullmatch(r"[A-Za-z0-9+/]{22}==", str(md5)):
        refuse(f"has an invalid MD5 of {name}: {str(md5)[:40]!r}")
    print(name, size, base64.b64decode(md5).hex())
' "${splits// /|}"
}

# Print a line `name size md5` for each book.
list_files() {
  local token='' seen=' ' page pages=0 most_pages=1000 # each has 1000 files; PG-19 has 29 pages
  while true; do
    page=$(curl --silent --show-error --fail --location --user-agent "$agent" --retry 3 --get "$list" \
      --data-urlencode "pageToken=$token" --data-urlencode 'fields=items(name,size,md5Hash),nextPageToken' |
      parse_page) || return 1
    token=$(head -n 1 <<<"$page")
    tail -n +2 <<<"$page"
    [[ -n $token ]] || break
    pages=$((pages + 1))
    if [[ $seen == *" $token "* || $pages -gt $most_pages ]]; then
      echo "the listing does not end: after $pages pages, it refers to the page $token" >&2
      return 1
    fi
    seen+="$token "
  done
}

# missing size|md5: print the names of listed files that do not exist, or whose size or MD5 is not the published one.
missing() {
  "$python" -S -E -c '
import hashlib, pathlib, sys

folder, by = pathlib.Path(sys.argv[1]), sys.argv[2]
for line in sys.stdin:
    name, size, md5 = line.split()
    file = folder / name
    if not file.is_file() or file.stat().st_size != int(size):
        print(name)
    elif by == "md5" and hashlib.md5(file.read_bytes()).hexdigest() != md5:
        file.unlink()
        print(name)
' "$folder" "$1" <<<"$files"
}

help_if_asked "$@"
[[ $1 != -* ]] || fail 2 "pass FOLDER first; see scripts/download_books.sh --help"
folder=$1
shift

splits='train validation test' dry_run=''
bucket=https://storage.googleapis.com/deepmind-gutenberg
list=https://storage.googleapis.com/storage/v1/b/deepmind-gutenberg/o
while [[ $# -gt 0 ]]; do
  case $1 in
  --splits | --bucket | --list)
    [[ $# -ge 2 ]] || fail 2 "$1 needs a value"
    case $1 in
    --splits) splits=$2 ;;
    --bucket) bucket=${2%/} ;;
    --list) list=$2 ;;
    esac
    shift 2
    ;;
  --dry-run) dry_run=yes && shift ;;
  *) fail 2 "$1: no such option; see scripts/download_books.sh --help" ;;
  esac
done
[[ $splits =~ ^(train|validation|test)(\ (train|validation|test))*$ ]] ||
  fail 2 "--splits $splits: use one or more of train, validation and test, separated by spaces"
command -v curl >/dev/null || fail 1 "curl was not found; install it"
python=$(command -v python3) || fail 1 "python3 was not found; install it"

agent='lazyformer-corpus-script curl'
files=$(list_files) || fail 1 "$list: cannot be read"
[[ -n $files ]] || fail 1 "$list lists no books"
todo=$(missing size)
count=$(grep -c . <<<"$todo" || true)
awk -v todo="$count" -v from="$bucket" -v folder="$folder" '{ bytes += $2 }
  END { printf "%d books, %.2f GB, from %s to %s; %d of them must be downloaded\n", NR, bytes / 1e9, from, folder, todo }' \
  <<<"$files" >&2
[[ -z $dry_run ]] || exit 0

mkdir -p "$folder"
if [[ $count -gt 0 ]]; then
  # A single curl call uses a single connection. Failures are counted below. No file may be larger than the largest
  # listed one.
  largest=$(awk '{ if ($2 > most) most = $2 } END { printf "%d", most }' <<<"$files")
  while IFS= read -r name; do
    printf 'url = "%s/%s"\noutput = "%s"\n' "$bucket" "$name" "$name"
  done <<<"$todo" | (cd "$folder" && curl --config - --create-dirs --fail --silent --show-error --location --retry 3 \
    --max-filesize "$largest" --user-agent "$agent" --write-out '%{filename_effective}\n') |
    awk -v all="$count" 'NR % 500 == 0 { print NR " of " all " ..." > "/dev/stderr" }' || true
fi
echo "Verifying the MD5 of all books ..." >&2
broken=$(missing md5)
[[ -z $broken ]] ||
  fail 1 "$(grep -c . <<<"$broken") book(s) differ from the originals: $(head -n 1 <<<"$broken") ...; run this again"
echo "Downloaded and verified: $(grep -c . <<<"$files") books in $folder"
echo "Next: scripts/preprocess_wiki_books.sh OUT WIKI $(printf '%q' "$folder")"
