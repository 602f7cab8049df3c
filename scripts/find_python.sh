#!/usr/bin/env bash
# Prints the path of a working Python 3.11 to 3.14 that can create virtual environments: $PYTHON if it is set, and
# otherwise the first one on PATH. Versions that fairseq supports are preferred.
# Finding a file with the right name is not enough, because the shims of version managers may be on PATH but fail.
set -euo pipefail

works() {
  "$1" -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null
}

if [ -n "${PYTHON:-}" ]; then
  works "$PYTHON" && echo "$PYTHON" && exit
  echo "PYTHON=$PYTHON is not a working Python 3.11 to 3.14 with the modules venv and ensurepip." >&2
  exit 1
fi

for name in python3.11 python3.12 python3 python python3.13 python3.14; do
  while IFS= read -r candidate; do
    works "$candidate" && echo "$candidate" && exit
  done < <(type -aP "$name")
done
echo "No working Python 3.11 to 3.14 with the modules venv and ensurepip was found (Debian, Ubuntu: python3-venv)." >&2
echo "Install one, or set its path: make setup PYTHON=/path/to/python3.11" >&2
exit 1
