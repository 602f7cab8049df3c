"""The back-end interface. A back end computes attention and reports which calls it does not support."""

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple, Optional, Protocol

import torch
from torch import Tensor

from lazyformer_fairseq.modules.attention.masks import AttentionMask
from lazyformer_fairseq.modules.attention.scores import Scores
from lazyformer_fairseq.modules.processor import compute_capability

LOWEST_CAPABILITY = (8, 0)  # the lowest compute capability that Triton supports
USES_TRITON = True  # False in exported models, which do not include the Triton kernels
# Reasons why several back ends do not support a call.
NO_DROPOUT = "it does not support attention dropout; use --attention-dropout 0"
NO_ENTMAX = "it supports softmax but not entmax"


@dataclass(frozen=True, eq=False)
class AttentionInputs:
    """The inputs of an attention computation.

    Attributes:
        q_BNTD, k_BNKD, v_BNKD: The queries, keys and values. Queries and keys may have a different head size than
            values. The scores are divided by the square root of the queries' head size. If that size is 0, the
            distribution depends only on the additions to the scores.
        scores: The additions to the scores, and the keys that each query sees.
        dropout: The dropout rate applied to the distribution. An ``s`` passes on the distribution without dropout.
        consumers: The number of ``l`` sublayers that will reuse the distribution.
    """

    q_BNTD: Tensor
    k_BNKD: Tensor
    v_BNKD: Tensor
    scores: Scores
    dropout: float = 0.0
    consumers: int = 0

    @property
    def device(self) -> str:
        """The device type, such as "cuda"."""
        return self.q_BNTD.device.type

    @property
    def dtype(self) -> torch.dtype:
        """The data type of the values."""
        return self.v_BNKD.dtype


class AttentionCall(NamedTuple):
    """A description of an attention computation for back ends: its sizes and its features.

    Attributes:
        batch, heads, time, keys: B, N, T and K. K includes persistent keys.
        query_size: The head size D of queries and keys; 0 if the distribution depends only on learned scores.
        value_size: The head size D of values.
        mask: The keys that queries see; None for all keys.
        num_extra: The number of keys that are not tokens.
        has_bias: Whether a learned bias per distance is added.
        has_positions: Whether Transformer-XL's position scores are added.
        has_dense: Whether learned scores are added for every query-key pair.
        has_entmax: Whether entmax replaces softmax.
        has_given: Whether each sequence has its own set of keys that all of its queries see.
        is_causal: Whether later keys are hidden from queries.
        is_padded: Whether some keys are padding.
        is_training: Whether gradients will be computed.
        dropout: The dropout rate applied to the distribution.
        consumers: The number of sublayers above that reuse the distribution.
    """

    batch: int = 1
    heads: int = 1
    time: int = 1
    keys: int = 1
    query_size: int = 64
    value_size: int = 64
    mask: Optional[AttentionMask] = None
    num_extra: int = 0
    has_bias: bool = False
    has_positions: bool = False
    has_dense: bool = False
    has_entmax: bool = False
    has_given: bool = False
    is_causal: bool = False
    is_padded: bool = False
    is_training: bool = True
    dropout: float = 0.0
    consumers: int = 0

    @classmethod
    def of(cls, given: AttentionInputs) -> "AttentionCall":
        """Describe the call with these inputs."""
        scores = given.scores
        batch, heads, time, query_size = given.q_BNTD.shape
        return cls(
            batch=batch,
            heads=heads,
            time=time,
            keys=given.k_BNKD.size(2),
            query_size=query_size,
            value_size=given.v_BNKD.size(3),
            mask=scores.mask,
            num_extra=scores.extra,
            has_bias=scores.table_KN is not None,
            has_positions=scores.position_queries_BNTD is not None,
            has_dense=scores.learned_BNTK is not None,
            has_entmax=scores.exponent_N is not None,
            has_given=scores.seen_BK is not None,
            is_causal=scores.is_causal,
            is_padded=scores.lengths_B is not None,
            is_training=torch.is_grad_enabled(),
            dropout=given.dropout,
            consumers=given.consumers,
        )

    @property
    def learns_additions(self) -> bool:
        """True if an addition to the scores may require a gradient."""
        return self.is_training and (self.has_bias or self.has_positions or self.has_dense)


def first_reason(reasons: Iterable[tuple[object, str]]) -> Optional[str]:
    """Return the first reason with a true condition, or None if there is none.

    Args:
        reasons: Pairs of a condition and a reason.
    """
    return next((reason for holds, reason in reasons if holds), None)


@functools.cache
def has_triton() -> bool:
    """Return whether Triton may be used and is installed in a version that accepts tuples as kernel arguments."""
    if not USES_TRITON:
        return False
    try:
        major, minor, *_ = version("triton").split(".")
    except PackageNotFoundError:
        return False
    return (int(major), int(minor)) >= (3, 3)


def why_no_triton() -> Optional[str]:
    """Return why Triton kernels cannot run on the current GPU; None if they can, or if there is no GPU."""
    if not torch.cuda.is_available():
        return None
    capability = compute_capability()
    if capability < LOWEST_CAPABILITY:
        return f"it needs a GPU with compute capability 8.0 or higher, and this one has {capability[0]}.{capability[1]}"
    if not has_triton():
        return "it needs triton 3.3 or newer"
    return None


class ReusableAttention(Protocol):
    """A distribution, in any form, that an ``s`` passes to the ``l`` sublayers above it."""

    def attend(self, v_BNKD: Tensor, dropout: float) -> Tensor:
        """Compute P V (B, N, T, D) with dropout on P. Each call draws a new dropout mask."""


class BackEnd(Protocol):
    """A way to compute attention. The instances are in :data:`~lazyformer_fairseq.modules.attention.BACK_ENDS`."""

    def why_not(self, call: AttentionCall, device: str, dtype: torch.dtype) -> Optional[str]:
        """Return why the back end does not support a call on a device type; None if it does."""

    def attend(self, given: AttentionInputs) -> tuple[Tensor, ReusableAttention]:
        """Compute attention; see :func:`lazyformer_fairseq.modules.attention.attend`."""
