# shellcheck shell=bash
# What the scripts share: errors, --help, the Python of this checkout. To be sourced under `set -euo pipefail`.

# fail STATUS MESSAGE: 2 for a wrong command line, 1 for all else
fail() {
  echo "error: $2" >&2
  exit "$1"
}

# help_if_asked "$@": without arguments, or with --help among them, prints what `usage` of the caller prints, and ends.
help_if_asked() {
  if [[ " $* " == *" --help "* || $# -eq 0 ]]; then
    usage
    exit 0
  fi
}

# use_checkout: sets root, and python to that of its .venv where there is one; PYTHONPATH begins with root.
use_checkout() {
  root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
  python=python3
  [[ ! -x $root/.venv/bin/python ]] || python=$root/.venv/bin/python
  export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
}
