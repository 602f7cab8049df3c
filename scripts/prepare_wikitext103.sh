#!/usr/bin/env bash
# WikiText-103 by words -> what fairseq-train and `lazyformer lm evaluate` read.
set -euo pipefail
# shellcheck source=scripts/prepare_text.sh
source "$(dirname "$0")/prepare_text.sh"

usage() {
  cat <<'HELP'
usage: scripts/prepare_wikitext103.sh OUT [options]

Downloads WikiText-103 (Merity et al., 2016; 190 MB, CC BY-SA 3.0) from its first author's site, compares its MD5, and
writes OUT: 103,227,021, 217,646 and 245,569 words, each line's end among them, and a dictionary of 267,735. A text with
other counts is refused. Stopped while it downloads, it goes on when run again.
With --from DIR, DIR holds wiki.train.tokens, wiki.valid.tokens and wiki.test.tokens. WikiText-2 too is prepared by
`lazyformer lm prepare wikitext DIR OUT --official wikitext-2`.

HELP
  shared_options
}

name=wikitext-103 corpus=wikitext unpacked=wikitext-103
url=https://wikitext.smerity.com/wikitext-103-v1.zip md5=9ddaacaf6af0710eda8c456decff7832
prepare_text "$@"
