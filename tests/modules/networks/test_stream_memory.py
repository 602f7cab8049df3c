import io

import pytest
import torch

from lazyformer_fairseq.modules.networks.stack import StreamMemory


def inputs(start: int, stop: int) -> list[torch.Tensor]:
    """Of two attending sublayers for the tokens from `start` to `stop` of 2 streams, each token its own number."""
    tokens = torch.arange(start, stop, dtype=torch.float).view(1, -1, 1).expand(2, -1, 4)
    return [tokens, -tokens]


@pytest.mark.parametrize("mem_len", [1, 3, 4, 5, 9, 100])
@pytest.mark.parametrize("lengths", [[4], [4, 4, 4], [1, 6, 2], [7, 1, 1]])
def test_memory_is_the_last_tokens_of_all_segments(mem_len, lengths):
    memory, at = StreamMemory(), 0
    for length in lengths:
        memory.remember(inputs(at, at + length), mem_len)
        at += length
        assert memory.length == min(mem_len, at)
        for state, expected in zip(memory.states, inputs(max(at - mem_len, 0), at), strict=True):
            assert torch.equal(state, expected)


def test_memory_holds_no_more_than_it_remembers_and_no_graph_and_no_reference():
    memory = StreamMemory()
    for _ in range(3):
        given = [x.contiguous().requires_grad_() * 2 for x in inputs(0, 64)]
        memory.remember(given, mem_len=8)
    for state in memory.states:
        assert not state.requires_grad and state.grad_fn is None
        assert state.untyped_storage().nbytes() == 2 * 8 * 4 * 4
    given[0].detach().zero_()  # a later change in place does not reach it
    assert torch.equal(memory.states[0], 2 * inputs(56, 64)[0])


def test_without_memory_length_and_when_cleared_nothing_is_remembered():
    memory = StreamMemory()
    memory.remember(inputs(0, 3), mem_len=0)
    assert memory.length == 0 and memory.states == [] and memory.before(0, torch.zeros(2, 1, 4)) is None
    memory.remember(inputs(0, 3), mem_len=2)
    assert memory.length == 2
    half = torch.zeros(2, 1, 4, dtype=torch.bfloat16)  # it takes the precision of the input that it stands before
    assert memory.before(0, half).dtype == torch.bfloat16
    memory.clear()
    assert memory.length == 0 and memory.before(1, torch.zeros(2, 1, 4)) is None


def test_the_state_survives_a_checkpoint_that_holds_tensors_alone():
    memory, restored, file = StreamMemory(), StreamMemory(), io.BytesIO()
    memory.remember(inputs(0, 5), mem_len=4)
    torch.save(memory.state_dict(), file)
    file.seek(0)
    restored.load_state_dict(torch.load(file, weights_only=True))
    assert restored.length == 4 and len(restored.states) == 2
    for _ in range(2):
        assert all(torch.equal(*pair) for pair in zip(memory.states, restored.states, strict=True))
        memory.remember(inputs(5, 8), mem_len=4)
        restored.remember(inputs(5, 8), mem_len=4)
