"""The back ends, by name, and the function that computes an attention by one of them.

``eager``: torch writes scores and distribution to memory and differentiates each step. The ``s`` of ``materialize`` and
``fused`` gathers the gradients of its block (:mod:`.lazy_block`). ``materialize`` keeps the distribution in the values'
precision, and each ``l`` is one product; on a processor it computes what the mask shows, and little more. ``fused``
keeps no distribution: Triton computes it anew on a GPU, :mod:`.blockwise` on a processor. ``recompute``: every
attention is torch's fused one over the Q and K of its ``s``. torch's kernels differ in what they take of a bias that
learns, a dense matrix to them:

| device | kernel | gradient of the bias | dropout |
|---|---|---|---|
| CPU | flash | none: our own ``fused`` takes its place | none: unfused |
| GPU | memory-efficient, compute capability 5.0 and above | yes | yes |
| GPU | flash (no bias at all) and cuDNN's, 8.0 and above | none | yes |

Source: can_use_mem_efficient_attention and its neighbours in torch's
aten/src/ATen/native/transformers/cuda/sdp_utils.cpp.
"""

import functools
import math
import os
from typing import NamedTuple, Optional

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from typing_extensions import override

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.modules.attention import counted, lazy_block
from lazyformer_fairseq.modules.attention.blockwise import InChunks
from lazyformer_fairseq.modules.attention.flex import Flex
from lazyformer_fairseq.modules.attention.interface import (
    NO_DROPOUT,
    NO_ENTMAX,
    AttentionCall,
    AttentionInputs,
    BackEnd,
    ReusableAttention,
    first_reason,
    has_triton,
    why_no_triton,
)
from lazyformer_fairseq.modules.attention.lazy_block import BlockKernels
from lazyformer_fairseq.modules.attention.scores import Scores
from lazyformer_fairseq.modules.attention.weights import distribution

# The memory-efficient kernel writes a gradient of the bias for each sequence, and torch sums them afterwards: so many
# numbers at a time, unless one sequence alone has more. 128 MiB in half precision.
CHUNK_NUMBERS = 2**26
ALIGNMENT = 8  # numbers: where that kernel wants the rows of a bias to begin
LARGEST_HEAD = 128  # of the Triton kernels
# By the name of their operators; those of Triton are made when they are first needed.
KERNELS = {
    "materialize": BlockKernels("materialize", InChunks(stores=True)),
    "blockwise": BlockKernels("blockwise", InChunks(stores=False)),
}


class StoredDistribution(NamedTuple):
    """A distribution in memory, from before dropout."""

    probabilities: Tensor  # (B, N, T, K)

    def attend(self, v_BNKD: Tensor, dropout: float) -> Tensor:
        """Return P V (B, N, T, D); each call draws its own dropout mask."""
        return torch.matmul(F.dropout(self.probabilities, dropout), v_BNKD)


class Eager(BackEnd):
    """Each step by torch, which writes scores and distribution.

    It computes everything: the reference, the fastest for tiny models, and the only one for entmax.
    """

    @override
    def why_not(self, call: AttentionCall, device: str, dtype: torch.dtype) -> Optional[str]:
        return None

    @override
    def attend(self, given: AttentionInputs) -> tuple[Tensor, StoredDistribution]:
        q = given.q_BNTD
        k = given.k_BNKD
        added = given.scores.dense(q.size(-2), k.size(-2), q)
        scale = math.sqrt(max(1, q.size(-1)))  # queries without numbers: all products are 0
        scores_BNTK = torch.matmul(q / scale, k.transpose(-2, -1))
        if added is not None:
            scores_BNTK = scores_BNTK + added
        probabilities = distribution(
            scores_BNTK,
            exponent_N=given.scores.exponent_N,
            dtype=given.dtype,
            # Of a row that sees nothing, softmax makes NaN; torch's fused attention and this one, zeros.
            has_blind_rows=given.scores.mask is not None,
        )
        stored = StoredDistribution(probabilities)
        return stored.attend(given.v_BNKD, given.dropout), stored


@functools.cache
def triton_kernels() -> BlockKernels:
    """Return the Triton kernels as operators."""
    from lazyformer_fairseq.modules.attention.triton_kernels import InTriton

    return BlockKernels("triton", InTriton())


def _why_not_in_chunks(call: AttentionCall) -> Optional[str]:
    """Return why :mod:`.blockwise` does not compute such a call on a processor; None if it does."""
    hides_some = call.mask is not None or call.num_extra
    return first_reason(
        [
            (call.dropout, NO_DROPOUT),
            (call.has_entmax, NO_ENTMAX),
            (call.has_dense and hides_some, "it adds scores of each pair where there is no mask or persistent key"),
        ]
    )


def _why_not_in_triton(call: AttentionCall, dtype: torch.dtype) -> Optional[str]:
    """Return why the Triton kernels do not compute such a call; None if they do."""
    has_one_size = call.query_size == call.value_size <= LARGEST_HEAD
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    reason = first_reason(
        [
            (call.dropout, NO_DROPOUT),
            (call.has_entmax, NO_ENTMAX),
            (call.mask is not None or call.num_extra, "on a GPU masks and persistent keys are for flex"),
            (call.is_causal or call.has_positions, "on a GPU it is for encoders"),
            (call.has_dense, "on a GPU it adds no scores of each pair"),
            (call.time != call.keys, "on a GPU it takes as many keys as queries"),
            (not has_one_size, f"on a GPU queries and values need one size, {LARGEST_HEAD} at most"),
            (dtype == torch.float64, "on a GPU it computes in single precision at most"),
            (is_deterministic, "on a GPU it adds gradients up in any order, and torch is to be deterministic"),
        ]
    )
    return reason or why_no_triton()


class Materialize(BackEnd):
    """The fastest on a processor for training, with a mask or without, where the distributions fit the memory."""

    @override
    def why_not(self, call: AttentionCall, device: str, dtype: torch.dtype) -> Optional[str]:
        if device != "cpu":
            return "it computes chunk by chunk, for a processor's cache"
        if call.has_given:
            return "it keeps no distribution whose keys each sequence chooses, as global=given does"
        return _why_not_in_chunks(call)

    @override
    def attend(self, given: AttentionInputs) -> tuple[Tensor, lazy_block.SharedAttention]:
        return lazy_block.attend(KERNELS["materialize"], given)


class Fused(BackEnd):
    """The fastest on a GPU with a learned bias; on a processor the least memory for one, and for masks of one layer."""

    @override
    def why_not(self, call: AttentionCall, device: str, dtype: torch.dtype) -> Optional[str]:
        if device == "cpu":
            return _why_not_in_chunks(call)
        return _why_not_in_triton(call, dtype)

    @override
    def attend(self, given: AttentionInputs) -> tuple[Tensor, lazy_block.SharedAttention]:
        takes_triton = given.device != "cpu"
        if os.environ.get("TRITON_INTERPRET") == "1" and has_triton():
            takes_triton = _why_not_in_triton(AttentionCall.of(given), given.dtype) is None
        if takes_triton:
            kernels = triton_kernels()
        else:
            kernels = KERNELS["blockwise"]
        return lazy_block.attend(kernels, given)


class RecomputedAttention:
    """Queries and keys to attend with anew."""

    def __init__(self, q_BNTD: Tensor, k_BNKD: Tensor, scores: Scores):
        self.q_BNTD = q_BNTD
        self.k_BNKD = k_BNKD
        self.scores = scores
        self._learns = scores.is_learning
        self._added: Optional[Tensor] = None
        if scores.position_queries_BNTD is not None:  # written once for all consumers
            self._added = self._dense()

    def attend(self, v_BNKD: Tensor, dropout: float) -> Tensor:
        """Return softmax(QK^T / sqrt(D) + additions) V (B, N, T, D); each call draws its own dropout mask."""
        if self._added is None:
            added = self._dense()
        else:
            added = self._added
        # Queries that keep what they were before a turn are wider than values, and torch fuses equal sizes alone.
        size = v_BNKD.size(-1)
        if self.q_BNTD.size(-1) > size:
            v_BNKD = F.pad(v_BNKD, (0, self.q_BNTD.size(-1) - size))
        if self._learns and added is not None and v_BNKD.device.type == "cuda":
            output = attention_with_learned_bias(self.q_BNTD, self.k_BNKD, v_BNKD, added, dropout)
        else:
            output = F.scaled_dot_product_attention(
                self.q_BNTD,
                self.k_BNKD,
                v_BNKD,
                attn_mask=added,
                dropout_p=dropout,
            )
        return output[..., :size]

    def _dense(self) -> Optional[Tensor]:
        layout = None
        if self._learns and self.q_BNTD.device.type == "cuda":
            layout = aligned
        added = self.scores.dense(self.q_BNTD.size(-2), self.k_BNKD.size(-2), self.q_BNTD, layout)
        if added is not None and added.dim() == 3:
            return added[None]  # torch fuses no three axes on a processor
        return added


class Recompute(BackEnd):
    """The fastest for inference, on GPUs without a learned bias, and with dropout in single layers."""

    @override
    def why_not(self, call: AttentionCall, device: str, dtype: torch.dtype) -> Optional[str]:
        if call.has_entmax:
            return NO_ENTMAX
        if call.query_size < call.value_size:
            return "torch's fused attention multiplies queries and keys, and here there are none"
        return None

    @override
    def attend(self, given: AttentionInputs) -> tuple[Tensor, ReusableAttention]:
        """Attend by torch's kernel; by ``fused`` where that has none whose additions learn."""
        if given.scores.is_learning and given.device == "cpu" and _why_not_in_chunks(AttentionCall.of(given)) is None:
            return FUSED.attend(given)
        attention = RecomputedAttention(given.q_BNTD, given.k_BNKD, given.scores)
        return attention.attend(given.v_BNKD, given.dropout), attention


FUSED = Fused()
BACK_ENDS: dict[str, BackEnd] = {
    "eager": Eager(),
    "materialize": Materialize(),
    "recompute": Recompute(),
    "fused": FUSED,
    "flex": Flex(),
}


def attend(given: AttentionInputs, back_end: str) -> tuple[Tensor, ReusableAttention]:
    """Compute softmax(QK^T / sqrt(D) + additions to scores) V, and the distribution for its consumers.

    Args:
        given: the inputs.
        back_end: a name of :data:`BACK_ENDS`.

    Raises:
        UserError: the back end does not compute this.
    """
    if given.q_BNTD.is_meta:
        return counted.attend(given)
    call = AttentionCall.of(given)
    why = BACK_ENDS[back_end].why_not(call, given.device, given.dtype)
    if why is not None:
        able = ["auto"]
        for name, each in BACK_ENDS.items():
            if each.why_not(call, given.device, given.dtype) is None:
                able.append(name)
        raise UserError(f"--attention-backend {back_end}: {why}; choose from {', '.join(able)}")
    return BACK_ENDS[back_end].attend(given)


def attention_with_learned_bias(
    q_BNTD: Tensor,
    k_BNKD: Tensor,
    v_BNKD: Tensor,
    added: Tensor,
    dropout: float = 0.0,
) -> Tensor:
    """Compute torch's attention with additions that get a gradient, by its memory-efficient kernel where that runs.

    Elsewhere, as on a CPU, torch writes the distribution. The sequences go through in pieces of
    :data:`CHUNK_NUMBERS`; torch.compile sees one piece, as pieces would be a graph for each size.

    Args:
        q_BNTD: queries.
        k_BNKD: keys.
        v_BNKD: values.
        added: broadcastable to (B, N, T, K), in the precision of the queries.
        dropout: on the distribution.

    Returns:
        (B, N, T, D).
    """
    # Flash takes no additions. cuDNN's is preferred on some GPUs, and has no gradient for them. And where nothing but
    # the additions learns torch's forward pass leaves out what the memory-efficient backward pass reads.
    kernels = [SDPBackend.MATH]
    if q_BNTD.requires_grad or k_BNKD.requires_grad or v_BNKD.requires_grad:
        kernels = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(kernels):
        if torch.compiler.is_compiling():
            return F.scaled_dot_product_attention(q_BNTD, k_BNKD, v_BNKD, attn_mask=added, dropout_p=dropout)
        batch, heads, time, _ = q_BNTD.shape
        at_once = max(1, CHUNK_NUMBERS // (heads * time * k_BNKD.size(2)))
        outputs = []
        for first in range(0, batch, at_once):
            some = slice(first, first + at_once)
            bias = added
            if len(added) == batch:
                bias = added[some]
            output = F.scaled_dot_product_attention(
                q_BNTD[some],
                k_BNKD[some],
                v_BNKD[some],
                attn_mask=bias,
                dropout_p=dropout,
            )
            outputs.append(output)
        if len(outputs) == 1:
            return outputs[0]
        return torch.cat(outputs)


def aligned(added: Tensor) -> Tensor:
    """Return the same numbers, laid out so that the memory-efficient kernel reads them as they are.

    It wants rows without gaps that begin at multiples of :data:`ALIGNMENT` numbers. torch would copy others in each
    call, and knows nothing of where the first one begins.
    """
    if torch.compiler.is_compiling():  # it lays out anew what it computes, and torch copies the rest
        return added
    *strides, stride_of_keys = added.stride()
    starts = [*strides, added.storage_offset()]
    if stride_of_keys == 1 and all(start % ALIGNMENT == 0 for start in starts):
        return added
    keys = added.size(-1)
    padded = F.pad(added.contiguous(), (0, -keys % ALIGNMENT))
    return padded[..., :keys]


def has_kernel(precision: torch.dtype, head_size: int, capability: tuple[int, int]) -> bool:
    """Return whether the memory-efficient kernel takes this on a GPU of that compute capability."""
    lowest_capability = (5, 0)
    if precision == torch.bfloat16:
        lowest_capability = (8, 0)
    if precision == torch.float32:
        multiple = 4
    elif precision in (torch.float16, torch.bfloat16):
        multiple = 8
    else:
        return False
    return capability >= lowest_capability and head_size % multiple == 0
