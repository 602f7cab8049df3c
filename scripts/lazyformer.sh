#!/usr/bin/env bash
# The command `lazyformer` of this checkout, by its .venv where there is one. It becomes that, so that signals reach it.
set -euo pipefail
# shellcheck source=scripts/common.sh
source "$(dirname "$0")/common.sh"
use_checkout
exec "$python" -m lazyformer_fairseq.cli "$@"
