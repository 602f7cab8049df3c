"""Means over a validation split, some or all of whose batches predict nothing."""

from types import SimpleNamespace

import pytest
import torch

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.compare.masked_lm import MaskedLM
from lazyformer_fairseq.training.objectives.interface import Scalar, mean


def test_batches_that_predict_nothing_have_no_part_in_the_mean():
    scalars = [Scalar(3.0, 2), Scalar(0.0, 0), Scalar(6.0, 1)]
    assert mean(scalars) == 4.0


def test_a_split_that_predicts_nothing_is_refused_in_words():
    with pytest.raises(UserError, match="the validation text is too short"):
        mean([Scalar(0.0, 0), Scalar(0.0, 0)])


def test_a_comparison_whose_validation_text_predicts_nothing_is_refused_in_words():
    pad = 1
    words = 5
    batch = {"target": torch.full((2, 3), pad), "net_input": {"src_tokens": torch.full((2, 3), 4)}}
    task = SimpleNamespace(_text=SimpleNamespace(special=SimpleNamespace(pad=pad)), _batches=[batch])

    class Model(torch.nn.Module):
        def forward(self, src_tokens: torch.Tensor, masked_tokens: torch.Tensor) -> tuple[torch.Tensor]:
            return (torch.zeros(int(masked_tokens.sum()), words),)

    training = SimpleNamespace(model=Model(), device=torch.device("cpu"))
    with pytest.raises(UserError, match="the validation text is too short"):
        MaskedLM.measure(task, training)
