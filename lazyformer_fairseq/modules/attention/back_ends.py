"""The back ends, by name, and the function that computes attention with one of them.

- In ``eager``, torch writes the scores and the distribution to memory, and differentiates each step.
- ``materialize`` keeps the distribution in the precision of the values, so each ``l`` needs only one matmul. It runs
  only on CPUs, and skips most of the query-key pairs that a mask hides.
- ``fused`` keeps no distribution. Triton recomputes it on a GPU, and :mod:`.blockwise` on a CPU.
- ``recompute`` calls torch's fused attention in every sublayer of a block, with the Q and K of the block's ``s``.
- ``flex`` is torch's FlexAttention; see :mod:`.flex`.

In ``materialize`` and ``fused``, the ``s`` computes most gradients of its lazy block, and each ``l`` computes only the
gradient of its own values (:mod:`.lazy_block`). In ``recompute``, a learned bias is a dense matrix, and torch's kernels
differ in their support for it:

| device | kernel | gradient of the bias | dropout |
|---|---|---|---|
| CPU | flash | no, so ``recompute`` calls our ``fused`` | no, so torch uses an unfused kernel |
| GPU | memory-efficient, compute capability 5.0 and above | yes | yes |
| GPU | flash (which supports no bias) and cuDNN, compute capability 8.0 and above | no | yes |

Source: can_use_mem_efficient_attention and the functions next to it in torch's
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

# The memory-efficient kernel writes a separate bias gradient for each sequence, and torch sums these gradients
# afterward. At most this many elements (128 MiB in half precision) are written at once, unless a single sequence has
# more.
CHUNK_NUMBERS = 2**26
ALIGNMENT = 8  # elements; the memory-efficient kernel requires bias rows to start at multiples of this
LARGEST_HEAD = 128  # the largest head size supported by the Triton kernels
# The CPU kernels, by the names of their operators. The Triton kernels are created on first use.
KERNELS = {
    "materialize": BlockKernels("materialize", InChunks(stores=True)),
    "blockwise": BlockKernels("blockwise", InChunks(stores=False)),
}


class StoredDistribution(NamedTuple):
    """A distribution stored in memory, without dropout."""

    probabilities: Tensor  # (B, N, T, K)

    def attend(self, v_BNKD: Tensor, dropout: float) -> Tensor:
        """Compute P V (B, N, T, D); each call draws a new dropout mask."""
        return torch.matmul(F.dropout(self.probabilities, dropout), v_BNKD)


class Eager(BackEnd):
    """The back end ``eager``: torch computes each step and writes the scores and the distribution to memory.

    It supports every call and is the reference for the other back ends. It is the fastest back end for tiny models, and
    the only one that supports entmax.
    """

    @override
    def why_not(self, call: AttentionCall, device: str, dtype: torch.dtype) -> Optional[str]:
        return None

    @override
    def attend(self, given: AttentionInputs) -> tuple[Tensor, StoredDistribution]:
        q = given.q_BNTD
        k = given.k_BNKD
        added = given.scores.dense(time=q.size(-2), keys=k.size(-2), like=q)
        scale = math.sqrt(max(1, q.size(-1)))  # if the size is 0, QK^T is 0
        scores_BNTK = torch.matmul(q / scale, k.transpose(-2, -1))
        if added is not None:
            scores_BNTK = scores_BNTK + added
        probabilities = distribution(
            scores_BNTK,
            exponent_N=given.scores.exponent_N,
            dtype=given.dtype,
            # Softmax would return NaN for a query that sees no key. Like torch's fused attention, we return zeros.
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
    """Return why :mod:`.blockwise` does not support a call on a CPU; None if it does."""
    hides_some = call.mask is not None or call.num_extra
    return first_reason(
        [
            (call.dropout, NO_DROPOUT),
            (call.has_entmax, NO_ENTMAX),
            (call.has_dense and hides_some, "it supports learned scores only without masks and persistent keys"),
        ]
    )


def _why_not_in_triton(call: AttentionCall, dtype: torch.dtype) -> Optional[str]:
    """Return why the Triton kernels do not support a call; None if they do."""
    has_one_size = call.query_size == call.value_size <= LARGEST_HEAD
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    reason = first_reason(
        [
            (call.dropout, NO_DROPOUT),
            (call.has_entmax, NO_ENTMAX),
            (call.mask is not None or call.num_extra, "on a GPU only flex supports masks and persistent keys"),
            (call.is_causal or call.has_positions, "on a GPU it only supports encoders"),
            (call.has_dense, "on a GPU it does not support learned scores"),
            (call.time != call.keys, "on a GPU it needs as many keys as queries"),
            (not has_one_size, f"on a GPU it needs queries and values of the same size, at most {LARGEST_HEAD}"),
            (dtype == torch.float64, "on a GPU it does not support double precision"),
            (is_deterministic, "on a GPU its gradients are nondeterministic, which torch is set to forbid"),
        ]
    )
    return reason or why_no_triton()


class Materialize(BackEnd):
    """The back end ``materialize``, the fastest for training on a CPU if the distributions fit into memory."""

    @override
    def why_not(self, call: AttentionCall, device: str, dtype: torch.dtype) -> Optional[str]:
        if device != "cpu":
            return "it runs only on CPUs, because it computes chunks that fit into a CPU's cache"
        if call.has_given:
            return "it cannot store a distribution if the visible keys differ between sequences, as with global=given"
        return _why_not_in_chunks(call)

    @override
    def attend(self, given: AttentionInputs) -> tuple[Tensor, lazy_block.SharedAttention]:
        return lazy_block.attend(KERNELS["materialize"], given)


class Fused(BackEnd):
    """The back end ``fused``, which does not store the distribution.

    On a GPU it is the fastest back end for a learned bias. On a CPU it needs the least memory for a learned bias, and
    it is the fastest back end for masks outside lazy blocks.
    """

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
    """The queries and keys of an ``s``, from which each consumer recomputes the attention."""

    def __init__(self, q_BNTD: Tensor, k_BNKD: Tensor, scores: Scores):
        self.q_BNTD = q_BNTD
        self.k_BNKD = k_BNKD
        self.scores = scores
        self._learns = scores.is_learning
        self._added: Optional[Tensor] = None
        if scores.position_queries_BNTD is not None:  # computed only once for all consumers
            self._added = self._dense()

    def attend(self, v_BNKD: Tensor, dropout: float) -> Tensor:
        """Compute softmax(QK^T / sqrt(D) + additions) V (B, N, T, D); each call draws a new dropout mask."""
        if self._added is None:
            added = self._dense()
        else:
            added = self._added
        # Queries that also contain their unrotated copies are wider than the values, but torch fuses attention only if
        # both have the same size.
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
        added = self.scores.dense(
            time=self.q_BNTD.size(-2),
            keys=self.k_BNKD.size(-2),
            like=self.q_BNTD,
            layout=layout,
        )
        if added is not None and added.dim() == 3:
            return added[None]  # on a CPU torch does not fuse attention with a 3D mask
        return added


class Recompute(BackEnd):
    """The back end ``recompute``, which uses torch's fused attention.

    It is the fastest back end for inference, for models without a learned bias on a GPU, and for dropout outside lazy
    blocks.
    """

    @override
    def why_not(self, call: AttentionCall, device: str, dtype: torch.dtype) -> Optional[str]:
        if call.has_entmax:
            return NO_ENTMAX
        if call.query_size < call.value_size:
            return "torch's fused attention needs queries and keys, but here learned scores replace them"
        return None

    @override
    def attend(self, given: AttentionInputs) -> tuple[Tensor, ReusableAttention]:
        """Compute attention with torch's kernel, or with ``fused`` if torch has no kernel for learned additions."""
        if given.scores.is_learning and given.device == "cpu":
            call = AttentionCall.of(given)
            if _why_not_in_chunks(call) is None:
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
    """Compute softmax(QK^T / sqrt(D) + additions to scores) V and the distribution for the consumers.

    Args:
        given: The inputs.
        back_end: The name of a back end in :data:`BACK_ENDS`.

    Returns:
        The output (B, N, T, D) and the distribution.

    Raises:
        UserError: If the back end does not support the call.
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
    """Compute attention with torch's fused kernels when the additions to the scores require a gradient.

    torch uses its memory-efficient kernel where available. Elsewhere, such as on a CPU, it writes the distribution to
    memory. Sequences are processed in chunks of at most :data:`CHUNK_NUMBERS` scores, except under torch.compile, which
    would compile a graph for each chunk size.

    Args:
        q_BNTD: The queries.
        k_BNKD: The keys.
        v_BNKD: The values.
        added: The additions to the scores, broadcastable to (B, N, T, K), in the data type of the queries.
        dropout: The dropout rate applied to the distribution.

    Returns:
        The output (B, N, T, D).
    """
    # Flash attention supports no additions. cuDNN's kernel, which torch prefers on some GPUs, has no gradient for them.
    # If only the additions require a gradient, torch's forward pass does not save the tensors that the memory-efficient
    # backward pass needs.
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
    """Convert additions to a memory layout that the memory-efficient kernel can read without a copy.

    The kernel requires contiguous rows that start at multiples of :data:`ALIGNMENT` elements. torch copies other
    layouts in each call, but does not check where the first row starts.
    """
    if torch.compiler.is_compiling():  # the compiler chooses the layouts of tensors that it computes
        return added
    *strides, stride_of_keys = added.stride()
    starts = [*strides, added.storage_offset()]
    if stride_of_keys == 1 and all(start % ALIGNMENT == 0 for start in starts):
        return added
    keys = added.size(-1)
    padded = F.pad(added.contiguous(), (0, -keys % ALIGNMENT))
    return padded[..., :keys]


def has_kernel(precision: torch.dtype, head_size: int, capability: tuple[int, int]) -> bool:
    """Return whether the memory-efficient kernel supports a data type and head size at a GPU's compute capability."""
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
