# shellcheck shell=bash
# What the scripts that prepare texts of language modelling share: download (which those that download take too, or parts
# of it), unpack, `lazyformer lm prepare`. To be sourced under `set -euo pipefail`. The caller of the last sets: $name
# (wikitext-103, enwik8, ...), $corpus (what `lazyformer lm prepare` calls it), $url, $md5 (of the archive, as its
# distributors or torchtext publish it; '' where the text itself is checked by its MD5), $unpacked (what the archive holds,
# under it), and calls prepare_text "$@".

# shellcheck source=scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# At the end of the `usage` of a script that calls prepare_text.
shared_options() {
  cat <<'HELP'
options (defaults in brackets)
  --from DIR        take the text that is in DIR, download nothing
  --downloads DIR   where the archive goes and stays [OUT.download]
  --url URL         of the archive, on another server
  --unofficial      take a text that is not exactly the official one too, and say what differs
  --dry-run         say what would be done, do nothing
  --help
HELP
}

# A file's size in bytes; 0 if it is not there.
size_of() {
  if [[ -e $1 ]]; then wc -c <"$1" | tr -d ' '; else echo 0; fi
}

md5_of() {
  if command -v md5sum >/dev/null; then md5sum <"$1" | cut -d ' ' -f 1; else md5 -q "$1"; fi
}

# resume URL FILE SIZE: fetches, as $agent, what FILE lacks of so many bytes; goes on where the connection broke. A server
# that sends more is cut off (by curl from 8.4 on; an older one looks at the announced length alone).
resume() {
  local pause there progress=(--silent --show-error)
  [[ ! -t 2 ]] || progress=(--progress-bar)
  for pause in 5 15 60 0; do
    [[ $(size_of "$2") -lt $3 ]] || break
    # Its own --retry would begin again where this call began.
    curl "${progress[@]}" --fail --location --user-agent "$agent" --continue-at - --speed-limit 1000 --speed-time 60 \
      --max-filesize "$3" --output "$2" "$1" && break
    [[ $pause -eq 0 ]] || { echo "The connection broke; going on in $pause s ..." >&2 && sleep "$pause"; }
  done
  there=$(size_of "$2")
  [[ $there -ge $3 ]] || fail 1 "$1: broke off at $there of $3 bytes; run this again and it goes on"
  [[ $there -eq $3 ]] || fail 1 "$2: has $there bytes, but $3 are published; remove it and run this again"
}

# download URL FILE: over one connection; stopped, it goes on from FILE.part. FILE is there whole or not at all.
download() {
  local part=$2.part size agent='Mozilla/5.0 (compatible; lazyformer-corpus-script) curl'
  command -v curl >/dev/null || fail 1 "curl is not there: install it"
  size=$(curl --silent --show-error --fail --location --user-agent "$agent" --head "$1" | tr -d '\r' |
    awk 'tolower($1) == "content-length:" { size = $2 } END { print size }') ||
    fail 1 "$1: cannot be read; give another by --url"
  [[ $size =~ ^[1-9][0-9]{0,14}$ ]] || fail 1 "$1: the server does not say how large it is; give another by --url"
  mkdir -p "$(dirname "$2")"
  echo "$1: $size bytes to $2" >&2
  resume "$1" "$part" "$size"
  mv "$part" "$2"
}

# prepare_text "$@": the whole of it.
prepare_text() {
  help_if_asked "$@"
  [[ $1 != -* ]] || fail 2 "give OUT first; see $0 --help"
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
  [[ -z $from || -d $from ]] || fail 1 "--from $from: is no folder"
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
      fail 1 "$archive: its MD5 is not $md5; remove it and run this again"
    fi
    python3 -S -E "$(dirname "${BASH_SOURCE[0]}")/unpack_zip.py" "$archive" "$downloads" ||
      fail 1 "$archive: cannot be unpacked; remove it and run this again"
  fi
  exec "${command[@]}"
}
