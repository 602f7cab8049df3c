"""Two processes that share an update train as one that makes it of twice the batches."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lazyformer_fairseq.modules.networks.options import options_of_arch
from lazyformer_fairseq.training.loop import CHECKPOINT, TrainingLoop
from lazyformer_fairseq.training.objectives.interface import Objective
from lazyformer_fairseq.training.objectives.masked_lm import MaskedLMObjective
from lazyformer_fairseq.training.objectives.network import Network
from lazyformer_fairseq.training.objectives.stream_lm import StreamLMObjective
from lazyformer_fairseq.training.optimization import OptimizationConfig
from lazyformer_fairseq.training.run_record import read_run

ROOT = Path(__file__).resolve().parents[2]  # what helpers.py imports, each process would import
UPDATES = 12  # more than an epoch of either
NO_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}


def objective_of(what: str, data: str) -> Objective:
    if what == "masked":
        network = Network(options_of_arch("bert_tiny", max_positions=32, **NO_DROPOUT))
        return MaskedLMObjective(network, data, 4, 1, UPDATES, {"tokens_per_sample": 32})
    cutoff = {"mem_len": 5, "adaptive_softmax_cutoff": "20"}
    network = Network(options_of_arch("transformer_xl_tiny", **cutoff, **NO_DROPOUT))
    return StreamLMObjective(network, data, 2, 1, {"tgt_len": 6})


def train(what: str, data: str, folder: Path, update_freq: int, updates: int = UPDATES) -> TrainingLoop:
    optimization = OptimizationConfig(UPDATES, 1e-2, clip_norm=0.5, update_freq=update_freq)
    training = TrainingLoop(objective_of(what, data), optimization, folder)
    for _ in range(training.updates, updates):
        training.update()
    training.save()
    return training


def train_in_two(python: Path, what: str, data: Path, folder: Path, updates: int) -> None:
    """Run this file twice, as torchrun would."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20_000 + os.getpid() % 10_000)}
    command = [python, __file__, what, str(data), str(folder), str(updates)]
    processes = [subprocess.Popen(command, env={**environment, "RANK": str(rank)}) for rank in range(2)]
    assert [process.wait(timeout=600) for process in processes] == [0, 0]


@pytest.mark.parametrize("what", ["masked", pytest.param("streams", marks=pytest.mark.slow)])
def test_two_processes_train_as_one_with_twice_the_update_frequency(what, data_folder, lm_data, tmp_path, warm_python):
    data = data_folder if what == "masked" else lm_data
    for updates in (UPDATES // 2, UPDATES):  # the second ones resume
        train_in_two(warm_python / "python", what, data, tmp_path / "two", updates)
    record = read_run(tmp_path / "two")
    tasks = {"masked": "full_sentences_masked_lm", "streams": "stream_language_modeling"}
    assert (record.processes, record.task["name"]) == (2, tasks[what])
    two = torch.load(tmp_path / "two" / CHECKPOINT, weights_only=True)
    assert two["optimizer_history"][-1]["num_updates"] == UPDATES
    if what == "streams":  # whose rows two processes read side by side: one process reads them all at once
        objective = objective_of(what, str(data))
        objective.batch_size *= 2
        whole = TrainingLoop(objective, OptimizationConfig(UPDATES, 1e-2, clip_norm=0.5), tmp_path / "one")
        for _ in range(UPDATES):
            whole.update()
    else:
        whole = train(what, str(data), tmp_path / "one", update_freq=2)
    for name, weight in whole.model.state_dict().items():
        assert torch.allclose(two["model"][name], weight, atol=1e-5), name


if __name__ == "__main__":
    name, data, folder, updates = sys.argv[1:]
    train(name, data, Path(folder), update_freq=1, updates=int(updates))
