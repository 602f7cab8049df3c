"""The ``r`` sublayer: a gated recurrence.

In the equations below, x_t is the input at token t, U stands for the input projections, * is the elementwise product,
and h_0 = 0. Each type of cell computes the state h_t as follows:

- brc (Vecoven et al., 2020, section 3.1): c * h_{t-1} + (1 - c) * tanh(U x_t + a * h_{t-1}), with
  a = 1 + tanh(U_a x_t + w_a * h_{t-1}) and c = sigmoid(U_c x_t + w_c * h_{t-1});
- nbrc (section 3.2): the same with W_a h_{t-1} and W_c h_{t-1} in the gates;
- mingru (Feng et al., 2024, section 3.1): (1 - z) * h_{t-1} + z * U x_t, with z = sigmoid(U_z x_t).

Shape letters: T time (the first dimension), S directions, B batch, H state size per direction, G size of the projected
input per direction. States are in single precision or better.
"""

import math
from functools import partial
from itertools import pairwise
from typing import Any, Optional

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from typing_extensions import override

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.modules.linear import Linear
from lazyformer_fairseq.modules.processor import has_numbers
from lazyformer_fairseq.modules.sublayers.attention import with_memory
from lazyformer_fairseq.modules.sublayers.interface import (
    Context,
    Output,
    SharedState,
    Sublayer,
    SublayerOptions,
    by_document,
)
from lazyformer_fairseq.patterns.grammar import PlannedSublayer
from lazyformer_fairseq.patterns.kinds import BRC, MINGRU, NBRC

# Minimum number of values per step for which the computation takes longer than torch's call overhead on a CPU.
AT_ONCE = 2**13
CACHED = 2**17  # number of values that fit in a CPU's cache


class Recurrent(Sublayer):
    """The recurrent sublayer ``r``: a gated recurrence over all tokens and an output projection, V h + b.

    The input projections have biases too. Encoders are bidirectional: each direction has half the embedding dimension,
    and the second one starts at the last token of the text. A causal model starts from a zero state at the first token
    of its memory. If the memory covers the whole previous text, a text therefore gives the same result whether or not
    it is split into segments.

    With C = `embed_dim` and H = C / directions, the number of parameters is 4 C^2 + 6 C (brc), 4 C^2 + 4 C + 2 C H
    (nbrc) or 3 C^2 + 3 C (mingru).

    The gates' recurrent weights are initialized as in the published code: to 1 (brc), or from Glorot's uniform
    distribution (nbrc). The published models have two layers of width 100. With nbrc, twelve layers of width 768 and
    512 tokens, the initial gradient norm is between 1e7 and 1e10, and clipping reduces it to 1. Scaling the recurrent
    weights to a quarter would reduce the norm to 5 (at width 256), but such a model is worse at copying inputs: its
    error after 600 updates is 0.77 instead of 0.064 (``scripts/copy_first_input.py``).

    Args:
        embed_dim: C.
        cell: BRC, NBRC or MINGRU.
        is_causal: whether to use only the forward direction.
        longest: the maximum input length in tokens, needed for graphs exported with a dynamic length; 0 in causal
            models.

    Raises:
        UserError: the embedding dimension of an encoder is odd.
    """

    attends = takes_documents = True
    has_scores = False

    def __init__(self, embed_dim: int, cell: str = NBRC, is_causal: bool = False, longest: int = 0):
        super().__init__()
        self.cell = cell
        self.longest = longest
        self.directions = 2
        if is_causal:
            self.directions = 1
        if embed_dim % self.directions:
            raise UserError(
                f"r[cell={cell}] splits the embedding dimension between two directions, so the dimension must be even, "
                f"not {embed_dim}; choose a different embedding dimension"
            )
        size = embed_dim // self.directions
        parts = 3
        if cell == MINGRU:
            parts = 2
        self.in_proj = Linear(embed_dim, parts * embed_dim)  # per direction: the gates (a and c, or z), then U x
        self.in_proj.blocks = parts * self.directions
        self.out_proj = Linear(embed_dim, embed_dim)
        self.weight: Optional[nn.Parameter]
        self.register_parameter("weight", None)
        if cell == BRC:
            self.weight = nn.Parameter(torch.ones(self.directions, 2 * size))
        elif cell == NBRC:
            self.weight = nn.Parameter(torch.empty(self.directions, size, 2 * size))
            bound = (3 / size) ** 0.5
            nn.init.uniform_(self.weight, -bound, bound)

    @classmethod
    @override
    def build(cls, options: SublayerOptions, planned: PlannedSublayer) -> "Recurrent":
        return cls(
            options.embed_dim,
            cell=planned.values["cell"],
            is_causal=options.is_causal,
            longest=options.max_positions,
        )

    @override
    def forward(
        self,
        x_BTC: Tensor,
        below: SharedState,
        shared: Context,
        memory_BMC: Tensor | None = None,
    ) -> Output:
        projected = self.in_proj(with_memory(memory_BMC, x_BTC))
        states, _ = by_document(self._states, [projected], below, shared)
        return self.out_proj(states[:, -x_BTC.size(1) :]), {}

    def _states(
        self,
        projected: Tensor,
        _below: SharedState,
        shared: Context,
    ) -> tuple[Tensor, SharedState]:
        """Compute the states (B, K, C) of all directions from the projected inputs (B, K, ...)."""
        turn = partial(_turn, lengths_B=shared.scores.lengths_B)
        forwards, *backwards = projected.chunk(self.directions, -1)
        directions = [forwards, *map(turn, backwards)]
        exact = torch.promote_types(projected.dtype, torch.float32)
        by_step = [x_BTG.transpose(0, 1) for x_BTG in directions]
        x_TSBG = torch.stack(by_step, 1).to(exact)
        weight = None
        if self.weight is not None:
            weight = self.weight.to(exact)
        states_TSBH = run(x_TSBG, weight, self.longest)
        states = [states_TBH.transpose(0, 1).to(projected.dtype) for states_TBH in states_TSBH.unbind(1)]
        forwards, *backwards = states
        return torch.cat([forwards, *map(turn, backwards)], -1), {}


def _turn(x_BTE: Tensor, lengths_B: Optional[Tensor]) -> Tensor:
    """Reverse the tokens of each text, leaving the padding after it in place."""
    if lengths_B is None:
        return x_BTE.flip(1)
    places = torch.arange(x_BTE.size(1), device=x_BTE.device)
    lengths_B1 = lengths_B[:, None]
    is_text = places < lengths_B1
    from_BT = torch.where(is_text, lengths_B1 - 1 - places, places)
    return x_BTE.gather(1, from_BT[..., None].expand_as(x_BTE))


def run(x_TSBG: Tensor, weight: Optional[Tensor], longest: int = 0) -> Tensor:
    """Compute the state (T, S, B, H) after each token.

    Graphs from torch.export have a fixed number of steps, which is the length of the example input. Only mingru
    supports a dynamic length, because it is exported as a scan.

    Args:
        x_TSBG: the projected inputs of gates and state. G is 3 H with `weight`, and 2 H without.
        weight: the gates' recurrent weights: (S, 2 H) for brc, (S, H, 2 H) for nbrc, None for mingru.
        longest: the maximum T of a graph with a dynamic length.

    Raises:
        ValueError: brc or nbrc is exported with a dynamic length.
    """
    is_exported = torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling()
    if not (is_exported or torch.jit.is_tracing()):
        return _States.apply(x_TSBG, weight)
    time = x_TSBG.size(0)
    is_for_one_length = isinstance(time, int)
    if weight is None:
        keep, enters = _mingru(x_TSBG)
        if is_for_one_length:
            longest = time
        return scan_by_doubling(keep, enters, longest)
    if not is_for_one_length:
        raise ValueError(
            "r with brc or nbrc computes token by token, so an exported graph supports only the length of its example "
            "input; export the model for one length, or use r[cell=mingru]"
        )
    gates_TSBG, enters_TSBH = _parts(x_TSBG)
    state = torch.zeros_like(enters_TSBH[0])
    states = []
    for gates, enters in zip(gates_TSBG, enters_TSBH, strict=True):
        state = _step(gates, enters, state, weight)
        states.append(state)
    return torch.stack(states)


def _parts(x: Tensor) -> tuple[Tensor, Tensor]:
    """Split projected inputs (..., 3 H) into the gates' inputs (..., 2 H) and the state's input (..., H)."""
    size = x.size(-1) // 3
    return x[..., : 2 * size], x[..., 2 * size :]


def _gates(x: Tensor, before: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the pre-activations of the gates a and c, for a single step or for all steps.

    Args:
        x: the gates' projected inputs, (S, B, 2 H) or (T, S, B, 2 H).
        before: the previous states (S, B, H) or (T, S, B, H).
        weight: the gates' recurrent weights.
    """
    if weight.dim() == 2:
        gates = x + torch.cat([before, before], -1) * weight[:, None]
    elif x.dim() == 3:
        gates = torch.baddbmm(x, before, weight)
    else:
        gates = x + torch.einsum("tsbh,shg->tsbg", before, weight)
    a, c = gates.chunk(2, -1)
    return a, c


def _step(
    gates: Tensor,
    enters: Tensor,
    before: Tensor,
    weight: Tensor,
    out: Optional[Tensor] = None,
) -> Tensor:
    """Compute the state h_t of brc or nbrc from a token's projected inputs and the previous state."""
    a, c = _gates(gates, before, weight)
    entering = torch.addcmul(enters + before, before, a.tanh()).tanh()
    return torch.lerp(entering, before, c.sigmoid(), out=out)


def _mingru(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return 1 - z and z * U x for mingru."""
    gate, enters = x.chunk(2, -1)
    return (-gate).sigmoid(), gate.sigmoid() * enters


def _at_a_time(x_TSBG: Tensor) -> list[slice]:
    """Return slices of time steps that fit in a CPU's cache; on other devices, one slice of all steps."""
    time = len(x_TSBG)
    block = time
    if x_TSBG.device.type == "cpu" and has_numbers(x_TSBG):
        block = max(1, CACHED * time // x_TSBG.numel())
    return [slice(start, start + block) for start in range(0, time, block)]


class _States(torch.autograd.Function):
    """The states of all steps, with a custom backward pass.

    Only the inputs and the states are saved; the backward pass recomputes the gates of many steps at once. The gradient
    g_t of a state is its output gradient plus the gradient from step t + 1, so the gradients follow a recurrence too.
    If the gates have no recurrent matrix (brc and mingru), this recurrence is elementwise and is computed by a scan.
    """

    @staticmethod
    def forward(ctx: Any, x_TSBG: Tensor, weight: Optional[Tensor]) -> Tensor:
        if torch.compiler.is_compiling():
            states = recurrence(x_TSBG, weight)
        else:
            states = _forward(x_TSBG, weight)
        ctx.save_for_backward(x_TSBG, weight, states)
        return states

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_TSBH: Tensor) -> tuple[Tensor, Optional[Tensor]]:
        x_TSBG, weight, states = ctx.saved_tensors
        if torch.compiler.is_compiling():
            d_x, *d_weight = recurrence_gradients(d_TSBH, x_TSBG, weight, states)
        else:
            d_x, *d_weight = _backward(d_TSBH, x_TSBG, weight, states)
        if not d_weight:
            return d_x, None
        return d_x, d_weight[0]


# These are custom operators, because torch.compile would unroll the loop over steps.


@torch.library.custom_op("lazyformer::recurrence", mutates_args=())
def recurrence(x: Tensor, weight: Optional[Tensor]) -> Tensor:
    """Compute the states; see :func:`run`."""
    return _forward(x, weight)


@recurrence.register_fake
def _(x: Tensor, weight: Optional[Tensor]) -> Tensor:
    return x.new_empty(_states_shape(x, weight))


@torch.library.custom_op("lazyformer::recurrence_gradients", mutates_args=())
def recurrence_gradients(
    d: Tensor,
    x: Tensor,
    weight: Optional[Tensor],
    states: Tensor,
) -> list[Tensor]:
    """Return the gradients of the inputs and, if present, of the weight."""
    return _backward(d, x, weight, states)


@recurrence_gradients.register_fake
def _(_d: Tensor, x: Tensor, weight: Optional[Tensor], _states: Tensor) -> list[Tensor]:
    gradients = [torch.empty_like(x, memory_format=torch.contiguous_format)]
    if weight is not None:
        gradients.append(torch.empty_like(weight, memory_format=torch.contiguous_format))
    return gradients


def _states_shape(x: Tensor, weight: Optional[Tensor]) -> tuple[int, ...]:
    parts = 3
    if weight is None:
        parts = 2
    return (*x.shape[:-1], x.size(-1) // parts)


def _as_given(x: Tensor) -> torch.autocast:
    """Return a context manager that disables autocast, to keep the precision of the inputs."""
    return torch.autocast("cuda" if x.is_cuda else "cpu", enabled=False)


def _forward(x_TSBG: Tensor, weight: Optional[Tensor]) -> Tensor:
    states = x_TSBG.new_empty(_states_shape(x_TSBG, weight))
    if not has_numbers(x_TSBG) and weight is not None:  # only costs are being counted, so compute all steps at once
        gates, enters = _parts(x_TSBG)
        return _step(gates, enters, states, weight)
    before = torch.zeros_like(states[0])
    with _as_given(x_TSBG):
        for part in _at_a_time(x_TSBG):
            x = x_TSBG[part]
            found = states[part]
            if weight is None:
                keep, enters = _mingru(x)
                enters[0].addcmul_(keep[0], before)
                found.copy_(scan(keep, enters))
            else:
                gates, enters = _parts(x)
                steps = zip(gates.unbind(), enters.unbind(), found.unbind(), strict=True)
                for gates_of_step, enters_step, state in steps:
                    before = _step(gates_of_step, enters_step, before, weight, out=state)
            before = found[-1]
    return states


def _backward(
    d_TSBH: Tensor,
    x_TSBG: Tensor,
    weight: Optional[Tensor],
    states: Tensor,
) -> list[Tensor]:
    """Return the gradients of the inputs and, if present, of the weights.

    Blocks of steps are processed from last to first; all gates of a block are computed at once.
    """
    d_x = torch.empty_like(x_TSBG)
    handed = torch.zeros_like(states[0])
    d_weight = None
    if weight is not None:
        d_weight = torch.zeros_like(weight)
    with _as_given(x_TSBG):
        for part in reversed(_at_a_time(x_TSBG)):
            if part.start:
                first = states[part.start - 1 : part.start]
            else:
                first = torch.zeros_like(states[:1])
            before = torch.cat([first, states[part][:-1]])
            by_before, by_enters, by_gates = _derivatives(x_TSBG[part], before, weight)
            g, handed = _backward_block(d_TSBH[part], handed, by_before, by_gates, weight)
            d_gates = by_gates * g[..., None, :]
            torch.cat([d_gates.flatten(-2), by_enters * g], -1, out=d_x[part])
            if d_weight is None:
                continue
            if d_weight.dim() == 2:
                by_token = before[..., None, :] * d_gates
                d_weight += by_token.sum((0, 2)).flatten(-2)
            else:
                d_weight += torch.einsum("tsbh,tsbg->shg", before, d_gates.flatten(-2))
    if d_weight is None:
        return [d_x]
    return [d_x, d_weight]


def _derivatives(
    x: Tensor,
    before: Tensor,
    weight: Optional[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the elementwise derivatives of each state.

    Args:
        x: projected inputs (T, S, B, G).
        before: the state before each step (T, S, B, H).
        weight: the gates' recurrent weights.

    Returns:
        The derivatives with respect to the previous state (T, S, B, H), the projected input of the state (T, S, B, H),
        and the pre-activations of the gates (T, S, B, gates, H). The first derivative excludes the path through the
        matrices of nbrc's gates.
    """
    if weight is None:
        gate, enters = x.chunk(2, -1)
        by_enters = gate.sigmoid()
        by_before = 1 - by_enters
        by_gate = by_enters * by_before * (enters - before)
        return by_before, by_enters, by_gate[..., None, :]
    gates, enters = _parts(x)
    a, c = _gates(gates, before, weight)
    a = a.tanh()
    c = c.sigmoid()
    entering = torch.addcmul(enters + before, before, a).tanh_()
    by_enters = (1 - c) * (1 - entering * entering)
    by_a = by_enters * before * (1 - a * a)
    by_c = (before - entering) * c * (1 - c)
    by_gates = torch.stack([by_a, by_c], -2)
    by_before = torch.addcmul(c, by_enters, 1 + a)
    if weight.dim() == 2:
        weight_of_gates = weight.unflatten(-1, (2, -1))[:, None]
        by_before += (by_gates * weight_of_gates).sum(-2)
    return by_before, by_enters, by_gates


def _backward_block(
    d_TSBH: Tensor,
    handed: Tensor,
    by_before: Tensor,
    by_gates: Tensor,
    weight: Optional[Tensor],
) -> tuple[Tensor, Tensor]:
    """Return the gradients of a block's states, and the gradient to propagate to the previous block.

    Args:
        d_TSBH: the gradients of the block's outputs.
        handed: the gradient (S, B, H) from the next block.
        by_before: see :func:`_derivatives`.
        by_gates: see :func:`_derivatives`.
        weight: the gates' recurrent weights.
    """
    if weight is None or weight.dim() == 2:
        d = d_TSBH.flip(0)
        d[0] += handed
        g = scan(by_before.roll(-1, 0).flip(0), d).flip(0)
        return g, by_before[0] * g[0]
    found = torch.empty_like(d_TSBH)
    if not has_numbers(d_TSBH):
        return found, handed
    steps = list(zip(d_TSBH, by_before, by_gates, found, strict=True))
    for d, of_state, of_gates, g in reversed(steps):
        torch.add(d, handed, out=g)
        d_gates = (of_gates * g[..., None, :]).flatten(-2)
        handed = torch.baddbmm(of_state * g, d_gates, weight.mT)
    return found, handed


def scan(a_T: Tensor, b_T: Tensor, chunks: Optional[int] = None) -> Tensor:
    """Return h_t = a_t * h_{t-1} + b_t for all t, starting from h = 0.

    The result is exact for any a. The function is not differentiable. It processes chunks of the sequence in parallel,
    step by step, and then propagates the last state of each chunk to the next chunk. With sqrt(T) chunks this takes
    about 2 sqrt(T) sequential steps instead of T. A single chunk is a plain loop, which is fastest on a CPU if each
    step has enough to compute.

    Args:
        a_T: the coefficients (T, ...).
        b_T: the inputs (T, ...).
        chunks: the number of chunks; None for a number that suits the device.
    """
    time = len(a_T)
    if chunks is None:
        chunks = int(time**0.5)
        if a_T.device.type == "cpu":
            chunks = min(chunks, max(1, AT_ONCE * time // a_T.numel()))
    length = math.ceil(time / chunks)
    more = chunks * length - time
    a = _padded(a_T, 0, more).unflatten(0, (chunks, length))
    h = _padded(b_T, 0, more)
    if not more:
        h = h.clone()
    h = h.unflatten(0, (chunks, length))
    if not has_numbers(h):
        return h.flatten(0, 1)[:time]
    keeps = a.unbind(1)[1:]
    for (before, state), keep in zip(pairwise(h.unbind(1)), keeps, strict=True):
        state.addcmul_(keep, before)
    if chunks > 1:
        kept = a.clone()
        for (before, product), keep in zip(pairwise(kept.unbind(1)), keeps, strict=True):
            torch.mul(before, keep, out=product)
        for (before, states), keep in zip(pairwise(h), kept[1:], strict=True):
            states.addcmul_(keep, before[-1])
    return h.flatten(0, 1)[:time]


def _padded(x_T: Tensor, before: int, after: int) -> Tensor:
    """Pad the first dimension of (T, ...) with `before` zeros at the start and `after` zeros at the end."""
    other_axes = (0, 0) * (x_T.dim() - 1)
    return F.pad(x_T, (*other_axes, before, after))


def scan_by_doubling(a_T: Tensor, b_T: Tensor, longest: int) -> Tensor:
    """Compute the result of :func:`scan` for at most `longest` steps by recursive doubling.

    Exported graphs use this function, because its number of rounds depends only on `longest`. Each round doubles the
    number of previous steps included in a state.
    """
    reach = 1
    while reach < longest:
        time = a_T.size(0)
        far_a = _padded(a_T, reach, 0)[:time]
        far_b = _padded(b_T, reach, 0)[:time]
        b_T = torch.addcmul(b_T, a_T, far_b)
        a_T = a_T * far_a
        reach = 2 * reach
    return b_T
