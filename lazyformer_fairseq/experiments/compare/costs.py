"""What the models of a comparison cost: parameters, FLOPs and memory of training; and what their use costs."""

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn
from tqdm import tqdm

from lazyformer_fairseq.experiments.compare.contestants import Contestant
from lazyformer_fairseq.experiments.compare.jobs import Job
from lazyformer_fairseq.experiments.compare.tasks.interface import ComparedTask
from lazyformer_fairseq.measure.costs.peak_memory import peak_memory
from lazyformer_fairseq.measure.stepwise import StepwiseTraining
from lazyformer_fairseq.modules.networks.adaptive_softmax import Band

UPDATES = 2  # the second one has the optimizer's state beside it


def measure_costs(
    compared: ComparedTask, contestants: Mapping[str, Contestant], trained: Mapping[str, Job]
) -> dict[str, dict[str, Any]]:
    """By entry what :func:`_of_training` and the task's `costs_of_use` find.

    Args:
        trained: by entry, a job that is over.
    """
    of_training = {
        name: _of_training(compared, contestant)
        for name, contestant in tqdm(contestants.items(), desc="memory", unit=" models", leave=False)
    }
    of_use = compared.costs_of_use(trained)
    return {entry: of_training[job.contestant.name] | of_use.get(entry, {}) for entry, job in trained.items()}


def _of_training(compared: ComparedTask, contestant: Contestant) -> dict[str, Any]:
    """`parameters`, `parameters_without_embeddings`, `flops_per_update`, `peak_memory_bytes`.

    The peak is of two updates: weights, gradients, the optimizer's state, and what the backward pass keeps.
    """
    settings, made = compared.settings, []

    def two_updates() -> None:
        command = compared.command(contestant, settings.seeds[0], settings.rates[0], UPDATES)
        made.append(StepwiseTraining(command, Path(folder)))
        for _ in range(UPDATES):
            made[0].update()

    with TemporaryDirectory() as folder:
        peak = peak_memory(two_updates, settings.device)
    (training,) = made
    model = training.trainer.model
    return {
        "parameters": training.parameters,
        "parameters_without_embeddings": training.parameters - _in_embeddings(model),
        "flops_per_update": compared.flops_of_update(contestant, len(training.task.source_dictionary)),
        "peak_memory_bytes": peak,
    }


def _in_embeddings(model: nn.Module) -> int:
    """Parameters of tables: of words (also where the head shares them), positions, token types."""
    tables = [module for module in model.modules() if isinstance(module, (nn.Embedding, Band))]
    return sum({id(weight): weight.numel() for table in tables for weight in table.parameters()}.values())
