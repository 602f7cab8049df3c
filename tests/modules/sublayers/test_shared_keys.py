"""The letter k against einsum in float64: own queries on the keys and values of the s below."""

import pytest
import torch
from attention_by_einsum import Attending, padded_and_with_memory, split
from refusals import assert_refused
from tiny_networks import make_decoder, make_encoder, random_tokens
from torch import Tensor

from lazyformer_fairseq.modules.attention.choice import back_ends_of
from lazyformer_fairseq.modules.networks.stack import StreamMemory
from lazyformer_fairseq.patterns.grammar import plan
from lazyformer_fairseq.patterns.kinds import KEYS_AND_VALUES


class SharedKeys(Attending):
    """In a causal model with an own projection of distances, too; a ``k`` hands nothing on and has no memory."""

    def outputs(self) -> list[Tensor]:
        shared = self.context()
        output, below = self.s(self.x, {}, shared, self.memory[0])
        above, handed_on = self.l(self.above, below, shared)
        assert handed_on == {} and not self.l.attends
        return [output, above]

    def expected(self) -> list[Tensor]:
        q, k, v = self.projected(self.inputs()[0])
        distances = torch.arange(self.keys - self.time, self.keys)[:, None] - torch.arange(self.keys)
        outputs = []
        for sublayer, own in ((self.s, q), (self.l, split(self.l.q_proj(self.above)))):
            probabilities = self.weigh(own, self.scores(own, k, distances, sublayer), distances)
            outputs.append(sublayer.out_proj((probabilities @ v).transpose(1, 2).flatten(2)))
        return outputs


class Windowed(SharedKeys):
    def weigh(self, q: Tensor, scores: Tensor, distances: Tensor) -> Tensor:
        return scores.masked_fill(distances.abs() > 2, -torch.inf).softmax(-1)


@padded_and_with_memory
@pytest.mark.parametrize("back_end", back_ends_of("cpu"))
def test_it_is_attention_of_own_queries(given, back_end):
    """With T5's bias, padding, memory; all gradients, of the s's weights too."""
    SharedKeys("s", **given, above="k", back_end=back_end).assert_equations()


@pytest.mark.parametrize("back_end", ["eager", "recompute", "tiles"])
@pytest.mark.parametrize("given", [{"time": 7, "biased": True}, {"time": 4, "memory": 5}], ids=str)
def test_the_mask_of_the_s_is_its_own(given, back_end):
    Windowed("s[window=2]", **given, above="k", back_end=back_end).assert_equations()


def test_a_stream_remembers_for_the_s_alone():
    decoder, tokens, memory = make_decoder("s f k", mem_len=9), random_tokens(2, 9), StreamMemory()
    parts = [decoder(part, memory)[0] for part in tokens.split(3, 1)]
    assert len(memory.states) == 1
    torch.testing.assert_close(torch.cat(parts, 1), decoder(tokens)[0])


def test_each_k_reads_the_nearest_s_and_an_l_looks_through_it():
    first, _, second, shared, lazy = plan("s k s k l")
    assert first.consumers == (KEYS_AND_VALUES,) and second.consumers == (KEYS_AND_VALUES, "distribution")
    assert shared.producer.kind is lazy.producer.kind is second.kind
    sublayers = [sublayer.inner for sublayer in make_encoder("s k s l").sublayers]
    assert [getattr(inner, "is_key_producer", False) for inner in sublayers] == [True, False, False, False]
    assert [getattr(inner, "consumers", 0) for inner in sublayers] == [0, 0, 1, 0]


@pytest.mark.parametrize(
    ("producer", "why"),
    [
        ("f", "this k has no s below it whose keys and values it could reuse"),
        ("s[buckets=4]", "buckets keeps its keys and values for itself: they are its queries too"),
        ("s[window=2,global=1]", "its global tokens have keys and values of their own"),
        ("s[synthesizer=random]", "its scores are made for its own input"),
    ],
)
def test_what_it_cannot_read_is_named(producer, why):
    assert_refused(*(("f k s", "k") if producer == "f" else (f"s k {producer} (l k)x2", "k)x2")), why)
