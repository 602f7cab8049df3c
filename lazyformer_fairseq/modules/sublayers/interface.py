"""The base class of sublayer modules, and the data shared by all sublayers of a network."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Optional, Union

from torch import Tensor, nn
from torch.nn import functional as F

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.modules.attention.scores import Scores
from lazyformer_fairseq.patterns.grammar import PlannedSublayer

# State passed on by the sublayers below, by name, such as DISTRIBUTION. If several of them use the same name, the
# nearest one wins.
SharedState = Mapping[str, Any]
Output = tuple[Tensor, SharedState]  # a sublayer's output (B, T, C), and the state it passes on
Settings = Mapping[str, Any]  # settings in a pattern's brackets, by name; the table of sublayer kinds has their types


@dataclass(frozen=True)
class SublayerOptions:
    """Options passed to each sublayer of a network.

    Fields without a comment are documented in :class:`~lazyformer_fairseq.modules.networks.stack.Stack`.
    """

    embed_dim: int
    ffn_embed_dim: int
    num_heads: int
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    activation: Callable[[Tensor], Tensor] = F.gelu
    max_positions: int = 0  # an encoder's maximum input length in tokens; 0 for causal models, which have no limit
    common: dict[str, Any] = field(default_factory=dict)  # parameters and modules shared by sublayers, by name
    is_causal: bool = False
    values: Settings = field(default_factory=dict)  # for an attention variant: all settings of its ``s``
    linear_bias: bool = True  # if False, build_sublayer removes all biases of linear layers

    @property
    def head_size(self) -> int:
        """The size D of each head."""
        return self.embed_dim // self.num_heads


class RelativePositions(NamedTuple):
    """Transformer-XL's relative positions in one forward pass over K = M + T keys (memory and segment).

    Attributes:
        encoded: sinusoidal encodings (K + 1, C) of the distances K - 1, ..., 1, 0 and -1. Distance -1 belongs to a
            future key, which is always masked; it is included so that the relative shift can be a view.
        content_bias: u (N, D), added to the queries before they are multiplied by the keys.
        position_bias: v (N, D), added to the queries before they are multiplied by the projected distances.
    """

    encoded: Tensor
    content_bias: Tensor
    position_bias: Tensor


class Context(NamedTuple):
    """The context of one forward pass, shared by all sublayers.

    Attributes:
        scores: the terms added to attention scores, and the mask.
        back_end: a function that maps :class:`~lazyformer_fairseq.modules.attention.AttentionInputs` to the name of the
            back end to use.
        positions: Transformer-XL's relative positions, for causal models only.
        observe: a callback that receives each attention distribution, for example to plot it; None for no callback.
        documents: if one row (1, S, C) contains several documents, their grouping, which keeps them from attending to
            each other (:class:`~lazyformer_fairseq.modules.networks.documents.Documents`); `scores` is then ignored.
            None if each row is one sequence.
    """

    scores: Scores
    back_end: Callable[..., str]
    positions: Optional[RelativePositions] = None
    observe: Optional[Callable[[Any], None]] = None
    documents: Any = None


class StackOutput(NamedTuple):
    """The output of a stack of sublayers.

    Attributes:
        x_BTC: the output of the last sublayer.
        states: the input of the first sublayer and the outputs of all sublayers, (B, T, C) each; empty unless
            requested.
        attended: the inputs of the sublayers that attend, (B, T, C) each; empty if there is no memory.
    """

    x_BTC: Tensor
    states: list[Tensor]
    attended: list[Tensor]


class Sublayer(nn.Module):
    """Base class of all sublayer modules.

    Attributes:
        attends: whether the sublayer mixes tokens. Causal models then pass it the memory of previous segments.
        is_tokenwise: whether each token's output depends only on that token, even during training. A subset of the
            tokens can then be computed separately.
        has_scores: for a sublayer that attends, whether it adds T5's bias or Transformer-XL's positions to its scores.
        is_residual: whether the network wraps the sublayer in a residual connection with LayerNorm.
        takes_documents: whether the input may contain several documents in one row, because the sublayer does not mix
            tokens or groups them itself with :func:`by_document`. If False, the network groups the inputs.
        takes_permuted: whether tokens can be in any order, with their positions passed separately. This is true for
            sublayers that do not mix tokens, and for those that mix tokens only according to `scores` and these
            positions (:mod:`lazyformer_fairseq.modules.networks.permuted`).
    """

    attends: ClassVar[bool] = False
    is_tokenwise: ClassVar[bool] = False
    has_scores: bool = True
    is_residual: ClassVar[bool] = True
    takes_documents: bool = False
    takes_permuted: bool = False

    @classmethod
    def build(cls, options: SublayerOptions, planned: PlannedSublayer) -> "Sublayer":
        """Create the sublayer for an entry of the plan; ``planned.values`` contains its settings."""
        raise NotImplementedError

    def last_map(self) -> nn.Module:
        """Return the linear layer that computes the sublayer's output, `out_proj` by default.

        If all weights of this layer are zero, so is the sublayer's output.

        Raises:
            UserError: the sublayer has no `out_proj`, and its class does not override this method.
        """
        out_proj = getattr(self, "out_proj", None)
        if out_proj is None:
            raise UserError(
                f"--zero-last-maps: {type(self).__name__} has no out_proj; override last_map in this class, or omit "
                "the option"
            )
        return out_proj

    @abstractmethod
    def forward(
        self,
        x_BTC: Tensor,
        below: SharedState,
        shared: Context,
        memory_BMC: Tensor | None = None,
    ) -> Output:
        """Compute the sublayer's output.

        Args:
            x_BTC: the input.
            below: state passed on by the sublayers below, by name.
            shared: the context of the forward pass.
            memory_BMC: the inputs `x_BTC` of previous segments, if any; passed only to sublayers that attend.

        Returns:
            The output (B, T, C), and the state passed on to the sublayers above, by name (empty for most sublayers).
        """


def by_document(
    compute: Callable[..., Output],
    inputs: Sequence[Union[Tensor, tuple[Tensor, ...], None]],
    below: SharedState,
    shared: Context,
) -> Output:
    """Return ``compute(*inputs, below, shared)``, computed per group of documents if a row contains several documents.

    With several documents, each item of the passed-on state is a list with one entry per group.

    Args:
        compute: a function that mixes tokens. It returns an output (B, T, ...) and the state to pass on.
        inputs: tensors (B, T, ...) or None, which is passed through. Tuples of tensors are allowed only if each row is
            one sequence.
        below: state passed on by the sublayers below, by name.
        shared: the context of the forward pass.
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
    """Build a sublayer, and remove the biases of its linear layers if `linear_bias` is False."""
    built = module.build(options, planned)
    if not options.linear_bias:
        for linear in built.modules():
            if isinstance(linear, nn.Linear):
                linear.register_parameter("bias", None)
    return built
