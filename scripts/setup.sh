#!/usr/bin/env bash
# Installs the project and its dependencies into an environment: scripts/setup.sh [VENV]   (called by `make setup`)
#
# If VENV does not exist, it is created with $PYTHON; an existing VENV is used as it is. If torch is already installed,
# in VENV or in $PYTHON, it is kept. To configure indexes, proxies and caches, use pip's own settings
# (PIP_EXTRA_INDEX_URL, pip.conf, ...). If the installed torch cannot use the GPUs of this machine, a warning at the end
# names a version that can.
# On Python 3.13 or later, fairseq is installed only if $FAIRSEQ_WHEEL is set to FILE or FILE#sha256=HASH. FILE is a
# wheel or a source archive, and is installed instead of the version on the index.
# Every step skips what is already done, so you can continue an interrupted set-up by running the script again.
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
for file in "$log" "$unfinished" "$constraints"; do # writing to a link would modify its target
  if [ -L "$file" ] || { [ -e "$file" ] && [ -z "$(find "$file" -type f -links 1)" ]; }; then
    echo "$file is a link, or not a regular file; remove it." >&2
    exit 1
  fi
done
export PIP_DISABLE_PIP_VERSION_CHECK=1

exec 3>&2 # for the trap, which may run while stderr is redirected to the log
trap 'printf "\nInterrupted. Run \"make setup\" again to continue.\n" >&3; exit 130' INT TERM

# fail ADVICE: print the end of the log and what to do, and exit.
fail() {
  printf '\nFAILED. The last lines of %s:\n' "$log" >&2
  tail -n 15 "$log" | cut -c -300 >&2
  printf '\n%s\n' "$1" >&2
  exit 1
}

# step TEXT ADVICE COMMAND...: run the command with its output in the log, and print a single line.
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

# Check whether packages can be installed into VENV. A user's environment may lack pip, which is then installed. If an
# unfinished environment of ours lacks pip, its creation was interrupted.
is_environment() {
  "$python" -m pip --version >/dev/null 2>&1 || { [ ! -e "$unfinished" ] && "$python" -m ensurepip >/dev/null 2>&1; }
}

# Print the options of `python -m venv` for the Python $1. The environment sees the packages of $1 if they include torch.
venv_options() {
  local version prefix
  version=$("$1" scripts/choose_torch.py installed)
  prefix=$("$1" -c 'import sys; print(sys.prefix if sys.prefix != sys.base_prefix else "")')
  if [ -n "$version" ] && [ -n "$prefix" ]; then
    # --system-site-packages would expose the packages of the base Python, not those of this virtual environment.
    echo "Note: to use the environment $prefix with its torch $version, run: make setup VENV=$prefix" >&2
  elif [ -n "$version" ] && "$1" -c 'import torch' 2>/dev/null; then
    echo --system-site-packages
  fi
}

make_environment() {
  if [ -d "$venv" ] && [ ! -e "$unfinished" ] && [ ! -e "$venv/pyvenv.cfg" ] && [ -n "$(ls -A "$venv")" ]; then
    echo "$venv is not empty and not a Python environment; use another VENV." >&2
    exit 1
  fi
  local base options
  base=$(scripts/find_python.sh)
  options=$(venv_options "$base")
  mkdir -p "$venv"
  touch "$unfinished"
  # shellcheck disable=SC2086  # without options there must be no argument
  step "Creating $venv with $base${options:+ and its torch} (10 s)" \
    "Check that $base can create environments. On Debian and Ubuntu, this requires the package python3-venv." \
    "$base" -m venv $options "$venv"
}

# pip writes INSTALLER last. If a package lacks this file, its installation was interrupted (so that torchrun may be
# missing, for example), but pip would consider the package installed.
forget_torn_packages() {
  "$python" - <<'END'
import shutil, sysconfig
from pathlib import Path

for folder in Path(sysconfig.get_path("purelib")).glob("*.dist-info"):
    if not (folder / "INSTALLER").exists():
        print("installation was interrupted, will be repeated:", folder.name)
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

# Install fairseq from the user's file or from a wheel that is built and kept in VENV; then install its dependencies.
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

network_advice="If the network failed, run 'make setup' again. To use proxies or mirrors, configure pip."
build_advice="$network_advice
Compiling fairseq requires a C++ compiler and Python.h (Debian, Ubuntu: apt install g++ python3-dev)."

is_environment || make_environment
if ! "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))'; then
  echo "$venv has $("$python" --version), but 3.11 to 3.14 is required; use another VENV." >&2
  exit 1
fi
with_fairseq=${FAIRSEQ_WHEEL:-$("$python" -c 'import sys; print("yes" * (sys.version_info < (3, 13)))')}
if [ -n "${FAIRSEQ_WHEEL:-}" ]; then "$python" scripts/keep_fairseq.py take "$FAIRSEQ_WHEEL" "$fairseq_folder"; fi
if [ -e "$unfinished" ]; then forget_torn_packages >>"$log"; fi
touch "$unfinished"

step "Installing build tools (15 s)" "$network_advice" \
  pip_install cython "numpy>=2.0,<3" packaging "setuptools>=77.0.3,<81" wheel
install_torch
# Building fairseq requires torch. With build isolation, pip would download another copy.
if [ -n "$with_fairseq" ]; then
  step "Installing fairseq (3 minutes if it has to be compiled)" "$build_advice" install_fairseq
fi
step "Installing the other packages (1 minute)" "$network_advice" \
  pip_install --no-build-isolation --constraint "$constraints" --editable '.[test,corpus,cluster,bench,huggingface,docs]'
# CPU builds of torch do not include triton, whose interpreter runs the GPU kernels in tests.
"$python" -c 'import triton' 2>/dev/null ||
  step "Installing triton's interpreter (15 s)" "$network_advice" \
    pip_install --no-build-isolation --constraint "$constraints" --editable '.[interpreter]'
# fairseq-fixed requires torchaudio for its speech tasks. With a CPU build of torch, torchaudio fails to load, and then
# transformers fails too, because it imports torchaudio whenever that is installed.
"$python" -c 'import importlib.util as of; of.find_spec("torchaudio") is None or __import__("torchaudio")' \
  >>"$log" 2>&1 ||
  step "Removing torchaudio, which does not work with this torch (1 s)" "$network_advice" \
    "$python" -m pip uninstall --yes torchaudio
step "Checking that all packages can be imported (15 s)" \
  "Remove $venv (unless you created it yourself) and run 'make setup' again." \
  "$python" -c "import ${with_fairseq:+fairseq, }sacremoses, sentencepiece, spacy, torch, transformers.models.bert"

rm -f "$unfinished"
misfit=$("$python" -m lazyformer_fairseq.executors.torch_builds 2>>"$log") || true
[ -z "$misfit" ] || printf '\nWARNING: %s\n\n' "$misfit" >&2
if [ -z "$with_fairseq" ] && ! has_fairseq; then
  echo "$("$python" --version) does not support fairseq: training with fairseq-train requires Python 3.11 or 3.12."
elif [ -z "${FAIRSEQ_WHEEL:-}" ] && [ -e "$fairseq_folder" ]; then
  echo "fairseq's wheel and its SHA-256 are in $fairseq_folder. To install from a copy: make setup FAIRSEQ_WHEEL=COPY"
fi
echo "Ready: $venv ($("$python" --version), torch $("$python" scripts/choose_torch.py installed))."
