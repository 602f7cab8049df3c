# shellcheck shell=bash
# What the scripts that train share: the options of a launch, the GPUs of this machine, the command that starts
# fairseq-train on them. To be sourced; each function says what it sets. Callers run under `set -euo pipefail`.

gpus='' nodes=1 node_rank=0 master=127.0.0.1:29500 max_restarts='' precision='' dry_run=''

launch_help() {
  cat <<'HELP'
  --gpus N                processes on this node [its GPUs, or 1 process on the CPU]
  --nodes N               nodes [1]; start the script on each. All see the same DATA and --save-dir
  --node-rank R           number of this node, from 0 [0]
  --master HOST:PORT      node 0, where there are several [127.0.0.1:29500]
  --max-restarts N        times that all processes start again, from the last checkpoint, when one dies
                          [3; 0 where there is only one process]
  --fp16, --bf16, --fp32  [bf16 where the GPUs have it, else fp16; fp32 on a CPU]
  --dry-run               print the command, run nothing
  --help

SIGTERM or SIGUSR1 to the script: it saves after the update under way and exits with code 75; run again, it goes on.
HELP
}

fail() {
  echo "error: $*" >&2
  exit 2
}

is_whole_number() { [[ $1 =~ ^(0|[1-9][0-9]{0,8})$ ]]; }

# take_launch_option "$@": reads the first option if it is one of a launch. Sets $taken, the words that it took, or 0.
take_launch_option() {
  taken=2
  case $1 in
  --gpus | --nodes | --node-rank | --max-restarts)
    [[ $# -ge 2 ]] || fail "$1 needs a value"
    is_whole_number "$2" || fail "$1 $2: give a whole number"
    case $1 in
    --gpus) gpus=$2 ;;
    --nodes) nodes=$2 ;;
    --node-rank) node_rank=$2 ;;
    --max-restarts) max_restarts=$2 ;;
    esac
    ;;
  --master)
    [[ $# -ge 2 ]] || fail "$1 needs a value"
    [[ $2 =~ ^.+:[0-9]+$ ]] || fail "$1 $2: give HOST:PORT"
    master=$2
    ;;
  --fp16 | --bf16 | --fp32) precision=${1#--} taken=1 ;;
  --dry-run) dry_run=yes taken=1 ;;
  *) taken=0 ;;
  esac
}

# take_options WHAT "$@": all options after ARCH and DATA. An update consists of so many WHAT, such as "rows". Sets
# $per_gpu and $per_update where they are given, and the array fairseq_options.
take_options() {
  local what=$1
  shift
  fairseq_options=()
  while [[ $# -gt 0 ]]; do
    take_launch_option "$@"
    if [[ $taken -eq 0 && $1 =~ ^--$what-per-(gpu|update)$ ]]; then
      [[ $# -ge 2 ]] || fail "$1 needs a value"
      is_whole_number "$2" || fail "$1 $2: give a whole number"
      if [[ $1 == *-gpu ]]; then per_gpu=$2; else per_update=$2; fi
      taken=2
    elif [[ $taken -eq 0 ]]; then
      fairseq_options+=("$1") taken=1
    fi
    shift "$taken"
  done
}

# settle_batches WHAT: lowers $per_gpu until an update can be made of such batches. Sets $update_freq, batches of a
# process in an update.
settle_batches() {
  [[ $per_update -gt 0 && $((per_update % world)) -eq 0 ]] ||
    fail "$per_update $1 an update do not divide among $world processes; give --$1-per-update N"
  [[ $per_gpu -gt 0 ]] || fail "--$1-per-gpu 0: give at least 1"
  local share=$((per_update / world)) # of one process
  while [[ $((share % per_gpu)) -ne 0 ]]; do per_gpu=$((per_gpu - 1)); done
  update_freq=$((share / per_gpu))
}

# Those that torch will see: nvidia-smi knows nothing of CUDA_VISIBLE_DEVICES.
count_gpus() {
  if ! nvidia-smi -L >/dev/null 2>&1; then
    echo 0
  elif [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
    tr , '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c . || true
  else
    nvidia-smi -L | grep -c '^GPU'
  fi
}

# bf16 came with compute capability 8.0. Old drivers cannot tell it.
has_bf16() {
  local lowest
  lowest=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | sort -V | head -n 1 | cut -d . -f 1)
  [[ $lowest =~ ^[0-9]+$ && $lowest -ge 8 ]]
}

# Sets $found (GPUs of this node), $processes (of this node), $world (of all nodes), and the array device_options.
settle_devices() {
  found=$(count_gpus)
  device_options=()
  if [[ $found -gt 0 ]]; then
    if [[ -z $precision ]]; then if has_bf16; then precision=bf16; else precision=fp16; fi; fi
  else
    device_options=(--cpu --distributed-backend gloo --ddp-backend legacy_ddp)
  fi
  [[ ${precision:-fp32} == fp32 ]] || device_options+=("--$precision")
  processes=${gpus:-$((found > 0 ? found : 1))}
  world=$((nodes * processes))
  [[ $world -gt 0 ]] || fail "--nodes $nodes --gpus $processes: at least one process is needed"
  [[ $found -eq 0 || $processes -le $found ]] || fail "--gpus $processes: this node has $found; give as many at most"
  [[ $node_rank -lt $nodes ]] || fail "--node-rank $node_rank: --nodes $nodes are numbered from 0 to $((nodes - 1))"
}

# Sets the array launch, what stands before the module that trains, and $root, the project's folder.
settle_launcher() {
  root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
  local python=python3
  [[ ! -x $root/.venv/bin/python ]] || python=$root/.venv/bin/python
  launch=("$python")
  max_restarts=${max_restarts:-$((world > 1 ? 3 : 0))}
  [[ $world -gt 1 || $max_restarts -gt 0 ]] || return 0 # no launcher is needed
  launch+=(-m lazyformer_fairseq.reliability.signals.torchrun --nnodes "$nodes" --nproc-per-node "$processes")
  if [[ $nodes -eq 1 ]]; then # on any port that is free
    launch+=(--rdzv-backend c10d --rdzv-endpoint 127.0.0.1:0 --local-addr 127.0.0.1)
  else
    launch+=(--rdzv-backend c10d --rdzv-endpoint "$master" --rdzv-id lazyformer)
    launch+=(--rdzv-conf "is_host=$((node_rank == 0))")
  fi
  launch+=(--max-restarts "$max_restarts")
}

# run_or_print COMMAND...: what --dry-run decides. The script becomes the command, so that signals reach it.
run_or_print() {
  if [[ -n $dry_run ]]; then
    printf '%q ' "$@"
    echo
    exit 0
  fi
  exec "$@"
}
