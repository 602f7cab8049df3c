#!/usr/bin/env bash
# text8 by characters -> what fairseq-train and `lazyformer lm evaluate` read.
set -euo pipefail
# shellcheck source=scripts/prepare_text.sh
source "$(dirname "$0")/prepare_text.sh"

usage() {
  cat <<'HELP'
usage: scripts/prepare_text8.sh OUT [options]

Downloads text8 (Mahoney, 2006; 31 MB, 100,000,000 characters of a dump of the English Wikipedia: a to z and spaces), and
writes OUT: a symbol a character, 90, 5 and 5 million in the file's order. A file with another MD5 is refused. Stopped
while it downloads, it goes on when run again. With --from DIR, DIR holds text8.

HELP
  shared_options
}

name=text8 corpus=text8 unpacked=text8
url=https://mattmahoney.net/dc/text8.zip md5=''
prepare_text "$@"
