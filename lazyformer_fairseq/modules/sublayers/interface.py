"""Interface of a sublayer type's module, and what all sublayers of a network share."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Optional, Union

from torch import Tensor, nn
from torch.nn import functional as F

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.modules.attention.scores import Scores
from lazyformer_fairseq.patterns.grammar import PlannedSublayer

# What sublayers below hand on, by name, such as DISTRIBUTION; the nearest one's counts.
SharedState = Mapping[str, Any]
Output = tuple[Tensor, SharedState]  # of a sublayer: (B, T, C), and what it hands on
Settings = Mapping[str, Any]  # what stands in brackets, by name; the row of a setting says of which type it is


@dataclass(frozen=True)
class SublayerOptions:
    """Options that every sublayer of a network gets; see :class:`~lazyformer_fairseq.modules.networks.stack.Stack`."""

    embed_dim: int
    ffn_embed_dim: int
    num_heads: int
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    activation: Callable[[Tensor], Tensor] = F.gelu
    max_positions: int = 0  # longest input of an encoder; 0 for a causal model, which has no such limit
    common: dict[str, Any] = field(default_factory=dict)  # what sublayers of one network share, by name
    is_causal: bool = False
    values: Settings = field(default_factory=dict)  # for an attention variant: all settings of its ``s``
    linear_bias: bool = True  # whether linear maps have biases; see :func:`build_sublayer`

    @property
    def head_size(self) -> int:
        """D, numbers of a head."""
        return self.embed_dim // self.num_heads


class RelativePositions(NamedTuple):
    """Transformer-XL's positions of one forward pass, with K = M + T keys of memory and segment.

    Attributes:
        encoded: sinusoids (K + 1, C) of the distances K - 1, ..., 1, 0 and -1. The last belongs to a key in the future,
            which no query may look at; with it, the relative shift is a view.
        content_bias: u (N, D), added to the queries that meet keys.
        position_bias: v (N, D), added to the queries that meet positions.
    """

    encoded: Tensor
    content_bias: Tensor
    position_bias: Tensor


class Context(NamedTuple):
    """Context of a forward pass, which all sublayers share.

    Attributes:
        scores: what to add to scores, and which keys a query may look at.
        back_end: from :class:`~lazyformer_fairseq.modules.attention.AttentionInputs` to the name of the back end that
            computes them.
        positions: Transformer-XL's relative positions; causal models only.
        observe: is told of each distribution that is computed, as for those who look at it; None for nobody.
        documents: how tokens (1, S, C) of several documents, none of which sees another, are grouped
            (:class:`~lazyformer_fairseq.modules.networks.documents.Documents`); `scores` shapes nothing then. None for
            sequences, one a row.
    """

    scores: Scores
    back_end: Callable[..., str]
    positions: Optional[RelativePositions] = None
    observe: Optional[Callable[[Any], None]] = None
    documents: Any = None


class StackOutput(NamedTuple):
    """Output of all sublayers of a network.

    Attributes:
        x_BTC: output of the last one.
        states: if asked for, the input of the first and the outputs of all, (B, T, C) each.
        attended: if there is a memory, the inputs of the attending ones, (B, T, C) each.
    """

    x_BTC: Tensor
    states: list[Tensor]
    attended: list[Tensor]


class Sublayer(nn.Module):
    """Module of a sublayer type.

    Attributes:
        attends: whether it looks at other positions, and so at the memory of a causal model.
        is_tokenwise: whether its output at a token depends on that token alone, also in training, so that any of them
            can be computed without the others.
        has_scores: whether it, if it attends, adds T5's bias or Transformer-XL's positions to scores.
        is_residual: whether the network puts LayerNorm and a residual connection around it.
        takes_documents: whether it takes the tokens of several documents in a row, because it mixes none or groups
            them itself (:func:`by_document`). Else the network groups its inputs.
        takes_permuted: whether tokens may come in any order, with their places beside them: because it mixes none, or
            as scores let it and by these places alone (:mod:`lazyformer_fairseq.modules.networks.permuted`).
    """

    attends: ClassVar[bool] = False
    is_tokenwise: ClassVar[bool] = False
    has_scores: bool = True
    is_residual: ClassVar[bool] = True
    takes_documents: bool = False
    takes_permuted: bool = False

    @classmethod
    def build(cls, options: SublayerOptions, planned: PlannedSublayer) -> "Sublayer":
        """Return one with fresh weights for this place of a plan; ``planned.values`` has the settings."""
        raise NotImplementedError

    def last_map(self) -> nn.Module:
        """Return the map that makes its output, zero where all weights of the map are: by default `out_proj`.

        Raises:
            UserError: there is none, and its class does not say which one.
        """
        out_proj = getattr(self, "out_proj", None)
        if out_proj is None:
            raise UserError(f"--zero-last-maps: {type(self).__name__} has no out_proj, and no last_map of its own")
        return out_proj

    @abstractmethod
    def forward(
        self,
        x_BTC: Tensor,
        below: SharedState,
        shared: Context,
        memory_BMC: Tensor | None = None,
    ) -> Output:
        """Compute.

        Args:
            x_BTC: input.
            below: what sublayers below have handed on.
            shared: see :class:`Context`.
            memory_BMC: `x_BTC` of the previous segments; None where there are none. Only if it ``attends``.

        Returns:
            The output (B, T, C), and what it hands on, by name: nothing for most kinds.
        """


def by_document(
    compute: Callable[..., Output],
    inputs: Sequence[Union[Tensor, tuple[Tensor, ...], None]],
    below: SharedState,
    shared: Context,
) -> Output:
    """Return ``compute(*inputs, below, shared)``; of several documents in a row, group by group.

    What is handed on is then a list with an entry for each group.

    Args:
        compute: mixes tokens; returns (B, T, ...), and what it hands on.
        inputs: (B, T, ...) each; None stays None. Only for one document may they be tuples of such.
        below: what sublayers below have handed on.
        shared: context of the pass.
    """
    documents = shared.documents
    if documents is None:
        return compute(*inputs, below, shared)
    inputs_by_group = zip(*map(documents.split, inputs), strict=True)
    outputs = []
    handed_on: dict[str, list[Any]] = {}
    for number, inputs_of_group in enumerate(inputs_by_group):
        below_of_group = {name: by_group[number] for name, by_group in below.items()}
        context = shared._replace(scores=documents.scores[number], documents=None)
        output, handed_on_by_group = compute(*inputs_of_group, below_of_group, context)
        outputs.append(output)
        for name, value in handed_on_by_group.items():
            handed_on.setdefault(name, []).append(value)
    return documents.join(outputs), handed_on


def build_sublayer(
    module: type[Sublayer],
    options: SublayerOptions,
    planned: PlannedSublayer,
) -> Sublayer:
    """Build a sublayer of any type, without the biases of linear maps where the network has none."""
    built = module.build(options, planned)
    if not options.linear_bias:
        for linear in built.modules():
            if isinstance(linear, nn.Linear):
                linear.register_parameter("bias", None)
    return built
