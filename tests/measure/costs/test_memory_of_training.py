"""Memory by formula is what an update of fairseq's trainer takes, weights, gradients and optimizer too."""

import gc

import pytest
import torch
from helpers import ROOT

from lazyformer_fairseq.measure.costs.latency import peak_memory
from lazyformer_fairseq.measure.planning.job import job_of_arch, with_options
from lazyformer_fairseq.measure.stepwise import StepwiseTraining

WIDE = {"encoder_embed_dim": 128, "encoder_ffn_embed_dim": 512, "encoder_attention_heads": 4, "max_positions": 64}


def bytes_of_weights_and_optimizer(trainer) -> int:
    """Weights, and all that the optimizer keeps between updates; gradients that fairseq keeps for it too."""
    optimizer = trainer.optimizer
    masters = list(getattr(optimizer, "fp32_params", ()))
    weights = [weight for weight in trainer.model.parameters() if weight.requires_grad]
    states = [value for state in optimizer.optimizer.state.values() for value in state.values()]
    tensors = [*weights, *masters, *(master.grad for master in masters), *states]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if isinstance(tensor, torch.Tensor))


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_update_of_fairseq(data_folder, tmp_path, precision):
    sizes = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in WIDE.items())
    command = (
        f"--user-dir {ROOT / 'lazyformer_fairseq'} --task full_sentences_masked_lm --tokens-per-sample 64 "
        f"--criterion masked_lm_accuracy --arch bert_tiny {sizes} --attention-backend eager --batch-size 8 --cpu "
        "--optimizer fused_adam --lr-scheduler linear_warmup --lr 1e-3 --max-update 9"
    )
    command += " --bf16" if precision == "bf16" else ""
    training = StepwiseTraining([str(data_folder), *command.split()], tmp_path / "run")
    for _ in range(2):
        training.update()  # the optimizer's moments are there from the first on
    training.trainer.zero_grad()
    gc.collect()
    held = bytes_of_weights_and_optimizer(training.trainer)
    peak = peak_memory(training.update, "cpu")
    job = with_options(job_of_arch("bert_tiny", len(training.task.dictionary)), {**WIDE, "tokens_per_sample": 64})
    counted = job.count_memory(8, precision, "cpu", "eager")
    assert counted.weights + counted.optimizer == pytest.approx(held, rel=0.01)
    assert counted.peak == pytest.approx(held + peak, rel=0.1)
