#!/usr/bin/env bash
# Runs the `lazyformer` command of this checkout, in its .venv if it exists. With exec, the command receives signals.
set -euo pipefail
# shellcheck source=scripts/common.sh
source "$(dirname "$0")/common.sh"
use_checkout
exec "$python" -m lazyformer_fairseq.cli "$@"
