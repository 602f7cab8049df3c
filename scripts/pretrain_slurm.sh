#!/usr/bin/env bash
# Pre-trains under Slurm: on one GPU, the eight of a node, or several nodes. Requeued, it goes on where it was.
#SBATCH --job-name=lazyformer
#SBATCH --nodes=1
#SBATCH --gpus-per-node=8
# scripts/pretrain.sh starts a process a GPU.
#SBATCH --ntasks-per-node=1
# Slurm starts the job again when a node fails, or when it has preempted the job; this script does so after a signal.
#SBATCH --requeue
#SBATCH --open-mode=append
# Five minutes before the time limit. Not B:USR1: it is for the tasks of srun, which save, not for this shell.
#SBATCH --signal=USR1@300
set -euo pipefail

usage() {
  cat <<'HELP'
usage: sbatch [options of sbatch] scripts/pretrain_slurm.sh ARCH DATA [options of scripts/pretrain.sh and fairseq-train]

Runs scripts/pretrain.sh on the nodes and GPUs that Slurm gives: by default 8 GPUs of one node. Submit it from the
project's folder; DATA and --save-dir must be on a file system that all nodes share.

  sbatch --time=24:00:00 scripts/pretrain_slurm.sh lazyformer_m2x6_s data --save-dir checkpoints/m2x6_s
  sbatch --gpus-per-node=1 scripts/pretrain_slurm.sh bert_base data
  sbatch --nodes=4 --partition=gpu --cpus-per-task=32 scripts/pretrain_slurm.sh lazyformer_m2x6 data

Five minutes before the time limit (--signal=USR1@SECONDS for more or fewer) the run saves and the job is requeued, as
often as it takes. After scancel it saves and is gone. The log of all starts is one file, slurm-JOB.out.
HELP
}

fail() {
  echo "error: $*" >&2
  exit 2
}

if [[ " $* " == *" --help "* || $# -eq 0 ]]; then
  usage
  exit 0
fi
[[ -n ${SLURM_JOB_ID:-} ]] || fail "start it with sbatch, or use scripts/pretrain.sh; see scripts/pretrain_slurm.sh --help"
script=$SLURM_SUBMIT_DIR/scripts/pretrain.sh # Slurm runs a copy of this file, which lies elsewhere
[[ -x $script ]] || fail "$SLURM_SUBMIT_DIR: has no scripts/pretrain.sh; submit from the project's folder"

read -r first_node < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
port=$((20000 + SLURM_JOB_ID % 10000)) # another one for each job, should nodes be shared

# Sent to this shell by scancel and at the time limit: then nobody wants the job again. By Slurm's own preemption, too,
# but that requeues by itself.
ended=''
trap 'ended=yes' TERM

echo "job $SLURM_JOB_ID, start $((${SLURM_RESTART_COUNT:-0} + 1)): nodes $SLURM_JOB_NODELIST" >&2
status=0
# All nodes end within moments of each other: a node that ends first must not have the others killed at once.
srun --kill-on-bad-exit=0 --wait=120 ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} \
  bash -c 'exec "$@" --node-rank "$SLURM_NODEID"' - \
  "$script" "$@" --nodes "$SLURM_NNODES" --master "$first_node:$port" || status=$?

# 75: saved for a signal. 138: USR1 came before there was anything to save.
if [[ $status =~ ^(75|138)$ && -z $ended ]]; then
  echo "job $SLURM_JOB_ID: saved, and requeued" >&2
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
