"""scripts/pretrain_slurm.sh under stand-ins of Slurm's commands: what it runs, and when the job comes again."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers import ROOT, assert_equal_state, run_script, write_program

SCRIPT = ROOT / "scripts" / "pretrain_slurm.sh"

# Runs a copy, as Slurm does, again and again while somebody asks for it. Says who the shell is.
SBATCH = """set -euo pipefail
script=$1
shift
export SLURM_JOB_ID=4321 SLURM_SUBMIT_DIR=$PWD SLURM_JOB_NODELIST="node[0-$((SLURM_NNODES - 1))]" SLURM_RESTART_COUNT=0
cp "$script" "$STATE/slurm_script"
while :; do
  rm -f "$STATE/requeued"
  bash "$STATE/slurm_script" "$@" &
  echo $! >"$STATE/shell"
  status=0
  wait $! || status=$?
  [[ -e $STATE/requeued ]] || exit $status
  SLURM_RESTART_COUNT=$((SLURM_RESTART_COUNT + 1))
done
"""
# A task a node, side by side; the highest exit code of all. Says which processes Slurm would send a signal.
SRUN = """set -euo pipefail
while [[ $1 == --* ]]; do shift; done
rm -f "$STATE/tasks"
for ((node = 0; node < SLURM_NNODES; node++)); do
  SLURM_NODEID=$node "$@" &
  echo $! >>"$STATE/tasks"
done
highest=0
for task in $(cat "$STATE/tasks"); do
  status=0
  wait "$task" || status=$?
  ((status <= highest)) || highest=$status
done
exit $highest
"""
SCONTROL = """set -euo pipefail
case $1 in
requeue) touch "$STATE/requeued" ;;
show) for ((node = 0; node < SLURM_NNODES; node++)); do echo 127.0.0.1; done ;;
esac
"""
# In the place of scripts/pretrain.sh: ends with the codes it is told, one a start.
PRETRAIN = """set -euo pipefail
echo "$@" >>"$STATE/calls"
trap 'exit 75' TERM
[[ $1 != waits ]] || touch "$STATE/started"
while [[ $1 == waits ]]; do sleep 0.05; done
exit "$(sed -n "$((SLURM_RESTART_COUNT + 1))p" "$STATE/codes")"
"""


@pytest.fixture
def slurm(tmp_path):
    """``slurm(folder, nodes, ...)``: submits from a folder. Returns the process of sbatch, which waits for the job."""
    for name, text in {"sbatch": SBATCH, "srun": SRUN, "scontrol": SCONTROL}.items():
        write_program(tmp_path / "bin" / name, text)

    def submit(folder: Path, nodes: int, *arguments: str) -> subprocess.Popen:
        path = ":".join(map(str, (tmp_path / "bin", Path(sys.executable).parent, os.environ["PATH"])))
        environment = {**os.environ, "PATH": path, "STATE": str(tmp_path), "SLURM_NNODES": str(nodes)}
        environment.pop("CUDA_VISIBLE_DEVICES", None)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(["sbatch", str(SCRIPT), *map(str, arguments)], cwd=folder, env=environment, **pipes)

    return submit


@pytest.fixture
def project(tmp_path) -> Path:
    """A project whose scripts/pretrain.sh is a stand-in, too."""
    write_program(tmp_path / "project" / "scripts" / "pretrain.sh", PRETRAIN)
    return tmp_path / "project"


@pytest.mark.parametrize(
    ("codes", "starts"), [("0", 1), ("75 75 0", 3), ("138 0", 2), ("75 1", 2), ("1", 1), ("143", 1)]
)
def test_the_job_comes_again_when_it_has_saved_for_a_signal(slurm, project, tmp_path, codes, starts):
    (tmp_path / "codes").write_text("\n".join(codes.split()))
    job = slurm(project, 2, "bert_base", "my data", "--save-dir", "a b")
    output, _ = job.communicate()
    assert job.returncode == int(codes.split()[-1]), output
    calls = (tmp_path / "calls").read_text().splitlines()
    shared = "bert_base my data --save-dir a b --nodes 2 --master 127.0.0.1:24321 --node-rank"
    assert sorted(calls) == sorted([f"{shared} 0", f"{shared} 1"] * starts)
    assert f"job 4321, start {starts}" in output


def test_a_cancelled_job_does_not_come_again(slurm, project, tmp_path):
    job = slurm(project, 1, "waits", "data")
    while not (tmp_path / "started").exists():
        assert job.poll() is None
        time.sleep(0.05)
    for pid in (tmp_path / "shell", tmp_path / "tasks"):  # scancel sends it to the shell and to the tasks
        os.kill(int(pid.read_text()), signal.SIGTERM)
    job.communicate()
    assert job.returncode == 75 and not (tmp_path / "requeued").exists()


def test_what_sbatch_reads_and_what_the_script_says_without_it():
    options = re.findall(r"^#SBATCH (.*)", SCRIPT.read_text(), re.MULTILINE)
    assert {"--requeue", "--open-mode=append", "--signal=USR1@300", "--ntasks-per-node=1"} <= set(options)
    assert {"--nodes=1", "--gpus-per-node=8"} <= set(options)  # the paper's run
    assert SCRIPT.read_text().rindex("#SBATCH") < SCRIPT.read_text().index("set -e")  # sbatch reads no further
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    for more, message in (
        ({}, "error: start it with sbatch, or use scripts/pretrain.sh"),
        ({"SLURM_JOB_ID": "1", "SLURM_SUBMIT_DIR": "/"}, "submit the job from the repository"),
    ):
        run = run_script(SCRIPT.name, "bert_base", "data", env={**kept, **more})
        assert run.returncode == 2 and message in run.stderr
    run = run_script(SCRIPT.name, "--help")
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.startswith("usage: sbatch [options of sbatch] scripts/pretrain_slurm.sh ARCH DATA")


@pytest.mark.slow
@pytest.mark.reliability
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_requeued_job_ends_as_one_that_was_not(slurm, data_folder, tmp_path, nodes):
    options = (
        "--gpus 1 --sequences-per-update 8 --sequences-per-gpu 4 --sublayer-pattern M2 --tokens-per-sample 32 "
        "--num-workers 0 --max-update 12 --log-interval 1 --log-seconds 0 --disable-validation --lr 1e-3"
    ).split()

    def train(folder: str, signals: int) -> dict:
        job = slurm(ROOT, nodes, "bert_tiny", data_folder, "--save-dir", tmp_path / folder, *options)
        output = []
        with job:
            for line in job.stdout:
                output.append(line)
                if signals and "num_updates=4," in line:
                    signals -= 1
                    for task in (tmp_path / "tasks").read_text().split():  # as --signal=USR1@300 does
                        os.kill(int(task), signal.SIGUSR1)
        text = "".join(output)
        assert job.returncode == 0, text[-3000:]
        assert text.count("saved, and requeued") == (folder == "stopped"), text[-3000:]
        return torch.load(tmp_path / folder / "checkpoint_last.pt")

    whole, stopped = train("whole", 0), train("stopped", 1)
    for part in ("model", "last_optimizer_state"):
        assert_equal_state(stopped[part], whole[part], part)
