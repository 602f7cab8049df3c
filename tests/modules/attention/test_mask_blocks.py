"""Blocks of a mask by arithmetic, against the mask's own mask, block by block."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyformer_fairseq.modules.attention.masks import AttentionMask, Band, Columns, Numbers, blocks_of, longest_reach

limits = st.one_of(st.none(), st.integers(0, 9))
bands = st.tuples(limits, limits, st.sampled_from([1, 1, 2, 3, 7]), st.sampled_from([0, 0, 1, 3, 8, 20])).map(
    Band._make
)
columns = st.tuples(st.integers(0, 5), st.integers(0, 9), st.integers(0, 9)).map(
    lambda found: Columns(found[0], found[1], min(found[1:]))
)
groups = st.tuples(st.integers(1, 2), st.lists(st.one_of(bands, columns), min_size=1, max_size=3).map(tuple))
masks = st.one_of(st.none(), st.lists(groups, min_size=1, max_size=2).map(lambda found: AttentionMask(tuple(found))))
places = dict(time=st.integers(1, 40), memory=st.integers(0, 20), extra=st.integers(0, 5), is_causal=st.booleans())
CPU = torch.device("cpu")


def dense_mask(mask, time, tokens, extra, is_causal):
    """(1 or N, T, K)."""
    seen = torch.ones(1, time, tokens, dtype=torch.bool) if mask is None else mask.dense(time, tokens, CPU)
    if is_causal:
        seen = seen & torch.ones(time, tokens, dtype=torch.bool).tril(tokens - time)
    return torch.nn.functional.pad(seen, (0, extra), value=True)


def by_block(mask, size):
    """(heads, R, C, queries, keys), False beyond the ends."""
    time, keys = mask.shape[1:]
    padded = torch.nn.functional.pad(mask, (0, -keys % size[1], 0, -time % size[0]))
    return padded.unflatten(2, (-1, size[1])).unflatten(1, (-1, size[0])).transpose(2, 3)


@settings(max_examples=300, deadline=None)
@given(mask=masks, size=st.tuples(st.integers(1, 12), st.integers(1, 12)), **places)
def test_blocks_are_those_of_the_mask(mask, size, time, memory, extra, is_causal):
    tokens = time + memory
    found = blocks_of(mask, time, tokens + extra, extra, is_causal, size, CPU)
    blocks = by_block(dense_mask(mask, time, tokens, extra, is_causal), size)
    assert torch.equal(found.shown, blocks.any(-1).any(-1))
    whole = blocks.all(-1).all(-1)
    assert not bool((found.whole & ~whole).any())
    parts = [part for _, parts in mask.groups for part in parts] if mask else []
    is_simple = all(isinstance(part, Band) and part.dilation == 1 for part in parts)
    if is_simple and (mask is None or all(len(parts) == 1 for _, parts in mask.groups)) and not extra:
        assert torch.equal(found.whole, whole)


@settings(max_examples=200, deadline=None)
@given(mask=masks, **places)
def test_numbers_say_what_the_parts_say(mask, time, memory, extra, is_causal):
    heads = sum(number for number, _ in mask.groups) if mask else 2
    bands, columns = Numbers.of(mask, heads, CPU)
    tokens = time + memory
    keys, queries = torch.arange(tokens), torch.arange(memory, tokens)[:, None]
    ahead = keys - queries
    seen = torch.zeros(heads, time, tokens, dtype=torch.bool)
    for head in range(heads):
        for least, most, step, block in bands[head].tolist():
            near = (ahead >= least) & (ahead <= most) & (ahead % step == 0)
            seen[head] |= near & (keys // block == queries // block)
        for first, period, last in columns[head].tolist():
            seen[head] |= (keys < first) | (keys % period >= period - last)
    expected = dense_mask(mask, time, tokens, 0, False)
    assert torch.equal(seen, expected.expand(heads, -1, -1))


def test_reach():
    assert longest_reach(None) is None
    assert longest_reach(AttentionMask(((1, (Band(5, None, 3), Band(None, None, block=8))),))) == 15
    assert longest_reach(AttentionMask(((1, (Band(5, 5),)), (1, (Columns(1),))))) is None
