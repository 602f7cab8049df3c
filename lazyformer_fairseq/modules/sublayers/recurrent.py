"""The ``r`` sublayer: a state that gates change from token to token.

With x_t the input, U what projects it, * a product number by number, and h_0 = 0, the state h_t is

- of brc (Vecoven et al., 2020, section 3.1) c * h_{t-1} + (1 - c) * tanh(U x_t + a * h_{t-1}), with
  a = 1 + tanh(U_a x_t + w_a * h_{t-1}) and c = sigmoid(U_c x_t + w_c * h_{t-1});
- of nbrc (section 3.2) the same with W_a h_{t-1} and W_c h_{t-1} in the gates;
- of mingru (Feng et al., 2024, section 3.1) (1 - z) * h_{t-1} + z * U x_t, with z = sigmoid(U_z x_t).

Shapes have time first, (T, S, B, ...) for S directions; H is the state of one. It is in single precision or better.
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

# On a processor: numbers of a step that cost more than calling torch does, and those that stay near the core.
AT_ONCE = 2**13
CACHED = 2**17


class Recurrent(Sublayer):
    """V h + b: the states of all tokens, projected. Gates and what enters the state have biases too.

    An encoder reads each text in both directions, with half of the width for each; the second one begins at the text's
    last token. A causal model starts from zero at the first token that it remembers: segments give what the whole text
    gives while the memory reaches back to its start.

    Parameters with C = `embed_dim` and H = C / directions: brc 4 C^2 + 6 C, nbrc 4 C^2 + 4 C + 2 C H, mingru
    3 C^2 + 3 C. The gates' own weights start at 1 (brc) and Glorot-uniform (nbrc), as in the published code, which has
    two layers of 100. In twelve of 768, over 512 tokens, nbrc's first gradients have a norm of 1e7 to 1e10, which
    clipping makes 1. A quarter of that start would make it 5 (width 256), but copies inputs worse: an error of 0.77
    after 600 updates in place of 0.064 (``scripts/copy_first_input.py``).

    Raises:
        UserError: an encoder's width is odd.
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
            raise UserError(f"r[cell={cell}]: an embedding dimension of {embed_dim} must be even, for two directions")
        size = embed_dim // self.directions
        parts = 3
        if cell == MINGRU:
            parts = 2
        self.in_proj = Linear(embed_dim, parts * embed_dim)  # of each direction gates (a, c or z), then what enters
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
        """Return the states (B, K, C) of all directions from what :attr:`in_proj` gives (B, K, ...)."""
        turn = partial(_turn, lengths_B=shared.scores.lengths_B)
        forwards, *backwards = projected.chunk(self.directions, -1)
        directions = [forwards, *map(turn, backwards)]
        exact = torch.promote_types(projected.dtype, torch.float32)
        x_TSBG = torch.stack([x_BTG.transpose(0, 1) for x_BTG in directions], 1).to(exact)
        weight = None
        if self.weight is not None:
            weight = self.weight.to(exact)
        states_TSBH = run(x_TSBG, weight, self.longest)
        states = [states_TBH.transpose(0, 1).to(projected.dtype) for states_TBH in states_TSBH.unbind(1)]
        forwards, *backwards = states
        return torch.cat([forwards, *map(turn, backwards)], -1), {}


def _turn(x_BTE: Tensor, lengths_B: Optional[Tensor]) -> Tensor:
    """Return each text from its last token to its first; padding, which is behind it, stays there."""
    if lengths_B is None:
        return x_BTE.flip(1)
    places = torch.arange(x_BTE.size(1), device=x_BTE.device)
    lengths_B1 = lengths_B[:, None]
    is_text = places < lengths_B1
    from_BT = torch.where(is_text, lengths_B1 - 1 - places, places)
    return x_BTE.gather(1, from_BT[..., None].expand_as(x_BTE))


def run(x_TSBG: Tensor, weight: Optional[Tensor], longest: int = 0) -> Tensor:
    """Return the states (T, S, B, H) after each token.

    A graph by torch.export has as many steps as its example; with mingru's scan it is for any length.

    Args:
        x_TSBG: projected inputs, of the gates and of what enters: G is 3 H with `weight`, else 2 H.
        weight: by which gates read the state: (S, 2 H) for brc, (S, H, 2 H) for nbrc; None for mingru.
        longest: T at most, in a graph for any T.

    Raises:
        ValueError: brc or nbrc in a graph for any length.
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
            "r with brc or nbrc goes from token to token, and a graph holds as many steps as its example has tokens: "
            "export it for one length, or take r[cell=mingru]"
        )
    gates_TSBG, enters_TSBH = _parts(x_TSBG)
    state = torch.zeros_like(enters_TSBH[0])
    states = []
    for gates, enters in zip(gates_TSBG, enters_TSBH, strict=True):
        state = _step(gates, enters, state, weight)
        states.append(state)
    return torch.stack(states)


def _parts(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the parts of both gates, and of what enters."""
    size = x.size(-1) // 3
    return x[..., : 2 * size], x[..., 2 * size :]


def _gates(x: Tensor, before: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return what a and c are made of, after one step (S, B, 2 H) or all."""
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
    """Return h_t of brc or nbrc."""
    a, c = _gates(gates, before, weight)
    entering = torch.addcmul(enters + before, before, a.tanh()).tanh()
    return torch.lerp(entering, before, c.sigmoid(), out=out)


def _mingru(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return 1 - z, and z U x."""
    gate, enters = x.chunk(2, -1)
    return (-gate).sigmoid(), gate.sigmoid() * enters


def _at_a_time(x_TSBG: Tensor) -> list[slice]:
    """Return slices of steps whose numbers stay near a processor's core; elsewhere one of all."""
    time = len(x_TSBG)
    block = time
    if x_TSBG.device.type == "cpu" and has_numbers(x_TSBG):
        block = max(1, CACHED * time // x_TSBG.numel())
    return [slice(start, start + block) for start in range(0, time, block)]


class _States(torch.autograd.Function):
    """States of all steps. It keeps its inputs and the states, of which the backward pass makes all gates at once.

    The gradient g_t of a state is that of its own output plus what the next step hands back, again a recurrence:
    without a matrix in the gates one of number by number, which a scan computes.
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


# Operators: torch.compile would write out each step.


@torch.library.custom_op("lazyformer::recurrence", mutates_args=())
def recurrence(x: Tensor, weight: Optional[Tensor]) -> Tensor:
    """Return the states, as :func:`run`."""
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
    """Return the gradients of the inputs and, if there is one, of the weight."""
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
    """Keep the precision of the inputs."""
    return torch.autocast("cuda" if x.is_cuda else "cpu", enabled=False)


def _forward(x_TSBG: Tensor, weight: Optional[Tensor]) -> Tensor:
    states = x_TSBG.new_empty(_states_shape(x_TSBG, weight))
    if not has_numbers(x_TSBG) and weight is not None:  # where costs are counted: all steps in one
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
    """Compute gradients from the end, block by block: all gates of a block at once."""
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
            g, handed = _hand_back(d_TSBH[part], handed, by_before, by_gates, weight)
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
    """Return derivatives of each state by the one before it and by what enters, (T, S, B, H), and by the gates.

    Those by the gates are (T, S, B, gates, H).

    By the state before: number by number, what goes through the gates of nbrc left out.
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


def _hand_back(
    d_TSBH: Tensor,
    handed: Tensor,
    by_before: Tensor,
    by_gates: Tensor,
    weight: Optional[Tensor],
) -> tuple[Tensor, Tensor]:
    """Return the gradient of each state, and what the first one hands back to the step before it."""
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
    """Return h_t = a_t * h_{t-1} + b_t for all t, from h = 0; exact, whatever a; not differentiable.

    Chunks of the sequence go from step to step side by side, then each takes the last state of the one before it: the
    square root of T steps twice, in place of T. One chunk is the loop, which is what a processor does best once a step
    has enough to compute.

    Args:
        a_T: (T, ...).
        b_T: (T, ...).
        chunks: how many; None for what suits the device.
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
    """Return (T, ...) with zeros before and after it."""
    other_axes = (0, 0) * (x_T.dim() - 1)
    return F.pad(x_T, (*other_axes, before, after))


def scan_by_doubling(a_T: Tensor, b_T: Tensor, longest: int) -> Tensor:
    """Return the same for at most `longest` steps, in rounds that each double how far a step has looked: for graphs."""
    reach = 1
    while reach < longest:
        time = a_T.size(0)
        far_a = _padded(a_T, reach, 0)[:time]
        far_b = _padded(b_T, reach, 0)[:time]
        b_T = torch.addcmul(b_T, a_T, far_b)
        a_T = a_T * far_a
        reach = 2 * reach
    return b_T
