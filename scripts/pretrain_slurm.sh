#!/usr/bin/env bash
# Pre-trains under Slurm, on one GPU, on the eight GPUs of a node, or on several nodes. A requeued job resumes.
#SBATCH --job-name=lazyformer
#SBATCH --nodes=1
#SBATCH --gpus-per-node=8
# scripts/pretrain.sh starts one process per GPU.
#SBATCH --ntasks-per-node=1
# Slurm requeues the job if a node fails or the job is preempted. This script requeues it after a signal.
#SBATCH --requeue
#SBATCH --open-mode=append
# Send a signal five minutes before the time limit. Without "B:", it goes to srun's tasks, which save, not this shell.
#SBATCH --signal=USR1@300
set -euo pipefail

usage() {
  cat <<'HELP'
usage: sbatch [options of sbatch] scripts/pretrain_slurm.sh ARCH DATA [options of scripts/pretrain.sh and fairseq-train]

Runs scripts/pretrain.sh on the nodes and GPUs allocated by Slurm, by default on the 8 GPUs of one node. Submit it from
the repository. DATA and --save-dir must be on a file system that all nodes share.

  sbatch --time=24:00:00 scripts/pretrain_slurm.sh lazyformer_m2x6_s data --save-dir checkpoints/m2x6_s
  sbatch --gpus-per-node=1 scripts/pretrain_slurm.sh bert_base data
  sbatch --nodes=4 --partition=gpu --cpus-per-task=32 scripts/pretrain_slurm.sh lazyformer_m2x6 data

Five minutes before the time limit (to change this, use --signal=USR1@SECONDS), the run saves a checkpoint and the job
is requeued. This repeats until the run is finished. After scancel, the run saves and the job is not requeued. All
starts log to the same file, slurm-JOB.out.
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
script=$SLURM_SUBMIT_DIR/scripts/pretrain.sh # Slurm runs a copy of this file in another folder
[[ -x $script ]] || fail "$SLURM_SUBMIT_DIR has no scripts/pretrain.sh; submit the job from the repository"

read -r first_node < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
port=$((20000 + SLURM_JOB_ID % 10000)) # a different port for each job, in case nodes are shared

# This shell receives SIGTERM from scancel and at the time limit. In both cases the job must not be requeued. Preemption
# also sends SIGTERM, but then Slurm itself requeues the job.
ended=''
trap 'ended=yes' TERM

echo "job $SLURM_JOB_ID, start $((${SLURM_RESTART_COUNT:-0} + 1)): nodes $SLURM_JOB_NODELIST" >&2
status=0
# All nodes end at almost the same time. The node that ends first must not cause the others to be killed.
srun --kill-on-bad-exit=0 --wait=120 ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} \
  bash -c 'exec "$@" --node-rank "$SLURM_NODEID"' - \
  "$script" "$@" --nodes "$SLURM_NNODES" --master "$first_node:$port" || status=$?

# 75: the run saved after a signal. 138: USR1 arrived before there was anything to save.
if [[ $status =~ ^(75|138)$ && -z $ended ]]; then
  echo "job $SLURM_JOB_ID: saved, and requeued" >&2
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
