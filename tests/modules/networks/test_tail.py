"""The tail: feed-forwards at the top are computed for the tokens that a head reads, with the logits of all tokens."""

from typing import Optional

import numpy as np
import pytest
import torch
from tiny_networks import WORDS, loud
from torch import Tensor, nn

from lazyformer_fairseq import build
from lazyformer_fairseq.modules.networks.masked_lm import MaskedLM
from lazyformer_fairseq.modules.sublayers.feed_forward import FeedForward

PAD = 1
LENGTHS = (9, 5, 8)  # of the texts
MASKED = [0, 3, 8, 10, 13, 20, 25]  # places of masked tokens in three rows of nine
NORMS = {
    "post-norm": {},
    "pre-norm": {"encoder_normalize_before": True},
    "RMS": {"encoder_normalize_before": True, "norm": "rms", "no_linear_bias": True},
}
PATTERNS = {  # and how many of its feed-forwards are above all that mixes tokens
    "f s": 0,
    "s f l f": 1,
    "(sff)x2 (f)x3": 5,
    "s f k f[gate=silu] - f[gate=gelu]": 2,
    "c f r f f": 2,
    "f f": 2,
    "s[window=2,global=1] f f[experts=2]": 0,
    "s f[experts=2] f": 1,
}


def make(pattern: str, **options) -> MaskedLM:
    sizes = {"encoder_embed_dim": 12, "encoder_ffn_embed_dim": 20, "encoder_attention_heads": 3, "max_positions": 32}
    model = build("bert_tiny", WORDS, sublayer_pattern=pattern, attention_backend="eager", **{**sizes, **options})
    for name, head_type in (("classes", "dense"), ("spans", "span")):
        model.register_classification_head(name, 2, head_type)
    return loud(model, 0.4)


def texts(padding: str) -> Tensor:
    """(3, 9), padded on the right or left, or of full rows."""
    tokens = torch.randint(2, WORDS, (3, 9), generator=torch.Generator().manual_seed(2))
    for row, length in zip(tokens, LENGTHS, strict=True):
        if padding == "right":
            row[length:] = PAD
        if padding == "left":
            row[: len(row) - length] = PAD
    return tokens


def masked_in(tokens: Tensor) -> Tensor:
    places = torch.tensor(MASKED)
    return places[tokens.flatten()[places] != PAD]


def tokens_of_feed_forwards(model: MaskedLM) -> list[int]:
    """A list to which each feed-forward, not of experts, appends how many tokens it computes."""
    found: list[int] = []

    def count(_module: nn.Module, given: tuple[Tensor, ...], _output: object) -> None:
        found.append(given[0].shape[:-1].numel())

    for sublayer in model.encoder.sentence_encoder.sublayers:
        inner = getattr(sublayer, "inner", None)
        if isinstance(inner, FeedForward):
            inner.register_forward_hook(count)
    return found


def results(model: MaskedLM, logits: Tensor) -> dict[str, Tensor]:
    """Logits, and the gradient of each weight of a random sum of them."""
    model.zero_grad()
    up = torch.randn(logits.shape, generator=torch.Generator().manual_seed(4), dtype=torch.double)
    (logits * up).sum().backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return {"logits": logits.detach(), **gradients}


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """To rounding, by the largest number of each."""
    assert found.keys() == wanted.keys()
    for name, expected in wanted.items():
        assert (found[name] - expected).abs().max() <= 1e-12 * expected.abs().max().clamp(min=1), name


def logits_of_all(model: MaskedLM, tokens: Tensor, places: Tensor, head: Optional[str] = None, **given) -> Tensor:
    """What a head makes of the features at these places, where those of all tokens are computed."""
    features, _ = model(tokens, features_only=True, **given)
    chosen = features.flatten(0, 1)[places]
    if head is None:
        return model.encoder.lm_head(chosen)
    return model.classification_heads[head](chosen[:, None])


@pytest.mark.parametrize("padding", ["none", "right", "left"])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_logits_and_gradients_are_those_of_all_tokens(pattern, norm, padding):
    model = make(pattern, **NORMS[norm])
    tokens = texts(padding)
    masked = masked_in(tokens)
    found = results(model, model(tokens, masked_tokens=masked)[0])
    assert_equal(found, results(model, logits_of_all(model, tokens, masked)))
    mask = torch.zeros(tokens.numel(), dtype=torch.bool).index_fill(0, masked, True).view_as(tokens)
    assert torch.equal(model(tokens, masked_tokens=mask)[0], found["logits"])

    first = tokens.ne(PAD).int().argmax(-1) + torch.arange(3) * 9
    found = results(model, model(tokens, classification_head_name="classes")[0])
    assert_equal(found, results(model, logits_of_all(model, tokens, first, "classes")))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_tail_computes_no_other_tokens(pattern):
    model = make(pattern)
    computed = tokens_of_feed_forwards(model)
    below = sum(
        isinstance(getattr(each, "inner", None), FeedForward) for each in model.encoder.sentence_encoder.sublayers
    )
    below -= PATTERNS[pattern]
    model(texts("right"), masked_tokens=torch.tensor([0, 10]), has_padding=True)
    assert computed == [27] * below + [2] * PATTERNS[pattern]
    computed.clear()
    model(texts("right"), classification_head_name="classes", has_padding=True)
    assert computed == [27] * below + [3] * PATTERNS[pattern]


@pytest.mark.parametrize(
    "asked",
    [
        {"features_only": True},
        {"classification_head_name": "spans"},
        {"masked_tokens": torch.tensor([3]), "return_all_hiddens": True},
        {},
    ],
)
def test_whoever_reads_all_tokens_gets_them(asked):
    model = make("s f f")
    computed = tokens_of_feed_forwards(model)
    tokens = texts("none")
    output, extra = model(tokens, **asked)
    assert computed == [27, 27]
    if "return_all_hiddens" in asked:
        assert torch.equal(output, model.encoder.lm_head(extra["inner_states"][-1].flatten(0, 1)[3:4]))


@pytest.mark.parametrize(("padding", "has_padding"), [("right", True), ("left", None)])
def test_masked_tokens_and_classes_at_once(padding, has_padding):
    model = make("s f f")
    tokens = texts(padding)
    masked = masked_in(tokens)
    given = {"has_padding": has_padding}
    logits, extra = model(tokens, masked_tokens=masked, classification_head_name="classes", **given)
    torch.testing.assert_close(logits, model(tokens, masked_tokens=masked, **given)[0], rtol=0, atol=1e-12)
    of_classes, _ = model(tokens, classification_head_name="classes", **given)
    torch.testing.assert_close(extra["head_logits"], of_classes, rtol=0, atol=1e-12)


@pytest.mark.parametrize("begins_anew", [False, True])
def test_the_tail_of_documents_in_a_row(begins_anew):
    model = make("s f f")
    tokens = texts("right")
    given = {"documents": [[4, 5], [5], [2, 5, 1]], "restart_positions": begins_anew}
    masked = masked_in(tokens)
    computed = tokens_of_feed_forwards(model)
    found = results(model, model(tokens, masked_tokens=masked, has_padding=True, **given)[0])
    assert computed == [len(masked)] * 2
    assert_equal(found, results(model, logits_of_all(model, tokens, masked, has_padding=True, **given)))


def test_the_tail_of_permuted_tokens():
    model = make("s f f")
    tokens = texts("none")
    turns = torch.stack([torch.arange(9), torch.arange(9), torch.full((9,), 9)]).expand(3, 3, 9)
    given = {"positions": torch.from_numpy(np.array([np.roll(np.arange(9), n) for n in range(3)])), "turns": turns}
    masked = torch.tensor(MASKED)
    computed = tokens_of_feed_forwards(model)
    found = results(model, model(tokens, masked_tokens=masked, **given)[0])
    assert computed == [len(masked)] * 2
    assert_equal(found, results(model, logits_of_all(model, tokens, masked, **given)))


def test_checkpoints_recompute_the_same_tail():
    model = make("s f f", checkpoint_activations=True, dropout=0.2, activation_dropout=0.1).train()
    tokens = texts("right")
    kept = []
    for is_on in (True, False):
        model.encoder.sentence_encoder.checkpoints = is_on
        torch.manual_seed(3)
        kept.append(results(model, model(tokens, masked_tokens=masked_in(tokens))[0]))
    assert_equal(*kept)


def test_reversible_models_compute_all_tokens():
    model = make("s f f", encoder_normalize_before=True, reversible=True)
    tokens = texts("right")
    computed = tokens_of_feed_forwards(model)
    logits, _ = model(tokens, masked_tokens=masked_in(tokens))
    assert computed == [27, 27]
    assert_equal(results(model, logits), results(model, logits_of_all(model, tokens, masked_in(tokens))))
