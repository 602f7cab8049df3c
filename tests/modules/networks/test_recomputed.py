"""Gradient checkpointing and reversible layers: gradients are those without, and depth costs no memory."""

import pytest
import torch
from every_variant import build, of_each_variant, tokens
from helpers import load_script
from tiny_networks import make_decoder, make_encoder, random_tokens, vectors
from torch import Tensor, nn

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.modules.networks.causal_decoder import CausalDecoder
from lazyformer_fairseq.modules.networks.encoder import Encoder, TokenInfo, init_bert_weights
from lazyformer_fairseq.modules.networks.recomputed import runs_of
from lazyformer_fairseq.modules.networks.stream_memory import StreamMemory
from lazyformer_fairseq.patterns.grammar import plan
from lazyformer_fairseq.patterns.kinds import CAUSAL, ENCODER

DROPOUT = {"dropout": 0.1, "activation_dropout": 0.1}
REVERSIBLE = {"normalize_before": True, "reversible": True}


def gradients(network: nn.Module, *given, **named) -> dict[str, Tensor]:
    """The output, and the gradient of each weight, of a random sum of it; `network` draws the same in each call."""
    network.zero_grad()
    torch.manual_seed(3)
    output = network(*given, **named)[0]
    up = torch.randn(output.shape, generator=torch.Generator().manual_seed(4), dtype=torch.double).to(output)
    (output * up).sum().backward()
    return {"output": output.detach()} | {
        name: weight.grad for name, weight in network.named_parameters() if weight.grad is not None
    }


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor], within: float = 1e-10) -> None:
    """By the largest number of each."""
    assert found.keys() == wanted.keys()
    for name, expected in wanted.items():
        assert (found[name] - expected).abs().max() <= within * expected.abs().max() + 1e-14, name


def assert_same_gradients(network: nn.Module, *given, **named) -> None:
    """Holds a network to itself where autograd keeps everything."""
    if network.reversible:
        assert_close(gradients(network, *given, **named), gradients(network, *given, **named, return_all=True))
        return
    wanted = gradients(network, *given, **named)
    network.checkpoints = True
    assert_equal(gradients(network, *given, **named), wanted)


ways = pytest.mark.parametrize("how", [{}, REVERSIBLE], ids=["checkpoints", "reversible"])


@ways
@pytest.mark.parametrize("direction", [ENCODER, CAUSAL])
def test_gradients_of_recurrences_are_those_without(direction, how):
    assert_same_gradients(build(direction, "rfr[cell=mingru]fsf", **DROPOUT, **how).train(), tokens())


@ways
@of_each_variant
def test_gradients_of_each_variant_are_those_without(direction, s, how):
    network = build(direction, f"{s}flf{s}f", **DROPOUT, **how)
    assert_same_gradients(network.train(), tokens())


BACK_ENDS = [("eager", 0.1), ("materialize", 0.0), ("recompute", 0.1), ("fused", 0.0)]


@ways
@pytest.mark.parametrize(("back_end", "dropout"), BACK_ENDS)
def test_gradients_on_each_back_end_are_those_without(back_end, dropout, how):
    options = {"attention_backend": back_end, "attention_dropout": dropout, **DROPOUT, **how}
    encoder = make_encoder("(sffl)x2 fskf", relative_position_buckets=8, **options).train()
    x = vectors(3, 9)
    padding = torch.arange(9) >= torch.tensor([[9], [5], [7]])
    assert_same_gradients(encoder, x.requires_grad_(), padding)
    assert_same_gradients(encoder, x, info=TokenInfo(documents=[[4, 5], [9], [2, 3, 4]]))
    assert_same_gradients(make_decoder("sflfsfkf", **options).train(), random_tokens(2, 9))


class Segments(nn.Module):
    """A decoder that reads three segments of streams, each with the memory of those before."""

    def __init__(self, decoder: CausalDecoder):
        super().__init__()
        self.decoder, self.reversible, self.memory = decoder, decoder.reversible, StreamMemory()

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        if name == "checkpoints":
            self.decoder.checkpoints = value

    def forward(self, tokens_BT: Tensor, return_all: bool = False) -> tuple[Tensor]:
        self.memory.clear()
        parts = tokens_BT.split(6, dim=1)
        return (torch.cat([self.decoder(part, self.memory, return_all=return_all)[0] for part in parts], 1),)


@ways
def test_memory_of_segments_is_that_of_the_forward_pass(how):
    network = Segments(make_decoder("sflfs[window=3]fcf", mem_len=8, **DROPOUT, **how).train())
    assert_same_gradients(network, random_tokens(2, 18))
    kept = [state.clone() for state in network.memory.states]
    gradients(network, random_tokens(2, 18), return_all=True)
    assert len(kept) == 4 and all(map(torch.equal, kept, network.memory.states))


def test_two_streams_are_the_papers_equations():
    network = make_encoder("sfsf", **REVERSIBLE)
    network.final_layer_norm = None
    x, shared = vectors(2, 7), network.context(vectors(2, 7))
    x1, x2 = x, x
    for attention, feed_forward in zip(network.sublayers[::2], network.sublayers[1::2], strict=True):
        y1 = x1 + attention.inner(attention.layer_norm(x2), {}, shared)[0]
        y2 = x2 + feed_forward.inner(feed_forward.layer_norm(y1), {}, shared)[0]
        x1, x2 = y1, y2
    torch.testing.assert_close(network(x)[0], (x1 + x2) / 2)
    lazy = make_encoder("sfl", **REVERSIBLE)  # a lazy block changes one stream as a whole
    lazy.final_layer_norm = None
    plain = make_encoder("sfl", normalize_before=True)
    plain.final_layer_norm = None
    torch.testing.assert_close(lazy(x)[0], (x + plain(x)[0]) / 2)


# --- Memory


peak = load_script("draw_memory_by_depth").peak


@pytest.mark.parametrize("layer", ["sf", "sflf"])
def test_depth_costs_a_checkpoint_one_tensor_a_layer_and_reversible_layers_nothing(layer):
    token_vectors = 2 * 256 * 32 * 4
    for options, grows in (({"checkpoints": True}, 1.0), ({"reversible": True}, 0.0)):
        few, many = (peak(f"({layer})x{depth}", **options) for depth in (2, 6))
        states = 4 * 10_000 * len(runs_of(plan(layer)))  # of random numbers: 5,056 bytes a unit, and what is around
        assert many - few <= 4 * grows * token_vectors + states, (few, many)
    assert peak(f"({layer})x6") - peak(f"({layer})x2") > 4 * 10 * token_vectors


# --- Precision


@pytest.mark.parametrize(("precision", "within"), [(torch.float32, 1e-4), (torch.bfloat16, 0.03)])
def test_48_sublayers_are_undone_to_rounding(precision, within):
    """Streams are in single precision in both: in half of it gradients of the lowest layers would be noise."""
    torch.manual_seed(1)
    network = Encoder("(sf)x24", None, 32, 128, 4, dropout=0.1, relative_position_buckets=0, **REVERSIBLE)
    network.apply(init_bert_weights).to(precision).train()
    given = vectors(2, 16, width=32).to(precision).requires_grad_()
    wanted = gradients(network, given, return_all=True)
    for name, found in gradients(network, given).items():
        assert (found - wanted[name]).norm() <= within * wanted[name].norm(), name


@pytest.mark.slow
@ways
def test_compiled_gradients_are_those_without(how):
    network = make_encoder("sflfsf", relative_position_buckets=8, **DROPOUT, **how).float().train()
    x, network.compiles = vectors(2, 9).float().requires_grad_(), True
    wanted = gradients(network, x, return_all=True)
    network.checkpoints = True
    assert_close(gradients(network, x), wanted, 1e-4)


@pytest.mark.parametrize(
    ("pattern", "before", "message"),
    [("sf", False, "--reversible: a post-norm cannot be inverted; also set --encoder-normalize-before"),
     ("s-f", True, "--reversible: - has no residual connection; remove this sublayer")],
)  # fmt: skip
def test_what_cannot_be_undone_is_refused(pattern, before, message):
    with pytest.raises(UserError, match=message):
        make_encoder(pattern, normalize_before=before, reversible=True)
