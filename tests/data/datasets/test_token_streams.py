"""Streams of tokens: each once, in order, apart between workers; cut anew each epoch; and what lies on disk."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyformer_fairseq.data.datasets.token_streams import TokenStreams, open_tokens
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


@settings(max_examples=40)
@given(st.integers(180, 400), st.integers(1, 3), st.integers(1, 3), st.integers(1, 20), st.integers(1, 9))
def test_a_roll_changes_where_streams_begin_and_nothing_else(count, rows_of_shard, shards, tgt_len, epoch):
    rows = rows_of_shard * shards
    each = count // rows
    tokens = np.arange(10, 10 + count)
    for shard in range(shards):
        own = TokenStreams(tokens, rows, tgt_len, EOS, PAD, shards, shard, roll=True, epoch=epoch)
        batches = [own[segment] for segment in range(len(own))]
        targets = torch.cat([batch["target"] for batch in batches], dim=1)
        for place, found in enumerate(targets.tolist()):
            row = shard * rows_of_shard + place
            stream = list(range(10 + row * each, 10 + (row + 1) * each))
            assert found == stream[own.shifts[place] :] + stream[: own.shifts[place]]
        sources = torch.cat([batch["net_input"]["src_tokens"] for batch in batches], dim=1)
        assert torch.equal(sources, torch.where(targets == 10, EOS, targets - 1)), "the text's token before it"


def test_each_epoch_and_seed_rolls_anew_and_the_same_one_alike():
    drawn = [
        TokenStreams(np.arange(4000), 4, 50, EOS, PAD, roll=True, seed=seed, epoch=epoch).shifts.tolist()
        for seed, epoch in ((1, 1), (1, 2), (2, 1), (1, 1))
    ]
    assert drawn[0] == drawn[3] and drawn[0] != drawn[1] != drawn[2] != drawn[0]


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
    refused(r"train\.bin contains no tokens")
    write_items(tmp_path / "train", np.uint16, [(np.array([5, 6, 2]), np.array([3]))])
    whole = (tmp_path / "train.idx").read_bytes()
    (tmp_path / "train.bin").write_bytes(b"123")
    refused(r"train\.bin is truncated: it has 3 bytes, but should have 6 according to train.idx")
    for broken in (whole[:-3], whole[:20], b"", b"x" * 100):
        (tmp_path / "train.idx").write_bytes(broken)
        refused(r"train\.idx(: not| is truncated)")
