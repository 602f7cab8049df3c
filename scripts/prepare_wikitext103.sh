#!/usr/bin/env bash
# Prepares WikiText-103 at the word level for fairseq-train and `lazyformer lm evaluate`.
set -euo pipefail
# shellcheck source=scripts/prepare_text.sh
source "$(dirname "$0")/prepare_text.sh"

usage() {
  cat <<'HELP'
usage: scripts/prepare_wikitext103.sh OUT [options]

Downloads WikiText-103 (Merity et al., 2016; 190 MB, CC BY-SA 3.0) from its first author's website, verifies its MD5, and
writes OUT: splits of 103,227,021, 217,646 and 245,569 words, including one per line end, and a dictionary of 267,735
words. A text with different counts is rejected. Run the same command again to resume an interrupted download.
With --from DIR, DIR must contain wiki.train.tokens, wiki.valid.tokens and wiki.test.tokens. To prepare WikiText-2, run
`lazyformer lm prepare wikitext DIR OUT --official wikitext-2`.

HELP
  shared_options
}

name=wikitext-103 corpus=wikitext unpacked=wikitext-103
url=https://wikitext.smerity.com/wikitext-103-v1.zip md5=9ddaacaf6af0710eda8c456decff7832
prepare_text "$@"
