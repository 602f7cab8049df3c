"""What a checkpoint says was the fastest: taken where it is of the right types, left out where it is not."""

import pytest
import torch

from lazyformer_fairseq.modules.choices import Choices

GOOD = {"a machine": {"a shape": "eager"}}


def test_choices_of_a_checkpoint_are_taken():
    choices = Choices()
    assert choices.load_state_dict(GOOD) == GOOD == choices.state_dict()


@pytest.mark.parametrize(
    "state", [None, 5, "x", [], {"a machine": 5}, {"a machine": {"a shape": 5}}, {"a machine": {"a": torch.ones(2)}}]
)
def test_damaged_choices_end_no_run(state):
    choices = Choices()
    assert choices.load_state_dict(state) == {} == choices.state_dict()
