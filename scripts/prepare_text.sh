# shellcheck shell=bash
# Functions shared by the scripts that prepare text for language modeling: download, unpack, and run `lazyformer lm
# prepare`. Other download scripts use some of them, too. Source this file after `set -euo pipefail`.
#
# Before it calls prepare_text "$@", a script sets these variables:
#   name      name of the official text: wikitext-103, enwik8, ...
#   corpus    name of the text's format, as in `lazyformer lm prepare`: wikitext, enwik8 or text8
#   url       URL of the archive
#   md5       MD5 of the archive, as published by its distributors or by torchtext; '' if the text is checked instead
#   unpacked  path of the text within the archive

# shellcheck source=scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# Print help on the options of prepare_text; a script's `usage` ends with it.
shared_options() {
  cat <<'HELP'
options (defaults in brackets)
  --from DIR        use the text in DIR instead of downloading it
  --downloads DIR   folder for the downloaded archive, which is kept [OUT.download]
  --url URL         URL of the archive on another server
  --unofficial      also accept a text that differs from the official one, and report the differences
  --dry-run         print what would be done without doing it
  --help
HELP
}

# Print a file's size in bytes, or 0 if it does not exist.
size_of() {
  if [[ -e $1 ]]; then wc -c <"$1" | tr -d ' '; else echo 0; fi
}

md5_of() {
  if command -v md5sum >/dev/null; then md5sum <"$1" | cut -d ' ' -f 1; else md5 -q "$1"; fi
}

# resume URL FILE SIZE: download the missing bytes of FILE up to SIZE, with $agent as user agent, and resume after broken
# connections. If the server sends more, the download is aborted (curl before 8.4 checks only the announced length).
resume() {
  local pause there progress=(--silent --show-error)
  [[ ! -t 2 ]] || progress=(--progress-bar)
  for pause in 5 15 60 0; do
    [[ $(size_of "$2") -lt $3 ]] || break
    # curl's own --retry would start again at the position where this call started.
    curl "${progress[@]}" --fail --location --user-agent "$agent" --continue-at - --speed-limit 1000 --speed-time 60 \
      --max-filesize "$3" --output "$2" "$1" && break
    [[ $pause -eq 0 ]] || { echo "The connection broke; resuming in $pause s ..." >&2 && sleep "$pause"; }
  done
  there=$(size_of "$2")
  [[ $there -ge $3 ]] || fail 1 "$1: the download stopped at $there of $3 bytes; run this again to resume"
  [[ $there -eq $3 ]] || fail 1 "$2 has $there bytes, but the published size is $3; remove it and run this again"
}

# download URL FILE: download over a single connection, resuming from FILE.part. FILE exists only once it is complete.
download() {
  local part=$2.part size agent='Mozilla/5.0 (compatible; lazyformer-corpus-script) curl'
  command -v curl >/dev/null || fail 1 "curl was not found; install it"
  size=$(curl --silent --show-error --fail --location --user-agent "$agent" --head "$1" | tr -d '\r' |
    awk 'tolower($1) == "content-length:" { size = $2 } END { print size }') ||
    fail 1 "$1: cannot be read; use another URL with --url"
  [[ $size =~ ^[1-9][0-9]{0,14}$ ]] || fail 1 "$1: the server does not report its size; use another URL with --url"
  mkdir -p "$(dirname "$2")"
  echo "$1: $size bytes to $2" >&2
  resume "$1" "$part" "$size"
  mv "$part" "$2"
}

# prepare_text "$@": parse the options, then download, verify, unpack and prepare the text.
prepare_text() {
  help_if_asked "$@"
  [[ $1 != -* ]] || fail 2 "pass OUT first; see $0 --help"
  local out=${1%/} from='' downloads='' official=(--official "$name") dry_run=''
  shift
  while [[ $# -gt 0 ]]; do
    case $1 in
    --from | --downloads | --url)
      [[ $# -ge 2 ]] || fail 2 "$1 needs a value"
      case $1 in
      --from) from=$2 ;;
      --downloads) downloads=$2 ;;
      --url) url=$2 ;;
      esac
      shift 2
      ;;
    --unofficial) official=() && shift ;;
    --dry-run) dry_run=yes && shift ;;
    *) fail 2 "$1: no such option; see $0 --help" ;;
    esac
  done
  [[ -z $from || -d $from ]] || fail 1 "--from $from: no such folder"
  downloads=${downloads:-$out.download}

  local archive=$downloads/${url##*/}
  local command=(
    bash "$(dirname "${BASH_SOURCE[0]}")/lazyformer.sh"
    lm prepare "$corpus" "${from:-$downloads/$unpacked}" "$out" "${official[@]}"
  )
  if [[ -n $dry_run ]]; then
    [[ -n $from ]] || echo "would download $url to $archive" >&2
    printf '%q ' "${command[@]}"
    echo
    exit 0
  fi
  if [[ -z $from ]]; then
    [[ -e $archive ]] || download "$url" "$archive"
    if [[ -n $md5 && $(md5_of "$archive") != "$md5" ]]; then
      fail 1 "$archive does not have the MD5 $md5; remove the archive and run this again"
    fi
    python3 -S -E "$(dirname "${BASH_SOURCE[0]}")/unpack_zip.py" "$archive" "$downloads" ||
      fail 1 "$archive cannot be unpacked; remove it and run this again"
  fi
  exec "${command[@]}"
}
