#!/usr/bin/env bash
# Prints a Python 3.11 to 3.14 that runs and can make environments: $PYTHON if set, else the first one on PATH, of those
# that have fairseq if there is one.
# A file of the right name is not enough: the stand-ins that version managers put on PATH may exist and fail.
set -euo pipefail

works() {
  "$1" -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null
}

if [ -n "${PYTHON:-}" ]; then
  works "$PYTHON" && echo "$PYTHON" && exit
  echo "PYTHON=$PYTHON is no Python 3.11 to 3.14 that runs and has the modules venv and ensurepip." >&2
  exit 1
fi

for name in python3.11 python3.12 python3 python python3.13 python3.14; do
  while IFS= read -r candidate; do
    works "$candidate" && echo "$candidate" && exit
  done < <(type -aP "$name")
done
echo "Found no working Python 3.11 to 3.14 with the modules venv and ensurepip (Debian, Ubuntu: python3-venv)." >&2
echo "Install one, or say where it is: make setup PYTHON=/path/to/python3.11" >&2
exit 1
