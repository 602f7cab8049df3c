#!/usr/bin/env bash
# Downloads a Wikipedia dump, a MediaWiki XML file with the text of all articles, and verifies its published SHA-1.
set -euo pipefail
# shellcheck source=scripts/prepare_text.sh
source "$(dirname "$0")/prepare_text.sh"

usage() {
  cat <<'HELP'
usage: scripts/download_wikipedia.sh FOLDER [options]

Downloads LANGUAGEwiki-DATE-pages-articles-multistream.xml.bz2 to FOLDER over a single connection. You can stop it at any
time and run the same command again to resume. The file gets its name once its size and SHA-1 match the published ones.
The English dump is about 20 to 25 GB. The text is licensed under CC BY-SA 4.0, and mostly also under the GFDL
(https://dumps.wikimedia.org/legal.html).

options (defaults in brackets)
  --language CODE   the language, as in CODE.wikipedia.org: de, simple, zh-min-nan, ... [en]
  --date YYYYMMDD   date of the dump [the latest finished dump]
  --mirror URL      the server [https://dumps.wikimedia.org]; its mirrors.html lists others, and a nearby one is faster.
                    If a mirror has no folder `latest`, set --date
  --contact TEXT    your email address or website, sent to the server with this script's name
  --dry-run         print what would be downloaded without downloading it
  --help
HELP
}

# fetch URL [options of curl]: print what is at URL.
fetch() {
  local url=$1
  shift
  curl --silent --show-error --fail --location --user-agent "$agent" "$@" "$url"
}

sha1_of() {
  if command -v sha1sum >/dev/null; then sha1sum <"$1"; else shasum -a 1 <"$1"; fi | cut -d ' ' -f 1
}

gigabytes() {
  awk -v bytes="$1" 'BEGIN { printf (bytes < 1e8 ? "%.2f MB" : "%.1f GB"), bytes / (bytes < 1e8 ? 1e6 : 1e9) }'
}

help_if_asked "$@"
[[ $1 != -* ]] || fail 2 "pass FOLDER first; see scripts/download_wikipedia.sh --help"
folder=$1
shift

language=en date='' mirror=https://dumps.wikimedia.org contact='' dry_run=''
while [[ $# -gt 0 ]]; do
  case $1 in
  --language | --date | --mirror | --contact)
    [[ $# -ge 2 ]] || fail 2 "$1 needs a value"
    case $1 in
    --language) language=$2 ;;
    --date) date=$2 ;;
    --mirror) mirror=${2%/} ;;
    --contact) contact=$2 ;;
    esac
    shift 2
    ;;
  --dry-run) dry_run=yes && shift ;;
  *) fail 2 "$1: no such option; see scripts/download_wikipedia.sh --help" ;;
  esac
done
[[ $language =~ ^[a-z][a-z-]*$ ]] || fail 2 "--language $language: use a code such as en or zh-min-nan"
[[ -z $date || $date =~ ^[0-9]{8}$ ]] || fail 2 "--date $date: use the format YYYYMMDD"
[[ $mirror =~ ^https?://. ]] || fail 2 "--mirror $mirror: use a URL that begins with https:// or http://"
command -v curl >/dev/null || fail 1 "curl was not found; install it"

agent="lazyformer-corpus-script${contact:+ ($contact)} curl"
wiki=${language//-/_}wiki
checksums=$mirror/$wiki/${date:-latest}/$wiki-${date:-latest}-sha1sums.txt
# The list of the latest dump is in the folder `latest`, but it names the files by date.
any_date='[0-9]{8}'
pattern="^[0-9a-f]{40}  $wiki-${date:-$any_date}-pages-articles-multistream\.xml\.bz2$"
published=$(fetch "$checksums") || fail 1 "$checksums: cannot be read; check --language, --date and --mirror"
line=$(grep -E "$pattern" <<<"$published" | tail -n 1) ||
  fail 1 "$checksums lists no finished pages-articles-multistream.xml.bz2; use an earlier --date"
sha1=${line%% *} name=${line##* }
date=$(cut -d - -f 2 <<<"$name")
url=$mirror/$wiki/$date/$name
size=$(fetch "$url" --head | tr -d '\r' | awk 'tolower($1) == "content-length:" { size = $2 } END { print size }') ||
  fail 1 "$url: cannot be read"
[[ $size =~ ^[0-9]{1,15}$ ]] || fail 1 "$url: the server does not report its size; use another --mirror"

file=$folder/$name
part=$file.part
printf '%s\n  %s (%s bytes), sha1 %s\n  to %s\n' "$url" "$(gigabytes "$size")" "$size" "$sha1" "$file" >&2
[[ -z $dry_run ]] || exit 0

if [[ -e $file ]]; then
  echo "The file already exists; verifying its SHA-1 ..." >&2
  [[ $(sha1_of "$file") == "$sha1" ]] || fail 1 "$file is not the published file; remove it and run this again"
else
  mkdir -p "$folder"
  there=$(size_of "$part")
  free=$(df -Pk "$folder" | awk 'NR == 2 { print $4 * 1024 }')
  awk -v need="$((size - there))" -v free="$free" 'BEGIN { exit !(need <= free) }' ||
    fail 1 "$folder: $(gigabytes "$((size - there))") must still be downloaded, but only $(gigabytes "$free") is free"
  [[ $there -eq 0 ]] || echo "Resuming after $(gigabytes "$there") ..." >&2
  resume "$url" "$part" "$size"
  echo "Verifying the SHA-1 ..." >&2
  found=$(sha1_of "$part")
  [[ $found == "$sha1" ]] ||
    fail 1 "$part has the SHA-1 $found, but $checksums lists $sha1; remove $part and run this again"
  mv "$part" "$file"
fi
echo "Downloaded and verified: $file"
echo "Next: scripts/preprocess_wiki_books.sh OUT $(printf '%q' "$file") BOOKS   (for books, see docs/data.md)"
echo "  or: lazyformer corpus $(printf '%q' "$file") OUT"
