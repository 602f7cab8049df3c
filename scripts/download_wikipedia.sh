#!/usr/bin/env bash
# Downloads a Wikipedia dump: the text of all articles as one MediaWiki XML file, checked against its published SHA-1.
set -euo pipefail
# shellcheck source=scripts/prepare_text.sh
source "$(dirname "$0")/prepare_text.sh"

usage() {
  cat <<'HELP'
usage: scripts/download_wikipedia.sh FOLDER [options]

Downloads LANGUAGEwiki-DATE-pages-articles-multistream.xml.bz2 into FOLDER, over one connection. Stopped at any moment,
it goes on when the same command is run again. The file gets its name when its size and SHA-1 are those published.
English is some 20 to 25 GB. Text: CC BY-SA 4.0, mostly GFDL too (https://dumps.wikimedia.org/legal.html).

options (defaults in brackets)
  --language CODE   [en]; as in CODE.wikipedia.org: de, simple, zh-min-nan, ...
  --date YYYYMMDD   of the dump [the newest that is finished]
  --mirror URL      [https://dumps.wikimedia.org]; its mirrors.html lists others, and one near you is quicker;
                    where a mirror has no folder `latest`, give --date
  --contact TEXT    your e-mail or web page, told to the server beside this script's name
  --dry-run         say what would be downloaded, download nothing
  --help
HELP
}

# fetch URL [options of curl]: to standard output
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
[[ $1 != -* ]] || fail 2 "give FOLDER first; see scripts/download_wikipedia.sh --help"
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
[[ $language =~ ^[a-z][a-z-]*$ ]] || fail 2 "--language $language: give a code such as en or zh-min-nan"
[[ -z $date || $date =~ ^[0-9]{8}$ ]] || fail 2 "--date $date: give YYYYMMDD"
[[ $mirror =~ ^https?://. ]] || fail 2 "--mirror $mirror: give a URL that begins with https:// or http://"
command -v curl >/dev/null || fail 1 "curl is not there: install it"

agent="lazyformer-corpus-script${contact:+ ($contact)} curl"
wiki=${language//-/_}wiki
checksums=$mirror/$wiki/${date:-latest}/$wiki-${date:-latest}-sha1sums.txt
# The newest dump's list is called `latest`, the files in it have their dates.
any_date='[0-9]{8}'
pattern="^[0-9a-f]{40}  $wiki-${date:-$any_date}-pages-articles-multistream\.xml\.bz2$"
published=$(fetch "$checksums") || fail 1 "$checksums: cannot be read; is --language, --date or --mirror right?"
line=$(grep -E "$pattern" <<<"$published" | tail -n 1) ||
  fail 1 "$checksums: lists no finished pages-articles-multistream.xml.bz2; give an earlier --date"
sha1=${line%% *} name=${line##* }
date=$(cut -d - -f 2 <<<"$name")
url=$mirror/$wiki/$date/$name
size=$(fetch "$url" --head | tr -d '\r' | awk 'tolower($1) == "content-length:" { size = $2 } END { print size }') ||
  fail 1 "$url: cannot be read"
[[ $size =~ ^[0-9]{1,15}$ ]] || fail 1 "$url: the server does not say how large it is; give another --mirror"

file=$folder/$name
part=$file.part
printf '%s\n  %s (%s bytes), sha1 %s\n  to %s\n' "$url" "$(gigabytes "$size")" "$size" "$sha1" "$file" >&2
[[ -z $dry_run ]] || exit 0

if [[ -e $file ]]; then
  echo "The file is there; comparing its SHA-1 ..." >&2
  [[ $(sha1_of "$file") == "$sha1" ]] || fail 1 "$file: is not the published file; remove it and run this again"
else
  mkdir -p "$folder"
  there=$(size_of "$part")
  free=$(df -Pk "$folder" | awk 'NR == 2 { print $4 * 1024 }')
  awk -v need="$((size - there))" -v free="$free" 'BEGIN { exit !(need <= free) }' ||
    fail 1 "$folder: $(gigabytes "$((size - there))") are still to come, but $(gigabytes "$free") are free there"
  [[ $there -eq 0 ]] || echo "Going on after $(gigabytes "$there") ..." >&2
  resume "$url" "$part" "$size"
  echo "Comparing the SHA-1 ..." >&2
  found=$(sha1_of "$part")
  [[ $found == "$sha1" ]] ||
    fail 1 "$part: its SHA-1 is $found, but $sha1 is published in $checksums; remove it and run this again"
  mv "$part" "$file"
fi
echo "Downloaded and checked: $file"
echo "Next: scripts/preprocess_wiki_books.sh OUT $(printf '%q' "$file") BOOKS   (for books see docs/data.md)"
echo "  or: lazyformer corpus $(printf '%q' "$file") OUT"
