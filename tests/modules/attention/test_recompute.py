"""A bias that learns through torch's attention: the layout, the pieces and the numbers, on a processor."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from masked_attention import Case
from torch.nn.attention import SDPBackend

from lazyformer_fairseq.modules.attention import back_ends
from lazyformer_fairseq.modules.attention.back_ends import aligned, attention_with_learned_bias


def biased(batch: int, time: int, size: int, padded: bool, **given) -> Case:
    return Case(None, batch, time, size=size, parts={"bias", "right"} if padded else {"bias"}, **given)


def of_all_values(case: Case, bias: torch.Tensor) -> list[torch.Tensor]:
    return case.with_gradients([attention_with_learned_bias(case.q, case.k, v, bias) for v in case.values])


@settings(max_examples=30)
@given(
    batch=st.integers(1, 5),
    heads=st.integers(1, 3),
    time=st.integers(1, 19),
    size=st.sampled_from([1, 8, 12]),
    padded=st.booleans(),
    sequences_at_once=st.integers(1, 5),
    seed=st.integers(0, 1000),
)
def test_forward_and_all_gradients_are_those_of_eager(batch, heads, time, size, padded, sequences_at_once, seed):
    case = biased(batch, time, size, padded, heads=heads, seed=seed)
    expected = case.by("eager")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(back_ends, "PIECE_NUMBERS", sequences_at_once * heads * time * time)
        found = of_all_values(case, aligned(case.dense()))
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("keys", [1, 7, 8, 13, 16])
@pytest.mark.parametrize("offset", [0, 3])
def test_rows_of_a_bias_begin_where_the_kernel_reads_them(keys, offset):
    """As torch asks in check_tensor_shapes and aligned_tensor: strides of 8 numbers, the last one 1."""
    numbers = torch.randn(offset + 2 * 3 * 5 * keys, requires_grad=True)
    bias = numbers[offset:].view(2, 3, 5, keys)
    found = aligned(bias)
    assert torch.equal(found, bias)
    assert found.stride(-1) == 1 and found.storage_offset() % 8 == 0
    assert all(stride % 8 == 0 for stride in found.stride()[:-1])
    assert (found.data_ptr() == bias.data_ptr()) == (offset == 0 and keys % 8 == 0)
    (gradient,) = torch.autograd.grad(found.square().sum(), numbers)
    assert torch.equal(gradient[offset:], 2 * numbers[offset:])
    assert aligned(bias.transpose(-1, -2)).stride(-1) == 1  # no row lies straight


def test_all_sublayers_share_one_bias():
    """Laid out once in a pass; without the copy that was laid out otherwise."""
    case = biased(2, 13, 4, padded=True)
    case.scores._written.clear()
    first, second = (case.scores.with_own().dense(13, 13, case.q, aligned) for _ in range(2))
    assert first is second and first.stride(-1) == 1 and first.stride(-2) == 16
    assert len(case.scores._written) == 1
    torch.testing.assert_close(first, case.dense())


def test_pieces_are_as_many_sequences_as_the_limit_allows(monkeypatch):
    case, seen = biased(5, 8, 4, padded=False), []
    attention = back_ends.F.scaled_dot_product_attention

    def watched(q, k, v, attn_mask, dropout_p):
        seen.append((q.size(0), k.size(0), v.size(0), attn_mask.size(0)))
        return attention(q, k, v, attn_mask=attn_mask, dropout_p=dropout_p)

    monkeypatch.setattr(back_ends.F, "scaled_dot_product_attention", watched)
    monkeypatch.setattr(back_ends, "PIECE_NUMBERS", 2 * 2 * 8 * 8)
    attention_with_learned_bias(case.q, case.k, case.values[0], case.dense())
    assert seen == [(2, 2, 2, 1), (2, 2, 2, 1), (1, 1, 1, 1)]
    seen.clear()
    monkeypatch.setattr(back_ends, "PIECE_NUMBERS", 1)  # a sequence is not cut
    attention_with_learned_bias(case.q, case.k, case.values[0], case.dense().expand(5, -1, -1, -1))
    assert seen == [(1, 1, 1, 1)] * 5


def test_no_kernel_is_allowed_that_has_no_gradient_for_the_bias(monkeypatch):
    """cuDNN's, which torch prefers on some GPUs; and the memory-efficient one where nothing but the bias learns."""
    allowed, case = [], biased(1, 8, 8, padded=False)
    kept = back_ends.sdpa_kernel
    monkeypatch.setattr(back_ends, "sdpa_kernel", lambda kernels: allowed.append(kernels) or kept(kernels))
    attention_with_learned_bias(case.q, case.k, case.values[0], case.dense())
    attention_with_learned_bias(case.q.detach(), case.k.detach(), case.values[0].detach(), case.dense())
    assert allowed == [[SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], [SDPBackend.MATH]]


def test_it_compiles_to_one_graph():
    case = biased(2, 9, 8, padded=True, consumers=0)

    def attend(q, k, v, scores):
        biases = [scores.with_own().dense(q.size(-2), k.size(-2), q, aligned) for _ in range(2)]
        assert biases[0] is biases[1]
        return attention_with_learned_bias(q, k, v, biases[0])

    compiled = torch.compile(attend, fullgraph=True, backend="eager")
    found = case.with_gradients([compiled(case.q, case.k, case.values[0], case.scores)])
    torch.testing.assert_close(found, of_all_values(case, case.dense()), atol=1e-12, rtol=1e-9)
