#!/usr/bin/env bash
# Prepares text8 at the character level for fairseq-train and `lazyformer lm evaluate`.
set -euo pipefail
# shellcheck source=scripts/prepare_text.sh
source "$(dirname "$0")/prepare_text.sh"

usage() {
  cat <<'HELP'
usage: scripts/prepare_text8.sh OUT [options]

Downloads text8 (Mahoney, 2006; 31 MB, 100,000,000 characters of a dump of the English Wikipedia: a to z and spaces) and
writes OUT, with one symbol per character and splits of 90, 5 and 5 million characters in file order. A file with a
different MD5 is rejected. Run the same command again to resume an interrupted download. With --from DIR, DIR must
contain text8.

HELP
  shared_options
}

name=text8 corpus=text8 unpacked=text8
url=https://mattmahoney.net/dc/text8.zip md5=''
prepare_text "$@"
