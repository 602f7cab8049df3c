"""The interface of back ends: ways to compute attention, each of which says itself what it cannot compute."""

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

LOWEST_CAPABILITY = (8, 0)  # of a GPU: Triton supports none below
# Reasons that several back ends give.
NO_DROPOUT = "it has no attention dropout; give --attention-dropout 0"
NO_ENTMAX = "it computes softmax, not entmax"


@dataclass(frozen=True, eq=False)
class AttentionInputs:
    """Everything that an attention is computed from.

    Attributes:
        q_BNTD, k_BNKD, v_BNKD: queries, keys and values. Queries and keys may have another size than values; its root
            divides their products. Without numbers (0) what is added to scores makes the distribution alone.
        scores: what to add, and which keys a query may look at.
        dropout: on the distribution; an ``s`` hands on the one from before it.
        consumers: how many ``l`` will read the distribution.
    """

    q_BNTD: Tensor
    k_BNKD: Tensor
    v_BNKD: Tensor
    scores: Scores
    dropout: float = 0.0
    consumers: int = 0

    @property
    def device(self) -> str:
        """The type of the device."""
        return self.q_BNTD.device.type

    @property
    def dtype(self) -> torch.dtype:
        """The precision of values."""
        return self.v_BNKD.dtype


class AttentionCall(NamedTuple):
    """One attention as a back end sees it: its sizes, and what shapes its distribution.

    Attributes:
        batch, heads, time, keys: B, N, T, K; persistent keys count.
        query_size: D of queries and keys; 0 where dense scores alone make the distribution.
        value_size: D of values.
        mask: which keys queries see; None for all.
        num_extra: keys that are no tokens.
        has_bias: whether a learned bias by distance is added.
        has_positions: whether Transformer-XL's scores of positions are added.
        has_dense: whether learned scores of each query and key are added.
        has_entmax: whether weights are made by entmax in place of softmax.
        has_given: whether all queries see some keys that each sequence chooses.
        is_causal: whether queries see no key after themselves.
        is_padded: whether some keys are padding.
        is_training: whether there will be gradients.
        dropout: on the distribution.
        consumers: sublayers above that read the distribution.
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
        """Return the call that has these inputs."""
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
        """True if something that is added to scores may have a gradient."""
        return self.is_training and (self.has_bias or self.has_positions or self.has_dense)


def first_reason(reasons: Iterable[tuple[object, str]]) -> Optional[str]:
    """Return the first reason whose condition holds; None if none does."""
    return next((reason for holds, reason in reasons if holds), None)


@functools.cache
def has_triton() -> bool:
    """Return whether the installed Triton's kernels may take tuples."""
    try:
        major, minor, *_ = version("triton").split(".")
    except PackageNotFoundError:
        return False
    return (int(major), int(minor)) >= (3, 3)


def why_no_triton() -> Optional[str]:
    """Return why Triton's kernels do not run on the GPU in use; None if they do, or if there is no GPU to ask."""
    if not torch.cuda.is_available():
        return None
    capability = compute_capability()
    if capability < LOWEST_CAPABILITY:
        return f"it needs a GPU of compute capability 8.0 or above, and this one has {capability[0]}.{capability[1]}"
    if not has_triton():
        return "it needs triton 3.3 or newer"
    return None


class ReusableAttention(Protocol):
    """A distribution, in whatever form, that an ``s`` hands to the ``l`` above it."""

    def attend(self, v_BNKD: Tensor, dropout: float) -> Tensor:
        """Return P V, (B, N, T, D), after dropout on P with a mask of its own."""


class BackEnd(Protocol):
    """A way to compute attention; :data:`~lazyformer_fairseq.modules.attention.BACK_ENDS` has one of each."""

    def why_not(self, call: AttentionCall, device: str, dtype: torch.dtype) -> Optional[str]:
        """Return why it does not compute such a call on a type of device; None if it does."""

    def attend(self, given: AttentionInputs) -> tuple[Tensor, ReusableAttention]:
        """Compute as :func:`lazyformer_fairseq.modules.attention.attend` does."""
