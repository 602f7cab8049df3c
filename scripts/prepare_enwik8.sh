#!/usr/bin/env bash
# Prepares enwik8 at the byte level for fairseq-train and `lazyformer lm evaluate`.
set -euo pipefail
# shellcheck source=scripts/prepare_text.sh
source "$(dirname "$0")/prepare_text.sh"

usage() {
  cat <<'HELP'
usage: scripts/prepare_enwik8.sh OUT [options]

Downloads enwik8 (Mahoney, 2006; 36 MB, the first 100,000,000 bytes of a dump of the English Wikipedia) and writes OUT,
with one symbol per byte and splits of 90, 5 and 5 million bytes in file order. A file with a different MD5 is
rejected. Run the same command again to resume an interrupted download. With --from DIR, DIR must contain enwik8.

HELP
  shared_options
}

name=enwik8 corpus=enwik8 unpacked=enwik8
url=https://mattmahoney.net/dc/enwik8.zip md5=''
prepare_text "$@"
