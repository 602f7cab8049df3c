"""The feed-forward sublayer ``f``, its mixture of experts, the identity ``-``, and the residual connection."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Optional, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from lazyformer_fairseq.modules.layer_norm import NormOptions, layer_norm
from lazyformer_fairseq.modules.linear import Linear
from lazyformer_fairseq.modules.processor import has_numbers
from lazyformer_fairseq.modules.sublayers.interface import (
    Context,
    Output,
    SharedState,
    Sublayer,
    SublayerOptions,
    by_document,
)
from lazyformer_fairseq.patterns.grammar import PlannedSublayer


def gelu_tanh(x: Tensor) -> Tensor:
    """Return the tanh approximation of GELU (Hendrycks and Gimpel, 2016, section 2)."""
    return F.gelu(x, approximate="tanh")


def relu_squared(x: Tensor) -> Tensor:
    """Return max(0, x)^2 (So et al., 2021, Primer, section 4)."""
    return F.relu(x).square()


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "relu": F.relu,
    "relu_squared": relu_squared,
}


GATES: Mapping[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "silu": F.silu, "relu": F.relu}


class FeedForward(Sublayer):
    """The feed-forward sublayer ``f``: W2 dropout(activation(W1 x)) with hidden size W.

    With a gate it computes W2 dropout(gate(W1 x) * V x) (Shazeer, 2020, equation 6). The weight of `fc1` (2 W, C) then
    contains both W1 and V, so that one matmul computes both products.

    Args:
        embed_dim: C.
        ffn_embed_dim: W, the hidden size.
        activation: the activation function, if there is no gate.
        dropout: the dropout rate after the activation or the gate.
        gate: the gate's activation, a key of GATES; "" for no gate.
    """

    is_tokenwise = True
    takes_documents = takes_permuted = True

    def __init__(
        self,
        embed_dim: int,
        ffn_embed_dim: int,
        activation: Callable[[Tensor], Tensor] = F.gelu,
        dropout: float = 0.0,
        gate: str = "",
    ):
        super().__init__()
        if gate:
            activation = GATES[gate]
        self.activation = activation
        self.is_gated = bool(gate)
        self.dropout = dropout
        blocks = 1 + self.is_gated
        self.fc1 = Linear(embed_dim, blocks * ffn_embed_dim)
        self.fc1.blocks = blocks
        self.fc2 = Linear(ffn_embed_dim, embed_dim)

    @classmethod
    @override
    def build(cls, options: SublayerOptions, planned: PlannedSublayer) -> Sublayer:
        """Create a feed-forward sublayer, or a mixture of :class:`Experts` if the settings request one."""
        values = planned.values
        feed_forwards = []
        for _ in range(max(1, values["experts"])):
            feed_forward = cls(
                options.embed_dim,
                options.ffn_embed_dim,
                activation=options.activation,
                dropout=options.activation_dropout,
                gate=values["gate"],
            )
            feed_forwards.append(feed_forward)
        if not values["experts"]:
            return feed_forwards[0]
        experts = Experts(
            options.embed_dim,
            feed_forwards,
            top=values["top"],
            capacity=values["capacity"],
            is_causal=options.is_causal,
        )
        options.common.setdefault(EXPERTS, []).append(experts)
        return experts

    @override
    def last_map(self) -> nn.Module:
        return self.fc2

    @override
    def forward(
        self,
        x_BTC: Tensor,
        below: SharedState,
        shared: Context,
        memory_BMC: Tensor | None = None,
    ) -> Output:
        return self.compute(x_BTC), {}

    def compute(self, x: Tensor) -> Tensor:
        """Apply the network to vectors (..., C)."""
        hidden = self.fc1(x)
        if self.is_gated:
            gate, values = hidden.chunk(2, -1)
            hidden = self.activation(gate) * values
        else:
            hidden = self.activation(hidden)
        return self.fc2(F.dropout(hidden, self.dropout, self.training))


EXPERTS = "experts"  # the key of the network's list of Experts in the `common` options


class Assignment(NamedTuple):
    """The P token-expert pairs that received a slot, sorted by expert.

    Attributes:
        tokens_P: the index of each pair's token in the batch.
        experts_P: the index of each pair's expert.
        weights_P: the weight of each expert's output in the token's output.
        counts_E: the number of pairs per expert.
        wanted: the number of pairs that requested a slot, as a scalar tensor.
    """

    tokens_P: Tensor
    experts_P: Tensor
    weights_P: Tensor
    counts_E: Tensor
    wanted: Tensor


class ExpertOutputs(NamedTuple):
    """Auxiliary outputs of a mixture of experts, from a training forward pass.

    Attributes:
        loss: the load-balancing loss.
        dropped: the number of token-expert pairs dropped for lack of a slot.
        wanted: the number of token-expert pairs that requested a slot.
    """

    loss: Tensor
    dropped: Tensor
    wanted: Tensor


class Texts(NamedTuple):
    """The texts of a batch, with their tokens concatenated.

    Attributes:
        number_S: the index of the text that each token belongs to.
        lengths_G: the number of tokens per text, without padding.
        is_padding_S: True for padding tokens; None if there is no padding.
    """

    number_S: Tensor
    lengths_G: Tensor
    is_padding_S: Optional[Tensor] = None


class Experts(Sublayer):
    """A mixture of experts (``f[experts=E]``): feed-forward networks with a gate that routes each token.

    The gate is softmax(x W) in single precision. The output is the weighted sum of the selected experts' outputs. A
    single expert is weighted by its gate (Switch Transformer, 2021, equation 2); two experts are weighted by their
    gates, normalized to sum to 1 (GShard, 2020, section 2.2, Algorithm 1). During evaluation no tokens are dropped.

    During training each text is a group, in which each expert has ceil(capacity * top * tokens / E) slots. Padding
    takes no slots. Slots are assigned to the first choices of all tokens, in token order, and then to the second
    choices, each of which is kept with a probability of twice its weight. As in the authors' code, second choices that
    are not kept take no slot, whereas in Algorithm 1 they count toward the capacity. Choices without a slot are
    dropped. A token whose choices are all dropped passes through the residual connection only. In causal models, slots
    are assigned to both choices of a token before the next token, so that no slot depends on later tokens.

    The load-balancing loss is the loss of Algorithm 1 multiplied by E^2. For each text, an expert's fraction of first
    choices is multiplied by its mean gate; these products are summed over experts, multiplied by E, and averaged over
    texts. The loss is 1 if all experts are selected equally often.

    Args:
        embed_dim: C.
        feed_forwards: the E experts.
        top: the number of experts per token, 1 or 2.
        capacity: the ratio of slots to choices.
        is_causal: whether a token's output must not depend on later tokens.

    Attributes:
        count: E.
        experts: the experts in this process, by index. These are all experts, unless
            :class:`~lazyformer_fairseq.modules.shared_experts.SharedExperts` has distributed them.
        exchange: a function that sends inputs to the processes of their experts. It takes :meth:`compute`, the inputs
            (P, C) sorted by expert, and the counts (E,), and returns the outputs (P, C). None if this process has all
            experts.
        auxiliary_outputs: what the last training forward pass produced besides its output.
    """

    takes_documents = True

    def __init__(
        self,
        embed_dim: int,
        feed_forwards: Sequence[FeedForward],
        top: int,
        capacity: float,
        is_causal: bool = False,
    ):
        super().__init__()
        self.count = len(feed_forwards)
        self.top = top
        self.capacity = capacity
        self.is_causal = is_causal
        self.gate = nn.Linear(embed_dim, self.count, bias=False)
        self.experts = nn.ModuleDict({str(number): expert for number, expert in enumerate(feed_forwards)})
        self.exchange: Optional[Callable[[Callable, Tensor, Tensor], Tensor]] = None
        self.auxiliary_outputs: Optional[ExpertOutputs] = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "auxiliary_outputs": None}  # tensors with a graph cannot be copied or pickled

    def pop_expert_outputs(self) -> Optional[ExpertOutputs]:
        """Return the auxiliary outputs of the last training forward pass, and reset them."""
        outputs = self.auxiliary_outputs
        self.auxiliary_outputs = None
        return outputs

    @override
    def forward(
        self,
        x_BTC: Tensor,
        below: SharedState,
        shared: Context,
        memory_BMC: Tensor | None = None,
    ) -> Output:
        x_SC = x_BTC.flatten(0, 1)
        if not has_numbers(x_BTC):
            return self._evenly(x_SC).view_as(x_BTC), {}
        gates_SE = self.gates(x_SC)
        is_watched = torch.compiler.is_compiling() or torch.jit.is_tracing()
        if is_watched and not self.training:
            return self._by_all(x_SC, gates_SE).view_as(x_BTC), {}
        texts = self._texts(x_BTC, shared)
        assigned = self.assign(gates_SE, texts)
        self.auxiliary_outputs = None
        if self.training:
            self.auxiliary_outputs = ExpertOutputs(
                loss=self._balance(gates_SE, texts),
                dropped=assigned.wanted - assigned.counts_E.sum(),
                wanted=assigned.wanted,
            )

        inputs_PC = x_SC.index_select(0, assigned.tokens_P)
        if self.exchange is None:
            outputs_PC = self.compute(inputs_PC, assigned.counts_E.tolist())
        else:
            outputs_PC = self.exchange(self.compute, inputs_PC, assigned.counts_E)

        weights_P1 = assigned.weights_P[:, None].to(outputs_PC.dtype)
        zeros_SC = outputs_PC.new_zeros(x_SC.shape)
        y_SC = zeros_SC.index_add(0, assigned.tokens_P, outputs_PC * weights_P1)
        return y_SC.view_as(x_BTC), {}

    @property
    def here(self) -> Mapping[int, FeedForward]:
        """The experts in this process, by index."""
        return {int(number): cast(FeedForward, expert) for number, expert in self.experts.items()}

    def compute(self, x_PC: Tensor, counts: Sequence[int]) -> Tensor:
        """Apply each expert in this process to its inputs, and return the outputs (P, C).

        An expert without tokens gets zero gradients, because DDP needs a gradient for every parameter.

        Args:
            x_PC: inputs, sorted by expert.
            counts: the number of inputs per expert.
        """
        parts = x_PC.split(counts)
        outputs = [expert.compute(part) for expert, part in zip(self.here.values(), parts, strict=True)]
        return torch.cat(outputs)

    def gates(self, x_SC: Tensor) -> Tensor:
        """Return the gate of each token and expert (S, E), in single precision or better."""
        exact = torch.promote_types(x_SC.dtype, torch.float32)
        if not isinstance(self.gate, nn.Linear):  # wrapped in an adapter, which adds to the layer's weight
            return self.gate(x_SC).to(exact).softmax(-1)
        with torch.autocast(x_SC.device.type, enabled=False):
            logits_SE = F.linear(x_SC.to(exact), self.gate.weight.to(exact))
            return logits_SE.softmax(-1)

    def _chosen(self, gates_SE: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights and indices (S, K) of each token's selected experts, best first."""
        best_SK, experts_SK = gates_SE.topk(self.top, -1)
        if self.top > 1:
            best_SK = best_SK / best_SK.sum(-1, keepdim=True)
        return best_SK, experts_SK

    def _texts(self, x_BTC: Tensor, shared: Context) -> Texts:
        """Describe the texts of a batch."""
        batch, time = x_BTC.shape[:2]
        device = x_BTC.device
        if shared.documents is not None:
            lengths_G = torch.from_numpy(shared.documents.lengths).to(device)
            number_S = torch.arange(len(lengths_G), device=device).repeat_interleave(lengths_G)
            return Texts(number_S, lengths_G)
        number_S = torch.arange(batch, device=device).repeat_interleave(time)
        lengths_G = torch.full((batch,), time, device=device)
        is_padding = shared.scores.is_padding(time)
        if is_padding is None:
            return Texts(number_S, lengths_G)
        return Texts(number_S, lengths_G - is_padding.sum(-1), is_padding.flatten())

    def assign(self, gates_SE: Tensor, texts: Texts) -> Assignment:
        """Assign slots to token-expert pairs; during training, second choices are sampled.

        Args:
            gates_SE: the gate of each token and expert.
            texts: the texts of the batch.
        """
        weights_SK, experts_SK = self._chosen(gates_SE)
        is_wanted_SK = torch.ones_like(experts_SK, dtype=torch.bool)
        if texts.is_padding_S is not None:
            is_wanted_SK &= ~texts.is_padding_S[:, None]
        if self.training and self.top > 1:
            draws_S1 = torch.rand(len(gates_SE), 1, dtype=gates_SE.dtype, device=gates_SE.device)
            is_wanted_SK[:, 1:] &= draws_S1 < 2 * weights_SK[:, 1:]
        tokens_S = torch.arange(len(gates_SE), device=gates_SE.device)
        tokens_SK = tokens_S[:, None].expand_as(experts_SK)

        # List the pairs in the order in which slots are assigned, then sort them by expert and text with a stable sort.
        # Pairs that do not need a slot come last.
        tokens_P = self._in_order(tokens_SK)
        experts_P = self._in_order(experts_SK)
        weights_P = self._in_order(weights_SK)
        is_wanted_P = self._in_order(is_wanted_SK)
        num_texts = len(texts.lengths_G)
        num_queues = self.count * num_texts
        queue_P = experts_P * num_texts + texts.number_S[tokens_P]
        queue_P, order_P = queue_P.where(is_wanted_P, num_queues).sort(stable=True)
        starts = torch.searchsorted(queue_P, torch.arange(num_queues + 1, device=queue_P.device))
        counts_EG = starts.diff().view(self.count, num_texts)

        is_taken_P = queue_P < num_queues
        if self.training:
            slots_G = self.slots(texts.lengths_G)
            place_P = torch.arange(len(queue_P), device=queue_P.device) - starts[queue_P]
            is_taken_P &= place_P < slots_G[queue_P % num_texts]
            counts_EG = counts_EG.minimum(slots_G)
        taken_P = order_P[is_taken_P]
        return Assignment(
            tokens_P=tokens_P.index_select(0, taken_P),
            experts_P=experts_P.index_select(0, taken_P),
            weights_P=weights_P.index_select(0, taken_P),
            counts_E=counts_EG.sum(1),
            wanted=is_wanted_P.sum(),
        )

    def _in_order(self, x_SK: Tensor) -> Tensor:
        """Flatten values per token and choice (S, K) into the order in which slots are assigned."""
        if self.is_causal:
            return x_SK.flatten()
        return x_SK.t().flatten()

    def slots(self, lengths_G: Tensor) -> Tensor:
        """Compute the number of slots per expert in each text (G,) from the lengths of the texts."""
        of_a_token = self.capacity * self.top / self.count
        slots_G = lengths_G.double() * of_a_token - 1e-9  # to keep a rounding error from adding a slot
        return slots_G.ceil().long()

    def _balance(self, gates_SE: Tensor, texts: Texts) -> Tensor:
        """Return the load-balancing loss, which counts first choices even if they were dropped."""
        is_first_SE = F.one_hot(gates_SE.argmax(-1), self.count).to(gates_SE)
        share_GE = self._mean_of_texts(is_first_SE, texts)
        mean_GE = self._mean_of_texts(gates_SE, texts)
        return self.count * (share_GE * mean_GE).sum(-1).mean()

    def _mean_of_texts(self, x_SE: Tensor, texts: Texts) -> Tensor:
        """Average over the tokens of each text, excluding padding; return (G, E)."""
        if texts.is_padding_S is not None:
            x_SE = x_SE.masked_fill(texts.is_padding_S[:, None], 0)
        zeros_GE = x_SE.new_zeros(len(texts.lengths_G), self.count)
        sums_GE = zeros_GE.index_add(0, texts.number_S, x_SE)
        return sums_GE / texts.lengths_G[:, None].clamp(min=1)

    def _by_all(self, x_SC: Tensor, gates_SE: Tensor) -> Tensor:
        """Compute the outputs (S, C) by applying all experts to all tokens.

        Compiled and exported graphs need this version, because their shapes must not depend on values.
        """
        weights_SK, experts_SK = self._chosen(gates_SE)
        weights_SE = torch.zeros_like(gates_SE).scatter(-1, experts_SK, weights_SK).to(x_SC.dtype)
        weighted = []
        for number, expert in self.here.items():
            weighted.append(expert.compute(x_SC) * weights_SE[:, number, None])
        return torch.stack(weighted).sum(0)

    def _evenly(self, x_SC: Tensor) -> Tensor:
        """Compute outputs (S, C) as if all experts were selected equally often.

        This is used to count costs with meta or fake tensors, which have no values to route by.
        """
        tokens = len(x_SC)
        gates_SE = F.linear(x_SC, self.gate.weight).softmax(-1)
        weights_SK, _ = gates_SE.topk(self.top, -1)
        tokens_P = torch.arange(tokens, device=x_SC.device).repeat(self.top)
        parts = x_SC.index_select(0, tokens_P).tensor_split(self.count)
        outputs = [expert.compute(part) for expert, part in zip(self.here.values(), parts, strict=True)]
        outputs_PC = torch.cat(outputs) * weights_SK.t().flatten()[:, None]
        return outputs_PC.new_zeros(x_SC.shape).index_add(0, tokens_P, outputs_PC)


class Identity(Sublayer):
    """The identity (``-``), without a residual connection or LayerNorm.

    It is used where a search has selected no sublayer (PAR Transformer, section 2.1).
    """

    is_residual = False
    is_tokenwise = True
    takes_permuted = True

    @classmethod
    @override
    def build(cls, options: SublayerOptions, planned: PlannedSublayer) -> "Identity":
        return cls()

    @override
    def forward(
        self,
        x_BTC: Tensor,
        below: SharedState,
        shared: Context,
        memory_BMC: Tensor | None = None,
    ) -> Output:
        return x_BTC, {}


class ResidualSublayer(nn.Module):
    """A sublayer F with a residual connection and LayerNorm.

    It computes LayerNorm(x + F(x)) with post-norm (BERT), and x + F(LayerNorm(x)) with pre-norm (PAR Transformer,
    equations 1 and 2). Dropout is applied to the output of F.

    Args:
        inner: F.
        embed_dim: C.
        dropout: the dropout rate on the output of F.
        normalize_before: whether to use pre-norm.
        norm: the norm's options, which can select RMSNorm instead of LayerNorm.
    """

    def __init__(
        self,
        inner: Sublayer,
        embed_dim: int,
        dropout: float = 0.0,
        normalize_before: bool = False,
        norm: NormOptions = NormOptions(),  # noqa: B008 (a named tuple)
    ):
        super().__init__()
        self.inner = inner
        self.attends = inner.attends
        self.is_tokenwise = inner.is_tokenwise
        self.dropout = dropout
        self.normalize_before = normalize_before
        self.layer_norm = layer_norm(embed_dim, *norm)

    def forward(
        self,
        x_BTC: Tensor,
        below: SharedState,
        shared: Context,
        memory_BMC: Tensor | None = None,
    ) -> Output:
        """Compute the sublayer with its residual connection and norm.

        For arguments and return values see
        :meth:`~lazyformer_fairseq.modules.sublayers.interface.Sublayer.forward`. `memory_BMC` must not be normalized
        yet; it is ignored by sublayers that do not attend.
        """
        y, handed_on = self.branch(x_BTC, below, shared, memory_BMC)
        x_BTC = x_BTC + y
        if not self.normalize_before:
            x_BTC = self.layer_norm(x_BTC)
        return x_BTC, handed_on

    def branch(
        self,
        x_BTC: Tensor,
        below: SharedState,
        shared: Context,
        memory_BMC: Tensor | None = None,
    ) -> Output:
        """Return the output of F after dropout (the residual branch), and the state that F passes on."""
        normalised_BTC = self._normalised(x_BTC)
        if self.attends and memory_BMC is not None:
            y, handed_on = self.inner(normalised_BTC, below, shared, self._normalised(memory_BMC))
        elif self.inner.takes_documents:
            y, handed_on = self.inner(normalised_BTC, below, shared)
        else:
            y, handed_on = by_document(self.inner, [normalised_BTC], below, shared)
        return F.dropout(y, self.dropout, self.training), handed_on

    def _normalised(self, x: Tensor) -> Tensor:
        if self.normalize_before:
            return self.layer_norm(x)
        return x
