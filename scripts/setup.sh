#!/usr/bin/env bash
# Fills an environment with what the project needs: scripts/setup.sh [VENV]   (called by `make setup`)
#
# VENV is made with $PYTHON if it does not exist; one that exists is filled as it is. A torch that is there, in VENV or
# in $PYTHON, is kept. Indexes, proxies and caches are pip's own settings (PIP_EXTRA_INDEX_URL, pip.conf, ...).
# A torch that cannot use the GPUs of this machine is named at the end, and the one that could.
# Python 3.13 gets no fairseq, unless $FAIRSEQ_WHEEL is one: FILE or FILE#sha256=HASH, a wheel or the source archive, in
# place of the index's.
# Every step finds out what is done already, so an interrupted set-up is continued by running it again.
set -euo pipefail
cd "$(dirname "$0")/.."

case ${1:-} in
  -h | --help) sed -n '2,/^set /{s/^# \{0,1\}//p}' scripts/setup.sh; exit ;;
  -*) echo "error: $1: no such option; see scripts/setup.sh --help" >&2; exit 2 ;;
esac

venv=${1:-.venv}
python=$venv/bin/python
log=$venv/setup.log
unfinished=$venv/setup.unfinished
constraints=$venv/setup.constraints
fairseq=fairseq-fixed==0.12.3.1
fairseq_folder=$venv/fairseq
for file in "$log" "$unfinished" "$constraints"; do # a link's target would be written to
  if [ -L "$file" ] || { [ -e "$file" ] && [ -z "$(find "$file" -type f -links 1)" ]; }; then
    echo "$file is a link, or no plain file: remove it." >&2
    exit 1
  fi
done
export PIP_DISABLE_PIP_VERSION_CHECK=1

exec 3>&2 # for the trap, which may run where stderr goes to the log
trap 'printf "\nInterrupted. Nothing is lost: \"make setup\" goes on from here.\n" >&3; exit 130' INT TERM

# fail ADVICE: the end of the log, and what to do
fail() {
  printf '\nFAILED. The last lines of %s:\n' "$log" >&2
  tail -n 15 "$log" | cut -c -300 >&2
  printf '\n%s\n' "$1" >&2
  exit 1
}

# step TEXT ADVICE COMMAND...: one line on the screen, the command's own words in the log
step() {
  local text=$1 advice=$2 start=$SECONDS
  shift 2
  printf '%s ... ' "$text"
  printf '\n== %s\n' "$text" >>"$log"
  "$@" >>"$log" 2>&1 || fail "$advice"
  printf '%d s\n' $((SECONDS - start))
}

pip_install() {
  "$python" -m pip install "$@"
}

# Whether VENV can be filled. One of the user's may come without pip; one of ours without pip was cut short.
is_environment() {
  "$python" -m pip --version >/dev/null 2>&1 || { [ ! -e "$unfinished" ] && "$python" -m ensurepip >/dev/null 2>&1; }
}

# Options of `python -m venv` for the Python $1: the environment sees its packages if one of them is a torch to keep.
venv_options() {
  local version prefix
  version=$("$1" scripts/choose_torch.py installed)
  prefix=$("$1" -c 'import sys; print(sys.prefix if sys.prefix != sys.base_prefix else "")')
  if [ -n "$version" ] && [ -n "$prefix" ]; then
    # What such an environment would see is the Python behind the virtual environment, not its packages.
    echo "Note: to use the environment $prefix with its torch $version, say: make setup VENV=$prefix" >&2
  elif [ -n "$version" ] && "$1" -c 'import torch' 2>/dev/null; then
    echo --system-site-packages
  fi
}

make_environment() {
  if [ -d "$venv" ] && [ ! -e "$unfinished" ] && [ ! -e "$venv/pyvenv.cfg" ] && [ -n "$(ls -A "$venv")" ]; then
    echo "$venv holds other things than a Python environment: give another VENV." >&2
    exit 1
  fi
  local base options
  base=$(scripts/find_python.sh)
  options=$(venv_options "$base")
  mkdir -p "$venv"
  touch "$unfinished"
  # shellcheck disable=SC2086  # no option at all where there is none
  step "Making $venv with $base${options:+, on top of its torch} (10 s)" \
    "Can $base make environments? On Debian and Ubuntu that is the package python3-venv." \
    "$base" -m venv $options "$venv"
}

# pip writes INSTALLER last: without it a package was cut short (no torchrun, say), yet pip would take it for complete.
forget_torn_packages() {
  "$python" - <<'END'
import shutil, sysconfig
from pathlib import Path

for folder in Path(sysconfig.get_path("purelib")).glob("*.dist-info"):
    if not (folder / "INSTALLER").exists():
        print("cut short, will be installed again:", folder.name)
        shutil.rmtree(folder)
END
}

install_torch() {
  local kept choice
  kept=$("$python" scripts/choose_torch.py installed)
  if [ -n "$kept" ]; then
    echo "Keeping torch $kept."
  else
    choice=$("$python" scripts/choose_torch.py choose 2>>"$log") || fail "$network_advice"
    step "Installing $(tail -n 1 <<<"$choice")" "$network_advice" pip_install "$(head -n 1 <<<"$choice")"
  fi
  "$python" scripts/choose_torch.py constrain >"$constraints"
}

# The user's file; else a wheel, which stays in VENV. From that file alone, then what it needs.
install_fairseq() {
  if [ -z "${FAIRSEQ_WHEEL:-}" ] && ! has_fairseq && [ -z "$(ls "$fairseq_folder" 2>/dev/null)" ]; then
    "$python" -m pip wheel --no-deps --no-build-isolation --wheel-dir "$fairseq_folder" "$fairseq" || return
    "$python" scripts/keep_fairseq.py note "$fairseq_folder" || return
  fi
  if [ -n "${FAIRSEQ_WHEEL:-}" ] || ! has_fairseq; then
    pip_install --isolated --no-deps --no-index --no-build-isolation --force-reinstall \
      --find-links "$fairseq_folder" "$fairseq" || return
  fi
  pip_install --no-build-isolation --constraint "$constraints" "$fairseq"
}

has_fairseq() {
  "$python" -c 'import sys; from importlib.metadata import version; sys.exit(version("fairseq-fixed") != sys.argv[1])' \
    "${fairseq#*==}" 2>/dev/null
}

network_advice="If the network failed, run 'make setup' again. For proxies and mirrors there are pip's own settings."
build_advice="$network_advice
Where fairseq is compiled, it needs a C++ compiler and Python.h (Debian, Ubuntu: apt install g++ python3-dev)."

is_environment || make_environment
if ! "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))'; then
  echo "$venv has $("$python" --version), but 3.11 to 3.14 is needed: give another VENV." >&2
  exit 1
fi
with_fairseq=${FAIRSEQ_WHEEL:-$("$python" -c 'import sys; print("yes" * (sys.version_info < (3, 13)))')}
if [ -n "${FAIRSEQ_WHEEL:-}" ]; then "$python" scripts/keep_fairseq.py take "$FAIRSEQ_WHEEL" "$fairseq_folder"; fi
if [ -e "$unfinished" ]; then forget_torn_packages >>"$log"; fi
touch "$unfinished"

step "Installing build tools (15 s)" "$network_advice" \
  pip_install cython "numpy>=2.0,<3" packaging "setuptools>=77.0.3,<81" wheel
install_torch
# fairseq's build needs torch. In the isolated environment that pip builds in otherwise, it would download another one.
if [ -n "$with_fairseq" ]; then
  step "Installing fairseq (3 minutes where it has to be compiled)" "$build_advice" install_fairseq
fi
step "Installing the other packages (1 minute)" "$network_advice" \
  pip_install --no-build-isolation --constraint "$constraints" --editable '.[test,corpus,cluster,bench,huggingface,docs]'
# A CPU build of torch brings no triton, whose interpreter runs a GPU's kernels in tests.
"$python" -c 'import triton' 2>/dev/null ||
  step "Installing triton's interpreter (15 s)" "$network_advice" \
    pip_install --no-build-isolation --constraint "$constraints" --editable '.[interpreter]'
# fairseq-fixed lists torchaudio for its speech tasks. Beside a CPU build of torch it fails to load, and with it
# transformers, which imports it wherever it is.
"$python" -c 'import importlib.util as of; of.find_spec("torchaudio") is None or __import__("torchaudio")' \
  >>"$log" 2>&1 ||
  step "Leaving out torchaudio, which this torch cannot load (1 s)" "$network_advice" \
    "$python" -m pip uninstall --yes torchaudio
step "Checking that all of it can be imported (15 s)" \
  "Remove $venv (unless it is an environment of yours) and run 'make setup' again." \
  "$python" -c "import ${with_fairseq:+fairseq, }sacremoses, sentencepiece, spacy, torch, transformers.models.bert"

rm -f "$unfinished"
misfit=$("$python" -m lazyformer_fairseq.executors.torch_builds 2>>"$log") || true
[ -z "$misfit" ] || printf '\nWARNING: %s\n\n' "$misfit" >&2
if [ -z "$with_fairseq" ] && ! has_fairseq; then
  echo "$("$python" --version) has no fairseq: what trains by fairseq-train needs 3.11 or 3.12. All else works."
elif [ -z "${FAIRSEQ_WHEEL:-}" ] && [ -e "$fairseq_folder" ]; then
  echo "fairseq's wheel and its SHA-256 are in $fairseq_folder. Keep copies: make setup FAIRSEQ_WHEEL=COPY needs no index."
fi
echo "Ready: $venv ($("$python" --version), torch $("$python" scripts/choose_torch.py installed))."
