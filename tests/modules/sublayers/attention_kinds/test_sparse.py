"""The Sparse Transformer's masks against the sets of section 4.3, and torch's attention with such a mask."""

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch.nn import functional as F

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.modules.networks.causal_decoder import CausalDecoder
from lazyformer_fairseq.modules.networks.encoder import Encoder
from lazyformer_fairseq.modules.networks.stack import StreamMemory
from lazyformer_fairseq.modules.sublayers.attention import merge_heads, split_heads
from lazyformer_fairseq.modules.sublayers.interface import SublayerOptions
from lazyformer_fairseq.patterns.attention_kinds import chosen_kinds
from lazyformer_fairseq.patterns.grammar import plan

HEADS, WIDTH = 2, 8


def of_paper(kind: str, part: str, length: int, block: int, summary: int) -> list[set[int]]:
    """A causal model's connectivity, equation by equation: for each i the set of j that it attends to."""
    sets = []
    for i in range(length):
        past = range(i + 1)
        if kind == "strided":
            parts = {
                "local": set(range(max(0, i - block), i + 1)),
                "summary": {j for j in past if (i - j) % block == 0},
            }
        else:
            parts = {
                "local": {j for j in past if j // block == i // block},
                "summary": {j for j in past if j % block in range(block - summary, block)},
            }
        sets.append(parts["local"] | parts["summary"] if part == "both" else parts[part])
    return sets


def mask_of_paper(causal: bool, kind: str, part: str, length: int, block: int, summary: int) -> torch.Tensor:
    """(K, K). An encoder's: what the same conditions give without j <= i, so that the strided one is symmetric."""
    mask = torch.zeros(length, length, dtype=torch.bool)
    for i, seen in enumerate(of_paper(kind, part, length, block, summary)):
        mask[i, list(seen)] = True
    if causal:
        return mask
    if kind == "strided":
        return mask | mask.T
    of_last = of_paper(kind, part, length + block, block, summary)  # a query far behind sees all summaries
    for i in range(length):
        last_of_block = i - i % block + block - 1
        mask[i, [j for j in of_last[last_of_block] if j < length]] = True
        if part != "local":
            mask[i, [j for j in range(length) if j % block >= block - summary]] = True
    return mask


def mask_of(text: str, causal: bool, heads: int = HEADS):
    values = plan(f"s[{text}]")[0].values
    [row] = chosen_kinds(values)
    return row.load()(SublayerOptions(WIDTH, 8, heads, values=values, is_causal=causal)).mask


@hypothesis_settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["strided", "fixed"]),
    st.sampled_from(["both", "local", "summary"]),
    st.booleans(),
    st.integers(1, 20),
    st.integers(1, 20),
    st.data(),
)
def test_masks_are_the_papers(kind, part, causal, keys, block, data):
    summary = data.draw(st.integers(1, block))
    time = data.draw(st.integers(1, keys)) if causal else keys
    settings = f"{kind}={block},part={part}"
    settings += f",summary={summary}" if kind == "fixed" and part != "local" else ""
    found = mask_of(settings, causal).dense(time, keys, torch.device("cpu"))
    if causal:  # back ends take the future out
        found = found & torch.ones(time, keys, dtype=torch.bool).tril(keys - time)
    expected = mask_of_paper(causal, kind, part, keys, block, summary)[keys - time :]
    assert torch.equal(found, expected[None])


def test_heads_may_have_a_part_each():
    local, summary = (mask_of(f"fixed=4,part={part}", False) for part in ("local", "summary,summary=1"))
    masks = [mask.dense(9, 9, torch.device("cpu")) for mask in (local, summary)]
    split = mask_of("fixed=4,summary=1,heads=split", False, heads=3).dense(9, 9, torch.device("cpu"))
    assert torch.equal(split, torch.cat([masks[0], masks[0], masks[1]]))
    with pytest.raises(UserError, match="heads=split .* this model has one head"):
        Encoder("s[strided=2,heads=split]", 11, 8, 8, 1)


def test_two_sublayers_interleave_the_parts():
    """Each step position reaches every other one: a summary above, its surroundings below."""
    for kind in ("strided=4", "fixed=4"):
        summary = ",summary=1" if kind == "fixed=4" else ""
        settings = (f"{kind},part=local", f"{kind},part=summary{summary}")
        local, far = (mask_of(text, False).dense(16, 16, torch.device("cpu"))[0].long() for text in settings)
        assert ((far @ local) > 0).all()


def random_weights(network):
    torch.manual_seed(1)
    for weight in network.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    return network.double()


@pytest.mark.parametrize("settings", ["strided=3", "fixed=4,summary=2", "fixed=4,summary=1,part=summary"])
@pytest.mark.parametrize("padded", ["", "right", "anywhere"])
def test_an_encoders_attention_is_torchs_with_that_mask(settings, padded):
    """A lazy block too, and all gradients; of a query that sees nothing the output is zero."""
    encoder = random_weights(Encoder(f"s[{settings}]l", 11, WIDTH, 8, HEADS, 9, relative_position_buckets=0))
    x = torch.randn(2, 9, WIDTH, dtype=torch.double, requires_grad=True)
    mask = mask_of(settings, False).dense(9, 9, torch.device("cpu")).expand(2, HEADS, 9, 9)
    shared = encoder.context(x)
    if padded:
        padding = torch.zeros(2, 9, dtype=torch.bool)
        padding[1, 4:] = True
        padding[1, 2] = padded == "anywhere"
        shared = shared._replace(scores=shared.scores.with_padding(padding, padded == "right"))
        mask = mask & ~padding[:, None, None]
    first, second = (sublayer.inner for sublayer in encoder.sublayers)
    y, handed_on = first(x, {}, shared)
    z, _ = second(x, handed_on, shared)

    q, k, v = (split_heads(part, HEADS) for part in first.qkv_proj(x).chunk(3, -1))
    attended = [F.scaled_dot_product_attention(q, k, values, mask) for values in (v, split_heads(second.v_proj(x), 2))]
    expected = [layer.out_proj(merge_heads(each)) for layer, each in zip((first, second), attended, strict=True)]
    leaves = [x, *first.parameters(), *second.parameters()]
    weight = torch.randn_like(y)
    assert y.isfinite().all()
    for found, wanted in zip((y, z), expected, strict=True):
        torch.testing.assert_close(found, wanted)
    ours, theirs = (torch.autograd.grad(((one + 2 * two) * weight).sum(), leaves) for one, two in ((y, z), expected))
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their)


@pytest.mark.parametrize("settings", ["strided=3", "fixed=4,summary=2", "fixed=4,summary=1,heads=split"])
def test_a_causal_model_counts_from_its_memory(settings):
    """Segments of whole blocks with a memory of whole blocks give what one long segment does."""
    decoder = random_weights(
        CausalDecoder(f"s[{settings}]l", 11, WIDTH, 8, HEADS, mem_len=12, attention_backend="eager")
    )
    tokens = torch.randint(0, 11, (2, 12))
    whole, _ = decoder(tokens)
    memory = StreamMemory()
    block = int(settings[settings.index("=") + 1])
    parts = [decoder(part, memory)[0] for part in tokens.split(block, 1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    changed = tokens.clone()
    changed[:, 7] = (tokens[:, 7] + 1) % 11
    assert torch.equal(decoder(changed)[0][:, :7], whole[:, :7])
    full = random_weights(CausalDecoder("sl", 11, WIDTH, 8, HEADS, mem_len=12, attention_backend="eager"))
    full.load_state_dict(decoder.state_dict())
    assert not torch.allclose(full(tokens)[0], whole)
