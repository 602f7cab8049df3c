#!/usr/bin/env bash
# enwik8 by bytes -> what fairseq-train and `lazyformer lm evaluate` read.
set -euo pipefail
# shellcheck source=scripts/prepare_text.sh
source "$(dirname "$0")/prepare_text.sh"

usage() {
  cat <<'HELP'
usage: scripts/prepare_enwik8.sh OUT [options]

Downloads enwik8 (Mahoney, 2006; 36 MB, the first 100,000,000 bytes of a dump of the English Wikipedia), and writes OUT:
a symbol a byte, 90, 5 and 5 million in the file's order. A file with another MD5 is refused. Stopped while it downloads,
it goes on when run again. With --from DIR, DIR holds enwik8.

HELP
  shared_options
}

name=enwik8 corpus=enwik8 unpacked=enwik8
url=https://mattmahoney.net/dc/enwik8.zip md5=''
prepare_text "$@"
