"""The base class of sublayer modules, and the data that all sublayers of a network share."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Optional, Union

from torch import Tensor, nn
from torch.nn import functional as F

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.modules.attention.scores import Scores
from lazyformer_fairseq.patterns.grammar import PlannedSublayer

# What the sublayers below hand on, by name, such as DISTRIBUTION. If several use the same name, the nearest one wins.
SharedState = Mapping[str, Any]
Output = tuple[Tensor, SharedState]  # the output (B, T, C) of a sublayer, and what it hands on
Settings = Mapping[str, Any]  # the settings in the brackets of a pattern, by name; the table of kinds gives their types


@dataclass(frozen=True)
class SublayerOptions:
    """Options passed to every sublayer of a network.

    :class:`~lazyformer_fairseq.modules.networks.stack.Stack` describes those that are not commented here.
    """

    embed_dim: int
    ffn_embed_dim: int
    num_heads: int
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    activation: Callable[[Tensor], Tensor] = F.gelu
    max_positions: int = 0  # longest input of an encoder in tokens; 0 for a causal model, which has no such limit
    common: dict[str, Any] = field(default_factory=dict)  # parameters and modules that sublayers share, by name
    is_causal: bool = False
    values: Settings = field(default_factory=dict)  # for an attention variant: all settings of its ``s``
    linear_bias: bool = True  # whether linear maps have biases; build_sublayer removes them if not

    @property
    def head_size(self) -> int:
        """D, the dimension of each head."""
        return self.embed_dim // self.num_heads


class RelativePositions(NamedTuple):
    """Transformer-XL's relative positions in one forward pass over K = M + T keys (memory and segment).

    Attributes:
        encoded: sinusoids (K + 1, C) of the distances K - 1, ..., 1, 0 and -1. The last distance belongs to a key in
            the future, which no query may see; it is included so that the relative shift can be a view.
        content_bias: u (N, D), added to the queries before they are multiplied by the keys.
        position_bias: v (N, D), added to the queries before they are multiplied by the projected distances.
    """

    encoded: Tensor
    content_bias: Tensor
    position_bias: Tensor


class Context(NamedTuple):
    """The context of one forward pass, shared by all sublayers.

    Attributes:
        scores: what is added to attention scores, and which keys each query may see.
        back_end: a function that maps :class:`~lazyformer_fairseq.modules.attention.AttentionInputs` to the name of
            the back end to compute them with.
        positions: Transformer-XL's relative positions; causal models only.
        observe: a callback that receives each attention distribution as it is computed, for example to plot it; None
            for no callback.
        documents: how the tokens (1, S, C) of several documents in one row are grouped so that no document sees
            another (:class:`~lazyformer_fairseq.modules.networks.documents.Documents`); `scores` is then ignored. None
            if each row is one sequence.
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
        states: the input of the first sublayer and the outputs of all, (B, T, C) each; empty unless requested.
        attended: the inputs of the sublayers that attend, (B, T, C) each; empty if there is no memory.
    """

    x_BTC: Tensor
    states: list[Tensor]
    attended: list[Tensor]


class Sublayer(nn.Module):
    """The base class of all sublayer modules.

    Attributes:
        attends: whether it reads other positions. A causal model then passes it the memory of previous segments.
        is_tokenwise: whether its output at a token depends on that token alone, in training too, so that a subset of
            the tokens can be computed without the others.
        has_scores: for a sublayer that attends, whether it adds T5's bias or Transformer-XL's positions to its scores.
        is_residual: whether the network wraps it in a residual connection with LayerNorm.
        takes_documents: whether its input may be the tokens of several documents in one row, because it does not mix
            tokens or groups them itself with :func:`by_document`. If not, the network groups its inputs.
        takes_permuted: whether tokens may come in any order, with their positions given separately. This holds for
            sublayers that do not mix tokens and for those that mix them only as `scores` and these positions allow
            (:mod:`lazyformer_fairseq.modules.networks.permuted`).
    """

    attends: ClassVar[bool] = False
    is_tokenwise: ClassVar[bool] = False
    has_scores: bool = True
    is_residual: ClassVar[bool] = True
    takes_documents: bool = False
    takes_permuted: bool = False

    @classmethod
    def build(cls, options: SublayerOptions, planned: PlannedSublayer) -> "Sublayer":
        """Return a sublayer with fresh weights for this place of a plan; ``planned.values`` holds its settings."""
        raise NotImplementedError

    def last_map(self) -> nn.Module:
        """Return the linear map that produces the sublayer's output, `out_proj` by default.

        If all weights of this map are zero, the output of the sublayer is zero.

        Raises:
            UserError: the sublayer has no `out_proj`, and its class does not override this method.
        """
        out_proj = getattr(self, "out_proj", None)
        if out_proj is None:
            raise UserError(
                f"--zero-last-maps: {type(self).__name__} has no out_proj; define last_map in this class, "
                "or leave the option out"
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
        """Compute the output of the sublayer.

        Args:
            x_BTC: the input.
            below: what the sublayers below have handed on, by name.
            shared: the context of the forward pass.
            memory_BMC: the inputs `x_BTC` of previous segments; None if there are none. Passed only to sublayers whose
                ``attends`` is true.

        Returns:
            The output (B, T, C), and what the sublayer hands on to those above, by name. Most kinds hand on nothing.
        """


def by_document(
    compute: Callable[..., Output],
    inputs: Sequence[Union[Tensor, tuple[Tensor, ...], None]],
    below: SharedState,
    shared: Context,
) -> Output:
    """Return ``compute(*inputs, below, shared)``, computed per group if the row holds several documents.

    With several documents, everything handed on is a list with one entry per group of documents.

    Args:
        compute: a function that mixes tokens. It returns an output (B, T, ...) and what it hands on.
        inputs: tensors (B, T, ...) or None, which is passed on as None. Tuples of tensors are allowed only if each row
            is one sequence.
        below: what the sublayers below have handed on, by name.
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
    """Build a sublayer of any kind, and remove the biases of its linear maps if the options say so."""
    built = module.build(options, planned)
    if not options.linear_bias:
        for linear in built.modules():
            if isinstance(linear, nn.Linear):
                linear.register_parameter("bias", None)
    return built
