#!/usr/bin/env bash
# Runs the `lazyformer` command of this checkout with the Python of its .venv, if there is one. Because of exec, the
# command itself receives signals.
set -euo pipefail
# shellcheck source=scripts/common.sh
source "$(dirname "$0")/common.sh"
use_checkout
exec "$python" -m lazyformer_fairseq.cli "$@"
