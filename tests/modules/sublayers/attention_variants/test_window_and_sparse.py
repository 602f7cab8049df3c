"""Longformer's window and the Sparse Transformer's masks: pair by pair, and what attention makes of them."""

import pytest
import torch
from attention_by_einsum import HEADS, WIDTH, Attending, padded_and_with_memory, split
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_networks import make_decoder, random_tokens
from torch import Tensor, nn

from lazyformer_fairseq.modules.networks.stream_memory import StreamMemory
from lazyformer_fairseq.modules.sublayers.interface import SublayerOptions
from lazyformer_fairseq.patterns.attention_variants import chosen_variants
from lazyformer_fairseq.patterns.grammar import plan


def mask_of_paper(causal: bool, variant: str, part: str, length: int, block: int, summary: int) -> Tensor:
    """(K, K), by section 4.3. An encoder's: the same without j <= i, so that the strided one is symmetric."""
    i, j = torch.arange(length)[:, None], torch.arange(length)
    if variant == "strided":
        local, summaries = (i - j).abs() <= block, (i - j) % block == 0
    else:
        local, summaries = i // block == j // block, (j % block >= block - summary).expand(length, -1)
    seen = {"local": local, "summary": summaries, "both": local | summaries}[part]
    return seen & (j <= i) if causal else seen


def mask_of(text: str, causal: bool, time: int, keys: int) -> Tensor:
    """(1 or N, T, K), without the future in a causal model: back ends take that out."""
    values = plan(f"s[{text}]")[0].values
    [row] = chosen_variants(values)
    module = row.load()(SublayerOptions(WIDTH, 8, HEADS, values=values, is_causal=causal))
    mask = module.mask.dense(time, keys, torch.device("cpu"))
    return mask & torch.ones(time, keys, dtype=torch.bool).tril(keys - time) if causal else mask


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["strided", "fixed"]),
    st.sampled_from(["both", "local", "summary"]),
    st.booleans(),
    st.integers(1, 20),
    st.integers(1, 20),
    st.data(),
)
def test_sparse_masks_are_the_papers(variant, part, causal, keys, block, data):
    summary = data.draw(st.integers(1, block))
    time = data.draw(st.integers(1, keys)) if causal else keys
    text = f"{variant}={block},part={part}" + f",summary={summary}" * (variant == "fixed" and part != "local")
    expected = mask_of_paper(causal, variant, part, keys, block, summary)[keys - time :]
    assert torch.equal(mask_of(text, causal, time, keys), expected[None])


def test_heads_may_have_a_part_each():
    local, summary = (mask_of(f"fixed=4,part={part}", False, 9, 9) for part in ("local", "summary,summary=1"))
    assert torch.equal(mask_of("fixed=4,summary=1,heads=split", False, 9, 9), torch.cat([local, local, summary]))


class Masked(Attending):
    """Softmax over the keys that are shown; nothing where there are none. Of windows, each pair is looked at here."""

    def __init__(self, text: str, steps: tuple[int, ...] = (), **given):
        super().__init__(f"s[{text}]", **given)
        self.tokens = self.s.choices["window"].first if "global" in text else 0
        if steps:
            queries, keys = range(self.keys - self.time, self.keys), range(self.keys)
            pairs = [[[self.is_near(i, j, step) for j in keys] for i in queries] for step in steps]
            self.seen = torch.tensor(pairs)
        else:
            self.seen = mask_of(text, self.is_causal, self.time, self.keys)

    def is_near(self, query: int, key: int, step: int) -> bool:
        """In a window of 2, each step wide; global tokens are seen by all."""
        ahead = key - query
        near = ahead % step == 0 and abs(ahead) <= 2 * step and not (self.is_causal and ahead > 0)
        return near or key < self.tokens

    def weigh(self, q: Tensor, scores: Tensor, distances: Tensor) -> Tensor:
        shown = self.seen & scores.isfinite()
        scores = scores.masked_fill(~shown, -1e4)
        weights = (scores - scores.detach().amax(-1, keepdim=True)).exp() * shown
        return weights / weights.sum(-1, keepdim=True).clamp(min=1e-30)

    def attend(self, probabilities: Tensor, values: Tensor, sublayer: nn.Module, x_BKC: Tensor) -> Tensor:
        output = torch.einsum("bntk,bnkd->bntd", probabilities, values)
        if not self.tokens:
            return output
        choice = self.s.choices["window"]  # rows of global tokens come from their own projections
        q, k = (split(projection(self.x)) for projection in (choice.q_proj, choice.k_proj))
        v = split(sublayer.value_transforms["window"].v_proj(x_BKC))
        of_tokens = nn.functional.scaled_dot_product_attention(q[:, :, : self.tokens], k, v)
        return torch.cat([of_tokens, output[:, :, self.tokens :]], 2)


WINDOWS = {
    "window=2": (1, 1, 1),
    "window=2,dilation=2": (1, 2, 2),
    "window=2,dilation=3,dilated_heads=1": (1, 1, 3),
    "window=2,dilation=3,dilated_heads=3": (3, 3, 3),
}
SPARSE = ["strided=3", "fixed=4,summary=2", "fixed=4,summary=1,part=summary", "fixed=4,summary=1,heads=split"]


@padded_and_with_memory
@pytest.mark.parametrize("text", [*WINDOWS, *SPARSE])
@pytest.mark.parametrize("back_end", ["eager", "recompute", "materialize", "fused"])
def test_attention_is_that_of_the_mask(text, given, back_end):
    Masked(text, WINDOWS.get(text, ()), **given, back_end=back_end).assert_equations()


@pytest.mark.parametrize("back_end", ["eager", "recompute", "materialize", "fused"])
@pytest.mark.parametrize(
    ("text", "steps"), [("window=2,global=1", (1, 1, 1)), ("window=2,dilation=4,dilated_heads=3,global=2", (4, 4, 4))]
)
def test_global_tokens_see_all_and_all_see_them(text, steps, back_end):
    Masked(text, steps, time=13, back_end=back_end).assert_equations()


@pytest.mark.parametrize("settings", ["strided=3", "fixed=4,summary=2", "fixed=4,summary=1,heads=split"])
def test_a_causal_model_counts_from_its_memory(settings):
    """Segments of whole blocks with a memory of whole blocks give what one long segment does."""
    decoder, tokens, memory = make_decoder(f"s[{settings}]l", mem_len=12), random_tokens(2, 12), StreamMemory()
    whole, _ = decoder(tokens)
    parts = [decoder(part, memory)[0] for part in tokens.split(int(settings[settings.index("=") + 1]), 1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole)
