"""Streams of tokens: each once, in order, apart between workers; cut anew each epoch; and what lies on disk."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyformer_fairseq.data.datasets.token_streams import Cut, TokenStreams, open_tokens, random_lengths
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.storage.indexed_format import write_items

EOS, PAD = 2, 1


def streams(count: int, rows: int, tgt_len: int, shards: int = 1, shard: int = 0, keeps_rest: bool = False):
    """Streams over the text 10, 11, 12, ...: a token tells its place."""
    tokens = np.arange(10, 10 + count).astype(np.int32)
    return TokenStreams(tokens, rows, tgt_len, EOS, PAD, shards=shards, shard=shard, keeps_rest=keeps_rest)


@settings(max_examples=40)
@given(st.integers(1, 300), st.integers(1, 5), st.integers(1, 3), st.integers(1, 20), st.booleans())
def test_every_token_is_a_target_once_and_in_order(count, rows_of_shard, shards, tgt_len, keeps_rest):
    rows = rows_of_shard * shards
    each, rest = divmod(count, rows)
    if not keeps_rest and each < tgt_len:
        with pytest.raises(UserError, match=f"{count} tokens in {rows} rows"):
            streams(count, rows, tgt_len)
        return
    found, lengths = [], set()
    for shard in range(shards):
        own = streams(count, rows, tgt_len, shards, shard, keeps_rest)
        batches = [own[segment] for segment in range(len(own))]
        lengths.add(len(own))
        assert all(batch["target"].size(1) == tgt_len for batch in batches[:-1])
        assert [batch["segment"] for batch in batches] == list(range(len(own)))
        assert all(batch["ntokens"] == batch["target"].ne(PAD).sum() for batch in batches)
        parts = [batch["net_input"]["src_tokens"] for batch in batches], [batch["target"] for batch in batches]
        found += zip(*(torch.cat(part, dim=1).tolist() for part in parts), strict=True)
    assert len(lengths) == 1, "workers must take the same number of steps"
    # Row after row, they are the text as it stands: contiguous in a row, each token once, none twice.
    targets = [token for _, row in found for token in row if token != PAD]
    assert targets == list(range(10, 10 + count - (0 if keeps_rest else rest)))
    for source, target in found:
        assert PAD not in target[:-1]
        for token_before, token in zip(source, target, strict=True):
            assert token == PAD or token_before == (token - 1 if token > 10 else EOS)
    assert sum(row.count(PAD) for _, row in found) == ((rows - rest) % rows if keeps_rest else 0)


cuts = st.builds(Cut, st.booleans(), st.booleans(), st.integers(1, 9), st.integers(1, 9))


@settings(max_examples=40)
@given(st.integers(180, 400), st.integers(1, 3), st.integers(1, 3), st.integers(1, 20), cuts)
def test_a_cut_changes_where_streams_and_segments_begin_and_nothing_else(count, rows_of_shard, shards, tgt_len, cut):
    rows = rows_of_shard * shards
    each = count // rows
    shifts, tokens = cut.shifts(rows, each), np.arange(10, 10 + count)
    for shard in range(shards):
        own = TokenStreams(tokens, rows, tgt_len, EOS, PAD, shards, shard, cut=cut)
        batches = [own[segment] for segment in range(len(own))]
        targets = torch.cat([batch["target"] for batch in batches], dim=1)
        for row, found in zip(range(shard * rows_of_shard, rows), targets.tolist(), strict=False):
            stream = list(range(10 + row * each, 10 + (row + 1) * each))
            assert found == stream[shifts[row] :] + stream[: shifts[row]]
        sources = torch.cat([batch["net_input"]["src_tokens"] for batch in batches], dim=1)
        assert torch.equal(sources, torch.where(targets == 10, EOS, targets - 1)), "the text's token before it"
        sizes = [batch["target"].size(1) for batch in batches]
        if cut.varlen:
            assert all(5 <= size <= tgt_len + 15 for size in sizes[:-1]) and 1 <= sizes[-1] <= tgt_len + 15
        else:
            assert set(sizes[:-1]) <= {tgt_len} and sizes[-1] <= tgt_len


def test_each_epoch_and_seed_cuts_anew_and_the_same_one_alike():
    found = [Cut(True, True, *drawn) for drawn in ((1, 1), (1, 2), (2, 1), (1, 1))]
    for drawn in ([cut.shifts(4, 1000).tolist() for cut in found], [cut.borders(1000, 50).tolist() for cut in found]):
        assert drawn[0] == drawn[3] and drawn[0] != drawn[1] != drawn[2] != drawn[0]


def test_segments_have_the_lengths_of_the_published_code():
    """19 of 20 about T, one about T / 2, with a deviation of 5, rounded down; at most three deviations above T."""
    lengths = random_lengths(np.random.default_rng(1), 5 * 40_000, 150)
    short = lengths < 110
    assert short.mean() == pytest.approx(0.05, abs=0.005)
    assert lengths[~short].mean() == pytest.approx(149.5, abs=0.2)
    assert lengths[short].mean() == pytest.approx(74.5, abs=1)
    assert lengths[~short].std() == pytest.approx(5, abs=0.2) and lengths.max() == 165
    assert random_lengths(np.random.default_rng(1), 500, 6).min() == 5


def test_tokens_stay_on_disk(tmp_path):
    items = [[5, 6, 2], [2], [7, 65_000, 2]]
    write_items(tmp_path / "train", np.uint16, [(np.concatenate(items), np.array(list(map(len, items))))])
    tokens = open_tokens(tmp_path / "train")
    assert isinstance(tokens, np.memmap)
    assert tokens.tolist() == [5, 6, 2, 2, 7, 65_000, 2]
    assert np.shares_memory(TokenStreams(tokens, 1, 3, EOS, PAD).tokens, tokens)


def test_what_cannot_be_read_and_sizes_that_cannot_be_are_named(tmp_path):
    for rows, tgt_len in ((0, 5), (2, 0), (2, -3)):
        with pytest.raises(UserError, match="must be positive"):
            streams(100, rows, tgt_len)

    def refused(message: str) -> None:
        with pytest.raises(UserError, match=message):
            open_tokens(tmp_path / "train")

    refused(r"train\.(bin|idx): no such file")
    write_items(tmp_path / "train", np.uint16, [(np.array([], int), np.array([], int))])
    refused(r"train\.bin: holds no token")
    write_items(tmp_path / "train", np.uint16, [(np.array([5, 6, 2]), np.array([3]))])
    whole = (tmp_path / "train.idx").read_bytes()
    (tmp_path / "train.bin").write_bytes(b"123")
    refused(r"train\.bin: has 3 bytes, 6 by its index")
    for broken in (whole[:-3], whole[:20], b"", b"x" * 100):
        (tmp_path / "train.idx").write_bytes(broken)
        refused(r"train\.idx: ")
