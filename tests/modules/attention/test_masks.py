"""Masks pair by pair, as numbers, and by blocks for kernels of a GPU."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from masked_attention import masks

from lazyformer_fairseq.modules.attention import AttentionInputs, attend
from lazyformer_fairseq.modules.attention import masks as modules
from lazyformer_fairseq.modules.attention.blockwise import Blockwise
from lazyformer_fairseq.modules.attention.masks import (
    AttentionMask,
    Band,
    Columns,
    blocks_of,
    count_pairs,
    visible_fraction,
)
from lazyformer_fairseq.modules.attention.scores import Scores

places = dict(time=st.integers(1, 40), memory=st.integers(0, 20), extra=st.integers(0, 5), is_causal=st.booleans())
CPU = torch.device("cpu")


def is_seen(part: Band | Columns, query: int, key: int) -> bool:
    """By the words of the docstrings, for one pair."""
    if isinstance(part, Columns):
        is_last = part.period > 0 and key % part.period + part.last >= part.period
        return key < part.first or is_last
    steps, rest = divmod(abs(key - query), part.dilation)
    limit = part.before if key < query else part.after
    same_block = not part.block or key // part.block == query // part.block
    return rest == 0 and (limit is None or steps <= limit) and same_block


@given(masks, st.integers(1, 8), st.integers(0, 4))
def test_a_mask_is_the_union_of_its_parts_pair_by_pair(mask, time, memory):
    keys = memory + time
    shown = mask.dense(time, keys, CPU)
    heads = [parts for number, parts in mask.groups for _ in range(number)]
    expected = [
        [[any(is_seen(part, memory + i, j) for part in parts) for j in range(keys)] for i in range(time)]
        for parts in heads
    ]
    assert torch.equal(shown.expand(len(heads), -1, -1), torch.tensor(expected))


@given(masks, st.integers(1, 8), st.integers(0, 4), st.booleans())
def test_pairs_are_counted_as_the_mask_shows_them(mask, time, memory, is_causal):
    seen, keys = mask.dense(time, memory + time, CPU), torch.arange(memory + time)
    seen = seen & (keys <= keys[memory:, None]) if is_causal else seen
    heads = sum(number for number, _ in mask.groups)
    assert count_pairs(mask, time, memory + time, is_causal) == seen.expand(heads, -1, -1).sum()


@pytest.mark.parametrize("part", [Band(64, 0), Band(None, 0, block=64), Band(None, 0, 64), Columns(1, 64, 8)])
def test_the_share_of_long_texts_is_estimated(part):
    mask = AttentionMask(((3, (part,)), (1, (Band(9, 9),))))
    for time, keys in ((1000, 1000), (2048, 4096)):
        pairs = count_pairs(mask, time, keys, True)
        assert visible_fraction(mask, time, keys, True) == pytest.approx(pairs / (4 * time * keys), rel=0.03)


def dense_mask(mask, time, tokens, extra, is_causal):
    """(1 or N, T, K)."""
    seen = torch.ones(1, time, tokens, dtype=torch.bool) if mask is None else mask.dense(time, tokens, CPU)
    if is_causal:
        seen = seen & torch.ones(time, tokens, dtype=torch.bool).tril(tokens - time)
    return torch.nn.functional.pad(seen, (0, extra), value=True)


@settings(max_examples=40, deadline=None)
@given(mask=st.none() | masks, size=st.integers(1, 12), at_once=st.sampled_from([1, 2**26]), **places)
def test_blocks_are_those_of_the_mask(mask, size, at_once, time, memory, extra, is_causal):
    tokens = time + memory
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modules, "_PAIRS_AT_ONCE", at_once)
        found = blocks_of(mask, time, tokens + extra, extra, is_causal, size, CPU)
    dense = dense_mask(mask, time, tokens, extra, is_causal)
    padded = torch.nn.functional.pad(dense, (0, -dense.size(2) % size, 0, -time % size))
    blocks = padded.unflatten(2, (-1, size)).unflatten(1, (-1, size)).transpose(2, 3)
    assert torch.equal(found.shown, blocks.any(-1).any(-1))
    assert torch.equal(found.whole, blocks.all(-1).all(-1))


@pytest.mark.parametrize("back_end", ["eager", "recompute"])
def test_what_a_pass_keeps_is_not_kept_by_a_function(back_end):
    """torch.compile would break its graph: it cannot write down a function that it has only traced."""
    scores = Scores(mask=AttentionMask(((2, (Band(1, 1),)),)))
    q, k, v = torch.randn(3, 1, 2, 4, 8)
    attend(AttentionInputs(q, k, v, scores, consumers=0), back_end)
    (key,) = scores._cache
    assert not any(callable(part) for part in key)


def test_one_graph_serves_distributions_of_all_sizes():
    """torch.compile would make a graph for each batch if the memory of a distribution were counted by numbers."""
    graphs = []

    def note(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    @functools.partial(torch.compile, backend=note, dynamic=True, fullgraph=True)
    def memory(q, k):
        return q.new_empty(Blockwise.stored_size(q, k, Scores()))

    torch._dynamo.reset()
    for batch, time in ((3, 16), (5, 24), (7, 40)):
        q = torch.empty(batch, 2, time, 8)
        assert len(memory(q, q)) == batch * 2 * time * time
    assert len(graphs) == 1
