"""Documents of a block that do not see each other: as if each were alone, whatever the pattern and the back end."""

import re

import numpy as np
import pytest
import torch
from every_variant import ENCODERS, ON_A_CPU, build, run, tokens
from tiny_networks import loud, make_encoder, vectors
from torch import Tensor

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.modules.attention.scores import Scores
from lazyformer_fairseq.modules.networks.documents import Documents
from lazyformer_fairseq.modules.networks.encoder import Encoder, TokenInfo
from lazyformer_fairseq.patterns.kinds import ENCODER

LENGTHS = [[5, 7], [1, 6, 2], [10]]
IS_PADDING = torch.zeros(3, 12, dtype=torch.bool)
IS_PADDING[1, 9:] = IS_PADDING[2, :2] = True  # behind the text, and before it
NO_BIAS = ("buckets", "linformer")


def assert_same(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "pattern", ["skf", "cfc[form=lightweight,width=4]f", "rfr[cell=mingru]f", *(f"{s}flf" for s in ("s", *ENCODERS))]
)
def test_each_document_alone_has_the_same_states(pattern):
    buckets = 0 if any(name in pattern for name in NO_BIAS) else 8
    encoder = loud(build(ENCODER, pattern, relative_position_buckets=buckets, token_types=2), 0.3)
    ids, types = tokens(3), tokens(3) % 2
    torch.manual_seed(3)
    info = TokenInfo(token_types_BT=types, documents=LENGTHS, restart_positions=True)
    _, states = encoder(ids, IS_PADDING, return_all=True, info=info)
    for row, is_padding in enumerate(IS_PADDING):
        text, of_text = ids[row][~is_padding], types[row][~is_padding]
        of_row = [state[row] for state in states]
        assert not any(state[is_padding].any() for state in of_row)
        parts = (x.split(LENGTHS[row]) for x in (text, of_text, *(state[~is_padding] for state in of_row)))
        for document, its_types, *found in zip(*parts, strict=True):
            torch.manual_seed(3)
            _, alone = encoder(document[None], return_all=True, info=TokenInfo(token_types_BT=its_types[None]))
            for one, other in zip(found, alone, strict=True):
                assert_same(one, other[0])


def test_given_global_tokens_are_those_of_their_document():
    encoder, ids = build(ENCODER, "s[window=1,global=given]flf"), tokens(1)
    given = torch.arange(12)[None] % 5 == 1  # 1, 6 and 11
    found, _ = encoder(ids, info=TokenInfo(given, documents=[[4, 8]], restart_positions=True))
    for part in (slice(0, 4), slice(4, 12)):
        assert_same(found[:, part], encoder(ids[:, part], info=TokenInfo(given[:, part]))[0])


class ByMask(Encoder):
    """Computes all pairs of a block, and hides those of two documents."""

    def _scores(self, *args) -> Scores:
        hidden = torch.zeros(*self.is_hidden.shape, dtype=torch.double).masked_fill(self.is_hidden, -torch.inf)
        return super()._scores(*args).with_own(learned_BNTK=hidden[:, None])


@pytest.mark.parametrize(
    ("s", "backend"), [*(("s", name) for name in ON_A_CPU), *(("s[window=2]", name) for name in ("recompute", "fused"))]
)
def test_outputs_and_gradients_are_those_of_a_mask_of_all_pairs(s, backend):
    """A mask knows no document's places, so variants that count by place are elsewhere: a window is by distance."""
    encoder, x = make_encoder(f"{s}flfkf", relative_position_buckets=8), vectors(3, 12)
    number = torch.full((3, 12), -1)  # padding sees padding: a row must see something
    for row, lengths in enumerate(LENGTHS):
        number[row][~IS_PADDING[row]] = torch.repeat_interleave(torch.tensor(lengths))
    found = []
    for documents in (LENGTHS, None):
        encoder.attention_backend = "eager" if documents is None else backend
        encoder.__class__, encoder.is_hidden = (
            (ByMask if documents is None else Encoder),
            number[:, None] != number[..., None],
        )
        y, _ = encoder(x, None if documents is None else IS_PADDING, info=TokenInfo(documents=documents))
        y = y[~IS_PADDING]
        found.append([y, *torch.autograd.grad(y.sin().sum(), [*encoder.parameters()], allow_unused=True)])
    for one, other in zip(*found, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_positions_go_on_unless_they_begin_anew():
    encoder, ids = build(ENCODER, "f"), tokens(1)
    whole = run(encoder, ids)
    assert_same(encoder(ids, info=TokenInfo(documents=[[5, 7]]))[0], whole)
    anew, _ = encoder(ids, info=TokenInfo(documents=[[5, 7]], restart_positions=True))
    assert_same(anew[:, :5], whole[:, :5])
    assert (anew[:, 5:] - whole[:, 5:]).abs().amin(-1).gt(1e-6).all()
    longer = tokens(1, 20)
    encoder(longer, info=TokenInfo(documents=[[12, 8]], restart_positions=True))
    with pytest.raises(ValueError, match="a sequence of 20 tokens is longer than the model's 12 positions"):
        encoder(longer, info=TokenInfo(documents=[[12, 8]]))


@pytest.mark.parametrize("typical", [20, 120, 600])
def test_pairs_of_documents_are_computed_and_few_others(typical):
    lengths = np.random.default_rng(1).lognormal(np.log(typical), 1.0, 400).astype(np.int64).clip(1, 2048)
    on_a_gpu, documents = (Documents(lengths, 64, torch.device(name)) for name in ("meta", "cpu"))
    assert sum(group.pairs for group in on_a_gpu.groups) <= 1.5 * (lengths**2).sum()
    assert sum(group.pairs for group in documents.groups) <= 1.5 * (lengths**2).sum()
    assert len(on_a_gpu.groups) <= 20
    assert all(group.width < 600 for group in documents.groups if group.documents > 1), "longer ones are alone"
    x = torch.randn(1, lengths.sum(), 3)
    assert torch.equal(documents.join(documents.split(x)), x)


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([[12]], "documents must list positive document lengths for each of 2 sequences, not [[12]]"),
        ([[12, 0], [12]], "documents must list positive document lengths"),
        (
            [[12], [5, 6]],
            "documents: the documents of sequence 1 have 11 tokens in total, but the sequence has 12; count all tokens",
        ),
        ([[13], [12]], "documents: the documents of sequence 0 have 13 tokens in total"),
    ],
)
def test_documents_that_are_not_the_texts_are_refused(documents, message):
    for padding in (None, torch.zeros(2, 12, dtype=torch.bool)):
        with pytest.raises(UserError, match=f"^{re.escape(message)}"):
            build(ENCODER, "sf")(tokens(2), padding, info=TokenInfo(documents=documents))
