#!/usr/bin/env bash
# The command `lazyformer` of this checkout, by its .venv where there is one. It becomes that, so that signals reach it.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=python3
[[ ! -x $root/.venv/bin/python ]] || python=$root/.venv/bin/python
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
exec "$python" -m lazyformer_fairseq.cli "$@"
