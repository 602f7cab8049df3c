"""All processes of a run start from the same file, or stop together."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from fairseq.distributed import utils as distributed_utils
from fairseq_plugin.reliability.damaged_files import flip_a_bit
from helpers import ROOT

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.reliability import checkpoints


@pytest.mark.parametrize(
    ("told", "seen", "words"),
    [
        ((None, "run: holds no intact checkpoint"), [True, True], "run: holds no intact checkpoint"),
        ((Path("checkpoint_last.pt"), None), [True, False], r"processes \[1\] cannot read it; all nodes need the same"),
    ],
)
def test_the_second_process_hears_of_the_problem(told, seen, words):
    trainer = SimpleNamespace(
        data_parallel_rank=1, data_parallel_world_size=2, data_parallel_process_group=None, device=torch.device("cpu")
    )
    doubles = {"broadcast_object": lambda *_: told, "all_gather_list": lambda *_: seen}
    with mock.patch.multiple(distributed_utils, **doubles), pytest.raises(UserError, match=words):
        checkpoints._same_on_all_ranks(trainer, mock.Mock(side_effect=AssertionError("the first one chooses")))


@pytest.mark.slow
@pytest.mark.reliability
def test_two_processes_with_damaged_checkpoints(data_folder, tmp_path, free_port):
    folder = tmp_path / "run"

    def train(updates: int) -> subprocess.CompletedProcess:
        command = [
            *("bash", str(ROOT / "scripts" / "pretrain.sh"), "lazyformer_m2x6_s_tiny", str(data_folder)),
            *("--gpus", "2", "--sequences-per-update", "8", "--master", f"127.0.0.1:{free_port}"),
            *f"--tokens-per-sample 32 --num-workers 0 --save-interval-updates 2 --max-update {updates}".split(),
            *("--save-dir", str(folder)),
        ]
        environment = {**os.environ, "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"}
        return subprocess.run(command, capture_output=True, text=True, env=environment)

    run = train(4)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    for name in ("checkpoint_last.pt", "checkpoint_best.pt", "checkpoint_1_4.pt"):
        flip_a_bit(folder / name)
    run = train(5)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    assert f"newest intact checkpoint: {folder / 'checkpoint_1_2.pt'}, update 2" in run.stdout + run.stderr
    resumed = torch.load(folder / "checkpoint_last.pt")
    assert [part["num_updates"] for part in resumed["optimizer_history"]] == [2, 5]

    for path in folder.glob("checkpoint*.pt"):
        flip_a_bit(path)
    run = train(6)
    assert run.returncode != 0
    assert run.stderr.count("holds no intact checkpoint") >= 1 and "checkpoint_1_2.pt: truncated" in run.stderr
