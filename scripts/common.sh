# shellcheck shell=bash
# Functions shared by the scripts: error messages, --help, and the Python of this checkout. Source this file
# after `set -euo pipefail`.

# fail STATUS MESSAGE: print an error and exit with STATUS: 2 for a wrong command line, 1 for anything else.
fail() {
  echo "error: $2" >&2
  exit "$1"
}

# help_if_asked "$@": call the caller's `usage` and exit if there are no arguments, or if --help is one of them.
help_if_asked() {
  if [[ " $* " == *" --help "* || $# -eq 0 ]]; then
    usage
    exit 0
  fi
}

# use_checkout: set root to the repository and python to the Python of its .venv, if there is one, and prepend root to
# PYTHONPATH.
use_checkout() {
  root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
  python=python3
  [[ ! -x $root/.venv/bin/python ]] || python=$root/.venv/bin/python
  export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
}
