#!/usr/bin/env bash
# Pre-trains one arch by the paper's Table 5 (LazyFormer), on the GPUs there are; several, or several nodes, through
# torchrun.
set -euo pipefail

usage() {
  cat <<'HELP'
usage: scripts/pretrain.sh ARCH DATA [options of this script] [options of fairseq-train]

Pre-trains ARCH (lazyformer_m2x6_s, bert_base, par_bert_base, ...) on DATA, a folder of binarised data or several as
a:b:c, in the setting of LazyFormer's Table 5: 1,000,000 updates of 256 sequences of 512 tokens, Adam (0.9, 0.999),
epsilon 1e-6, peak rate 1e-4, 1% warm-up, linear decay to zero, clip 1.0, dropout 0.1, weight decay 0.01.
Runs in bf16 where the GPUs have it, else in fp16, on a CPU in fp32. Run again, it resumes from its last checkpoint.
Any option of fairseq-train may follow and wins: --max-update 1000, --save-dir DIR, --sublayer-pattern '(sff)x5 (f)x9'.

options of this script (defaults in brackets)
  --gpus N                processes on this node [its GPUs, or 1 process on the CPU]
  --nodes N               nodes [1]; start the script on each
  --node-rank R           number of this node, from 0 [0]
  --master HOST:PORT      node 0 [127.0.0.1:29500]
  --sequences-per-gpu N   in one forward pass [16; 4 on a CPU]; as many as fit the memory
  --sequences-per-update N   [256]; must be a multiple of nodes x gpus
  --fp16, --bf16, --fp32  [what the GPUs have, see above]
  --dry-run               print the command, run nothing
  --help
HELP
}

fail() {
  echo "error: $*" >&2
  exit 2
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

if [[ " $* " == *" --help "* || $# -eq 0 ]]; then
  usage
  exit 0
fi
[[ $# -ge 2 && $1 != -* && $2 != -* ]] || fail "give ARCH and DATA first; see scripts/pretrain.sh --help"
arch=$1 data=$2
shift 2

gpus='' nodes=1 node_rank=0 master=127.0.0.1:29500 per_gpu='' per_update=256 precision='' dry_run=''
fairseq_options=()
while [[ $# -gt 0 ]]; do
  case $1 in
  --gpus | --nodes | --node-rank | --master | --sequences-per-gpu | --sequences-per-update)
    [[ $# -ge 2 ]] || fail "$1 needs a value"
    if [[ $1 == --master ]]; then
      [[ $2 =~ ^.+:[0-9]+$ ]] || fail "$1 $2: give HOST:PORT"
    else
      [[ $2 =~ ^(0|[1-9][0-9]{0,8})$ ]] || fail "$1 $2: give a whole number"
    fi
    case $1 in
    --gpus) gpus=$2 ;;
    --nodes) nodes=$2 ;;
    --node-rank) node_rank=$2 ;;
    --master) master=$2 ;;
    --sequences-per-gpu) per_gpu=$2 ;;
    --sequences-per-update) per_update=$2 ;;
    esac
    shift 2
    ;;
  --fp16 | --bf16 | --fp32) precision=${1#--} && shift ;;
  --dry-run) dry_run=yes && shift ;;
  *) fairseq_options+=("$1") && shift ;;
  esac
done

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
[[ $per_update -gt 0 && $((per_update % world)) -eq 0 ]] ||
  fail "$per_update sequences an update do not divide among $world processes; give --sequences-per-update N"
share=$((per_update / world)) # of one process
per_gpu=${per_gpu:-$((found > 0 ? 16 : 4))}
[[ $per_gpu -gt 0 ]] || fail "--sequences-per-gpu 0: give at least 1"
while [[ $((share % per_gpu)) -ne 0 ]]; do per_gpu=$((per_gpu - 1)); done
update_freq=$((share / per_gpu))

root=$(cd "$(dirname "$0")/.." && pwd)
python=python3
[[ ! -x $root/.venv/bin/python ]] || python=$root/.venv/bin/python

launch=("$python") # one process needs no launcher
if [[ $world -gt 1 ]]; then
  launch+=(
    -m torch.distributed.run --nnodes "$nodes" --node-rank "$node_rank" --nproc-per-node "$processes"
    --master-addr "${master%:*}" --master-port "${master##*:}"
  )
fi
command=(
  "${launch[@]}" -m fairseq_cli.train "$data"
  --user-dir "$root/lazyformer_fairseq" --task full_sentences_masked_lm --tokens-per-sample 512
  --arch "$arch" --criterion masked_lm_accuracy
  --optimizer fused_adam --adam-betas '(0.9, 0.999)' --adam-eps 1e-6 --weight-decay 0.01 --clip-norm 1.0
  --lr-scheduler linear_warmup --lr 1e-4 --warmup-ratio 0.01 --max-update 1000000
  --batch-size "$per_gpu" --required-batch-size-multiple 1 --update-freq "$update_freq"
  --distributed-world-size "$world" "${device_options[@]}"
  --save-dir "checkpoints/$arch" --save-interval-updates 50000 --no-epoch-checkpoints
  --num-workers 2 --log-format simple --log-interval 100 --seed 1
  "${fairseq_options[@]}"
)
echo "an update is $per_update sequences: $world processes x $per_gpu sequences x update-freq $update_freq" >&2
if [[ -n $dry_run ]]; then
  printf '%q ' "${command[@]}"
  echo
  exit 0
fi
exec "${command[@]}"
