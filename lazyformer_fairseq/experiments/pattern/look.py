"""The tables and pictures of ``lazyformer pattern``: plans with costs, attended tokens, and learned spans.

The module finds the tokens that a sublayer attends to by running the sublayer, so the picture always agrees with the
code.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation.costs import flops as costs
from lazyformer_fairseq.modules.networks.causal_decoder import CausalDecoder
from lazyformer_fairseq.modules.networks.encoder import Encoder
from lazyformer_fairseq.modules.networks.stack import Stack
from lazyformer_fairseq.modules.sublayers.attention import AttentionSublayer
from lazyformer_fairseq.modules.sublayers.interface import Context, SharedState
from lazyformer_fairseq.patterns.attention_variants import chosen_variants
from lazyformer_fairseq.patterns.grammar import plan, producer_indices
from lazyformer_fairseq.patterns.kinds import DISTRIBUTION, ENCODER, Sizes
from lazyformer_fairseq.report.tables import markdown_table

COLUMNS = 5  # maximum number of panels in a row
SHARES = ".inner.choices.span.shares"
SEEN = "■"
FAINT = "□"
UNSEEN = "·"
LEGEND = (
    f"rows: queries, columns: keys; {SEEN} seen, "
    f"{FAINT} seen with less than half of the row's largest weight, {UNSEEN} not seen"
)
HEAD_SIZE = 8
# With weights this small the scores are nearly equal, so a key's weight depends only on the kind of sublayer.
STD = 1e-3
# Relative to a query's most important token; a smaller dependence comes from the query itself, not from a key.
NOTICEABLE = 1e-3


@dataclass(frozen=True)
class AttendedTokens:
    """The tokens that one sublayer attends to.

    Attributes:
        title: the sublayer's text, and the text of the sublayer that it reads from, if any.
        by_heads: pairs (heads, weights), one for each group of adjacent heads that attend to the same tokens. The
            weights (T, K) state how much the output at each token depends on each input token, relative to the row's
            largest value; they are 0 for tokens that are not attended to. K is M + T; a causal model's memory comes
            first.
    """

    title: str
    by_heads: tuple[tuple[range, Tensor], ...]


def has_bias_conflict(pattern: str, direction: str) -> bool:
    """Return whether the pattern has a sublayer that cannot be combined with T5's bias."""
    variants = [row for each in plan(pattern, direction) for row in chosen_variants(each.values)]
    return any("bias" in row.refuses for row in variants)


def build_network(
    pattern: str,
    direction: str,
    num_heads: int,
    tokens: int,
    memory: int = 0,
    bias_buckets: int = 0,
) -> Stack:
    """Build a narrow double-precision network with very small random weights from a pattern.

    Args:
        pattern: the pattern of the network's sublayers.
        direction: ENCODER or CAUSAL.
        num_heads: N, the number of attention heads.
        tokens: an encoder's maximum input length.
        memory: M, the number of positions in a causal model's memory.
        bias_buckets: the number of buckets of T5's bias in an encoder. The bias is zero and does not show in the
            picture, but sublayers that cannot be combined with it are rejected.

    Raises:
        UserError: the pattern cannot be built for this direction, number of heads or number of tokens.
    """
    torch.manual_seed(1)
    options: dict[str, Any] = {
        "embed_dim": HEAD_SIZE * num_heads,
        "ffn_embed_dim": HEAD_SIZE,
        "num_heads": num_heads,
        "attention_backend": "eager",
    }
    try:
        if direction == ENCODER:
            network = Encoder(pattern, None, max_positions=tokens, relative_position_buckets=bias_buckets, **options)
        else:
            network = CausalDecoder(pattern, 2, mem_len=memory, **options)
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{pattern}: {error}") from None
    for module in network.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=STD)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return network.double().eval()


def find_attended_tokens(network: Stack, tokens: int, memory: int = 0) -> list[AttendedTokens]:
    """Find the tokens that a network's sublayers attend to, from the lowest sublayer to the highest.

    Each sublayer is run on random vectors, and the gradients of its heads' outputs show how much each output
    depends on each token. Sublayers of the same kind with the same settings appear once. An ``l`` attends to the same
    tokens as its ``s`` and is omitted.

    Args:
        network: a network built by :func:`build_network`.
        tokens: T, the number of input tokens.
        memory: M, the number of positions in a causal model's memory.
    """
    found: dict[str, AttendedTokens] = {}
    below: SharedState = {}
    x_BTC = torch.randn(1, tokens, network.embed_dim, dtype=torch.float64)
    memory_BMC = None
    if memory:
        memory_BMC = torch.randn(1, memory, network.embed_dim, dtype=torch.float64)
    shared = network.context(x_BTC, memory)
    for planned, sublayer in zip(network.plan, network.sublayers, strict=True):
        inner = getattr(sublayer, "inner", sublayer)
        heads, handed_on = _run(inner, x_BTC, below, shared, memory_BMC)
        title = planned.text
        if planned.producer is not None:
            title = f"{planned.text} reading {planned.producer.text}"
        if inner.attends and planned.kind.reads != DISTRIBUTION and title not in found:
            inputs = [part for part in (memory_BMC, x_BTC) if part is not None]
            found[title] = AttendedTokens(title, tuple(_groups(_dependence(heads, inputs))))
        below = {**below, **handed_on}
    return list(found.values())


def _run(
    inner: nn.Module,
    x_BTC: Tensor,
    below: SharedState,
    shared: Context,
    memory_BMC: Tensor | None,
) -> tuple[Tensor, SharedState]:
    """Return the heads' outputs (T, N, D) and the state that the sublayer shares with the sublayers above it.

    This sets ``requires_grad`` on the inputs.
    """
    for part in (x_BTC, memory_BMC):
        if part is not None:
            part.requires_grad_()
    merged: list[Tensor] = []
    has_heads = isinstance(inner, AttentionSublayer)
    if has_heads:
        hook = inner.out_proj.register_forward_pre_hook(lambda _, given: merged.append(given[0]))
    else:
        hook = None
    memory = [memory_BMC] if inner.attends else []
    output, handed_on = inner(x_BTC, below, shared, *memory)
    if hook is None:
        return output[0][:, None], handed_on
    hook.remove()
    return merged[0][0].unflatten(-1, (inner.num_heads, -1)), handed_on


def _dependence(heads_TND: Tensor, inputs: list[Tensor]) -> Tensor:
    """Compute how much each output depends on each input token, (N, T, K), relative to the row's largest value.

    The dependence is the norm of a gradient: each head's output is projected onto a random vector, and the result is
    differentiated with respect to the token.
    """
    mixed_TN = heads_TND @ torch.randn(heads_TND.size(-1), dtype=heads_TND.dtype)
    rows = []
    for number in mixed_TN.flatten():
        gradients = torch.autograd.grad(number, inputs, retain_graph=True, allow_unused=True)
        parts = []
        for given, gradient in zip(inputs, gradients, strict=True):
            parts.append(torch.zeros_like(given) if gradient is None else gradient)
        rows.append(torch.cat(parts, 1)[0].norm(dim=-1))
    dependence_NTK = torch.stack(rows).unflatten(0, mixed_TN.shape).transpose(0, 1)
    relative = dependence_NTK / dependence_NTK.amax(-1, keepdim=True).clamp(min=1e-300)
    return relative.where(relative > NOTICEABLE, 0.0)


def _groups(dependence_NTK: Tensor) -> Iterator[tuple[range, Tensor]]:
    """Yield the groups of adjacent heads that attend to the same tokens, each with its mean weights, (T, K)."""
    heads = len(dependence_NTK)
    attends_NTK = dependence_NTK > 0
    first = 0
    for head in range(1, heads + 1):
        if head == heads or not torch.equal(attends_NTK[head], attends_NTK[first]):
            yield range(first, head), dependence_NTK[first:head].mean(0)
            first = head


def plan_table(pattern: str, sizes: Sizes, time: int, memory: int = 0) -> str:
    """Return a Markdown table of costs: one row per sublayer, one for the rest of the model, and one for the total.

    Args:
        pattern: the pattern.
        sizes: the model's sizes, including its direction.
        time: T, the sequence length at which FLOPs are counted. The head is assumed to predict every token.
        memory: M, the number of positions in a causal model's memory.

    Raises:
        UserError: the pattern cannot be parsed, or is invalid for this direction.
    """
    sublayers = plan(pattern, sizes.direction)
    parameters = costs.count_parameters(pattern, sizes)
    flops = costs.count_flops(pattern, sizes, time, memory)
    total = {"": "all", "sublayer": "", "kind": "", "reads": ""} | _costs(parameters, flops)
    rows = []
    producers = producer_indices(sublayers)
    for number, (planned, place) in enumerate(zip(sublayers, producers, strict=True), 1):
        own_parameters = costs.count_sublayer_parameters(planned, sizes)
        own_flops = costs.count_sublayer_flops(planned, sizes, time, memory)
        parameters -= own_parameters
        flops -= own_flops
        row = {
            "": str(number),
            "sublayer": planned.text,
            "kind": planned.kind.name,
            "reads": "" if place is None else f"{planned.kind.reads} of {place + 1}",
        }
        rows.append(row | _costs(own_parameters, own_flops))
    rest = {"": "", "sublayer": "", "kind": "shared, embeddings, head", "reads": ""} | _costs(parameters, flops)
    return markdown_table([*rows, rest, total], left=("sublayer", "kind", "reads"))


def _costs(parameters: int, flops: int) -> dict[str, str]:
    return {"parameters": f"{parameters:,}", "MFLOP": f"{flops / 1e6:,.2f}"}


def text_picture(seen: AttendedTokens) -> str:
    """Return a text picture of the tokens that a sublayer attends to, with one line per query."""
    blocks = []
    for heads, weights_TK in seen.by_heads:
        title = seen.title
        if len(seen.by_heads) > 1:
            title = f"{seen.title}, {name_heads(heads)}"
        lines = [" ".join(map(_sign, row)) for row in weights_TK.tolist()]
        blocks.append("\n".join([title, *lines]))
    return "\n\n".join(blocks)


def _sign(weight: float) -> str:
    if weight == 0:
        return UNSEEN
    if weight < 0.5:
        return FAINT
    return SEEN


def name_heads(heads: range) -> str:
    """Format a range of heads as ``head 1`` or ``heads 1 to 8``."""
    if len(heads) == 1:
        return f"head {heads.start + 1}"
    return f"heads {heads.start + 1} to {heads.stop}"


def draw_attended_tokens(all_seen: Sequence[AttendedTokens], path: Path) -> None:
    """Draw one panel per sublayer and group of heads: rows are queries, columns are keys, and darker means larger."""
    panels = []
    for seen in all_seen:
        for heads, weights in seen.by_heads:
            title = seen.title
            if len(seen.by_heads) > 1:
                title += f"\n{name_heads(heads)}"
            panels.append((title, weights))
    from lazyformer_fairseq.report.figures import picture

    columns = min(COLUMNS, len(panels))
    rows = math.ceil(len(panels) / columns)
    with picture(path, rows, columns, panel=(2.2, 2.55)) as grid:
        for axis in grid.flat:
            axis.set_axis_off()
        for axis, (title, weights_TK) in zip(grid.flat, panels, strict=False):
            axis.set_axis_on()
            axis.grid(False)
            axis.imshow(weights_TK.numpy(), cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
            wrapped = title.replace(",", ",\n") if len(title) > 26 else title
            axis.set_title(wrapped, fontsize=7)
            axis.tick_params(labelsize=6)
        for axis in grid[:, 0]:
            axis.set_ylabel("query", fontsize=7)
        for axis in grid[-1]:
            axis.set_xlabel("key", fontsize=7)


class Spans(NamedTuple):
    """The learned attention spans of one sublayer.

    Attributes:
        number: the sublayer's number, counted from 1 at the lowest sublayer.
        ramp: the number of tokens beyond the span over which the weights fall to zero.
        tokens: each head's span, z, in tokens.
    """

    number: int
    ramp: int
    tokens: list[float]


def read_spans(checkpoint: Path) -> list[Spans]:
    """Read the learned spans from a checkpoint of one of this package's models, in order from the lowest sublayer up.

    Raises:
        UserError: the file is not a checkpoint, or its model has no learned spans.
    """
    from lazyformer_fairseq.evaluation import checkpoints

    state = checkpoints.load(checkpoint)
    pattern = (state["cfg"].get("model") or {}).get("sublayer_pattern")
    if pattern is None:
        raise UserError(f"{checkpoint}: not a checkpoint from this package")
    weights: dict[str, Tensor] = {name: weight for name, weight in state["model"].items() if name.endswith(SHARES)}
    if not weights:
        raise UserError(
            f"{checkpoint}: the sublayers ({pattern}) have no learned spans; only sublayers such as s[span=1024] do"
        )
    found = []
    for name, shares in weights.items():
        number = int(name.removesuffix(SHARES).rpartition(".")[2])
        values = plan(pattern)[number].values
        tokens = (shares.float().clamp(0, 1) * values["span"]).tolist()
        found.append(Spans(number + 1, values["ramp"], tokens))
    return sorted(found)


def spans_table(found: list[Spans]) -> str:
    """Return a text table with one line per sublayer: its ramp, its mean span and each head's span."""
    lines = [
        f"{'sublayer':>8} {'ramp':>8} {'mean':>8}   each head's span in tokens; beyond it, weights fall over the ramp"
    ]
    for spans in found:
        heads = " ".join(f"{tokens:.0f}" for tokens in sorted(spans.tokens))
        lines.append(f"{spans.number:>8} {spans.ramp:>8} {np.mean(spans.tokens):>8.1f}   {heads}")
    return "\n".join(lines)
