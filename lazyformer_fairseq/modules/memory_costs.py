"""What formulas of memory speak of: bytes that torch's allocator holds for a part of an update, and when.

Each kind of sublayer and each back end counts its own, next to the code it counts: what autograd keeps between the
forward and the backward pass, and what is there for a moment besides.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from lazyformer_fairseq.patterns.grammar import PlannedSublayer

SINGLE = 4  # bytes of a number in single precision, in which norms, softmax and losses compute
NUMBER = {"fp32": 4, "fp16": 2, "bf16": 2}


class Memory(NamedTuple):
    """Bytes.

    Attributes:
        kept: from the forward pass to the backward pass.
        forward: besides, at most, while the forward pass runs.
        backward: besides, at most, while the backward pass runs.
        pending: from the first backward pass of a consumer to its own: gradients that consumers leave it.
        scratch: a processor's from the forward pass on, which all sublayers of a network use in turn and none gives
            back.
        more_scratch: what the backward pass adds to that.
    """

    kept: int
    forward: int = 0
    backward: int = 0
    pending: int = 0
    scratch: int = 0
    more_scratch: int = 0


@dataclass(frozen=True)
class Pass:
    """What the memory of forward and backward pass depends on, beside pattern and sizes.

    Attributes:
        batch: B, sequences or streams.
        time: T.
        memory: M, positions that a causal model remembers.
        precision: a key of NUMBER.
        device: its type, cpu or cuda.
        features: of the network's scores besides padding, see ``Stack.features``.
        dropout, attention_dropout, activation_dropout: whether there is any.
        activation: gelu or relu.
        normalize_before: pre-norm.
        back_end: from a sublayer that computes scores to the back end that does it.
        checkpoints, reversible: of the network, see :class:`~lazyformer_fairseq.modules.networks.stack.Stack`.
    """

    batch: int
    time: int
    memory: int = 0
    precision: str = "fp32"
    device: str = "cpu"
    features: frozenset[str] = frozenset()
    dropout: bool = True
    attention_dropout: bool = False
    activation_dropout: bool = False
    activation: str = "gelu"
    normalize_before: bool = False
    back_end: Callable[[PlannedSublayer], str] = lambda maker: "eager"
    checkpoints: bool = False
    reversible: bool = False

    @property
    def number(self) -> int:
        """Bytes of an activation's number."""
        return NUMBER[self.precision]

    @property
    def mask(self) -> int:
        """Bytes of a number of a dropout mask: on a processor torch writes what it multiplies with."""
        return 1 if self.device == "cuda" else self.number

    @property
    def keys(self) -> int:
        """K."""
        return self.memory + self.time

    def tokens(self, width: int) -> int:
        """Bytes of (B, T, width)."""
        return self.batch * self.time * width * self.number

    def mask_of_tokens(self, width: int) -> int:
        """Bytes of a dropout mask (B, T, width)."""
        return self.batch * self.time * width * self.mask


class AttentionSize(NamedTuple):
    """What the memory of an attention depends on.

    Attributes:
        batch, heads, time, keys: B, N, T, K.
        width: N D, of the queries of all heads.
        number, mask: bytes of a number, and of one of a dropout mask.
        device: its type.
        dropout: whether the distribution goes through dropout.
        features: of the scores, see :attr:`~lazyformer_fairseq.modules.attention.scores.Scores.features`.
        consumers: sublayers above that read the distribution.
        in_tiles: entries that tiles compute of a mask, of all sequences and heads; 0 without a mask.
    """

    batch: int
    heads: int
    time: int
    keys: int
    width: int
    number: int
    mask: int
    device: str
    dropout: bool
    features: frozenset[str]
    consumers: int = 0
    in_tiles: int = 0

    @property
    def rows(self) -> int:
        """Rows of all distributions."""
        return self.batch * self.heads * self.time

    @property
    def pairs(self) -> int:
        """Numbers of all distributions."""
        return self.rows * self.keys

    @property
    def shown(self) -> int:
        """Numbers of all distributions in tiles."""
        return self.in_tiles or self.pairs

    @property
    def queries(self) -> int:
        """Bytes of (B, T, N D)."""
        return self.batch * self.time * self.width * self.number

    @property
    def values(self) -> int:
        """Bytes of (B, K, N D)."""
        return self.batch * self.keys * self.width * self.number

    @property
    def single(self) -> int:
        """Bytes of a number of what is computed in single precision or better."""
        return max(SINGLE, self.number)
