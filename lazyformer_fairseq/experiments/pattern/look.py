"""Tables and pictures of ``lazyformer pattern``: plans with their costs, what sublayers look at, learned spans.

Which tokens a sublayer looks at is asked of the sublayer itself: no kind describes its own picture, or could lie.
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
from lazyformer_fairseq.patterns.grammar import places_read, plan
from lazyformer_fairseq.patterns.kinds import DISTRIBUTION, ENCODER, Sizes
from lazyformer_fairseq.report.tables import markdown_table

COLUMNS = 5  # of panels
SHARES = ".inner.choices.span.shares"
SEEN = "■"
FAINT = "□"
UNSEEN = "·"
LEGEND = (
    f"rows: queries, columns: keys; {SEEN} seen, {FAINT} with less than half the weight of its row's most, {UNSEEN} not"
)
HEAD_SIZE = 8
# Weights so small that scores are nearly equal: how much a key counts is then the sublayer's doing, not the weights'.
STD = 1e-3
# Of what the most important token counts for a query; less than this comes from the query itself, not from a key.
NOTICEABLE = 1e-3


@dataclass(frozen=True)
class Seen:
    """Tokens that one sublayer looks at.

    Attributes:
        title: the sublayer, and the one that it reads.
        by_heads: (heads, weights) of each group of neighbouring heads that look at the same tokens. Weights are (T, K):
            how much the output at a token depends on the input at another, 1 for each row's greatest and 0 for what it
            does not see. K = M + T, the memory of a causal model first.
    """

    title: str
    by_heads: tuple[tuple[range, Tensor], ...]


def refuses_bias(pattern: str, direction: str) -> bool:
    """Return whether a sublayer of the pattern cannot stand with T5's bias."""
    return any("bias" in row.refuses for each in plan(pattern, direction) for row in chosen_variants(each.values))


def build_network(
    pattern: str,
    direction: str,
    num_heads: int,
    tokens: int,
    memory: int = 0,
    bias_buckets: int = 0,
) -> Stack:
    """Return a narrow network of a pattern, in double precision, whose weights are all alike to :func:`look`.

    Args:
        pattern: the pattern of its sublayers.
        direction: ENCODER or CAUSAL.
        num_heads: N.
        tokens: longest input of an encoder.
        memory: M, tokens that a causal model remembers.
        bias_buckets: buckets of T5's bias in an encoder. It is 0 and shows nothing; what cannot go with it is refused.

    Raises:
        UserError: the pattern cannot be built for this direction, these heads or so many tokens.
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


def look(network: Stack, tokens: int, memory: int = 0) -> list[Seen]:
    """Return what its sublayers look at, each type and settings once, the lowest first.

    Each is run on random vectors; the gradient of its heads' outputs tells how much they depend on each token. An
    ``l`` looks at what its ``s`` looks at, and is left out.

    Args:
        network: a network that :func:`build_network` returned.
        tokens: T.
        memory: M, remembered positions of a causal model.
    """
    found: dict[str, Seen] = {}
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
            found[title] = Seen(title, tuple(_groups(_dependence(heads, inputs))))
        below = {**below, **handed_on}
    return list(found.values())


def _run(
    inner: nn.Module,
    x_BTC: Tensor,
    below: SharedState,
    shared: Context,
    memory_BMC: Tensor | None,
) -> tuple[Tensor, SharedState]:
    """Return the output of each head, (T, N, D), and what the sublayer hands on; inputs become leaves of a graph."""
    for part in (x_BTC, memory_BMC):
        if part is not None:
            part.requires_grad_()
    merged: list[Tensor] = []
    has_heads = isinstance(inner, AttentionSublayer)
    if has_heads:
        hook = inner.out_proj.register_forward_pre_hook(lambda _, given: merged.append(given[0]))
    else:
        hook = None
    output, handed_on = inner(x_BTC, below, shared, *([memory_BMC] if inner.attends else []))
    if hook is None:
        return output[0][:, None], handed_on
    hook.remove()
    return merged[0][0].unflatten(-1, (inner.num_heads, -1)), handed_on


def _dependence(heads_TND: Tensor, inputs: list[Tensor]) -> Tensor:
    """Return (N, T, K): the length of the gradient of a random mix of each head's outputs by each token."""
    mixed_TN = heads_TND @ torch.randn(heads_TND.size(-1), dtype=heads_TND.dtype)
    rows = []
    for number in mixed_TN.flatten():
        gradients = torch.autograd.grad(number, inputs, retain_graph=True, allow_unused=True)
        parts = [
            torch.zeros_like(given) if part is None else part for given, part in zip(inputs, gradients, strict=True)
        ]
        rows.append(torch.cat(parts, 1)[0].norm(dim=-1))
    dependence_NTK = torch.stack(rows).unflatten(0, mixed_TN.shape).transpose(0, 1)
    relative = dependence_NTK / dependence_NTK.amax(-1, keepdim=True).clamp(min=1e-300)
    return relative.where(relative > NOTICEABLE, 0.0)


def _groups(dependence_NTK: Tensor) -> Iterator[tuple[range, Tensor]]:
    """Yield neighbouring heads that see the same tokens, with their mean."""
    first = 0
    for head in range(1, len(dependence_NTK) + 1):
        if head == len(dependence_NTK) or not torch.equal(dependence_NTK[head] > 0, dependence_NTK[first] > 0):
            yield range(first, head), dependence_NTK[first:head].mean(0)
            first = head


def plan_table(pattern: str, sizes: Sizes, time: int, memory: int = 0) -> str:
    """Return a Markdown table: a row per sublayer, one for what is around them, one for all.

    Args:
        pattern: the pattern of the sublayers.
        sizes: the sizes of the model, its direction included.
        time: T, tokens of the sequence whose FLOPs count; the head predicts all of them.
        memory: M, remembered positions.

    Raises:
        UserError: the pattern cannot be read, or is not for this direction.
    """
    sublayers = plan(pattern, sizes.direction)
    parameters = costs.count_parameters(pattern, sizes)
    flops = costs.count_flops(pattern, sizes, time, memory)
    total = {"": "all", "sublayer": "", "kind": "", "reads": ""} | _costs(parameters, flops)
    rows = []
    for number, (planned, place) in enumerate(zip(sublayers, places_read(sublayers), strict=True), 1):
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


def text_picture(seen: Seen) -> str:
    """Return what a sublayer looks at, a line per query."""
    blocks = []
    for heads, weights_TK in seen.by_heads:
        title = seen.title
        if len(seen.by_heads) > 1:
            title = f"{seen.title}, {name_heads(heads)}"
        signs = ([_sign(one) for one in row] for row in weights_TK.tolist())
        blocks.append("\n".join([title, *map(" ".join, signs)]))
    return "\n\n".join(blocks)


def _sign(weight: float) -> str:
    if weight == 0:
        return UNSEEN
    if weight < 0.5:
        return FAINT
    return SEEN


def name_heads(heads: range) -> str:
    """Return ``head 1`` or ``heads 1 to 8``."""
    if len(heads) == 1:
        return f"head {heads.start + 1}"
    return f"heads {heads.start + 1} to {heads.stop}"


def draw_seen(all_seen: Sequence[Seen], path: Path) -> None:
    """Draw a panel per sublayer and group of heads: rows are queries, columns keys, darker where a key weighs more."""
    panels = [
        (seen.title if len(seen.by_heads) == 1 else f"{seen.title}\n{name_heads(heads)}", weights)
        for seen in all_seen
        for heads, weights in seen.by_heads
    ]
    from lazyformer_fairseq.report.figures import picture

    columns = min(COLUMNS, len(panels))
    with picture(path, math.ceil(len(panels) / columns), columns, panel=(2.2, 2.55)) as grid:
        for axis in grid.flat:
            axis.set_axis_off()
        for axis, (title, weights_TK) in zip(grid.flat, panels, strict=False):
            axis.set_axis_on()
            axis.grid(False)
            axis.imshow(weights_TK.numpy(), cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
            axis.set_title(title.replace(",", ",\n") if len(title) > 26 else title, fontsize=7)
            axis.tick_params(labelsize=6)
        for axis in grid[:, 0]:
            axis.set_ylabel("query", fontsize=7)
        for axis in grid[-1]:
            axis.set_xlabel("key", fontsize=7)


class Spans(NamedTuple):
    """Spans of one sublayer.

    Attributes:
        number: among all sublayers, from 1, the lowest first.
        ramp: tokens over which weights fall beyond the span.
        tokens: z of each head.
    """

    number: int
    ramp: int
    tokens: list[float]


def read_spans(checkpoint: Path) -> list[Spans]:
    """Return the spans in a checkpoint of a model of ours, the lowest sublayer first.

    Raises:
        UserError: it is no checkpoint, or its model has no spans.
    """
    from lazyformer_fairseq.evaluation import checkpoints

    state = checkpoints.load(checkpoint)
    pattern = (state["cfg"].get("model") or {}).get("sublayer_pattern")
    if pattern is None:
        raise UserError(f"{checkpoint}: is of no model of this package")
    weights: dict[str, Tensor] = {name: weight for name, weight in state["model"].items() if name.endswith(SHARES)}
    if not weights:
        raise UserError(f"{checkpoint}: its sublayers ({pattern}) learn no spans, as those of s[span=1024] do")
    found = []
    for name, shares in weights.items():
        number = int(name.removesuffix(SHARES).rpartition(".")[2])
        values = plan(pattern)[number].values
        tokens = (shares.float().clamp(0, 1) * values["span"]).tolist()
        found.append(Spans(number + 1, values["ramp"], tokens))
    return sorted(found)


def spans_table(found: list[Spans]) -> str:
    """Return a line per sublayer."""
    lines = [f"{'sublayer':>8} {'ramp':>8} {'mean':>8}   each head, in tokens; beyond, weights fall to 0 over the ramp"]
    for spans in found:
        heads = " ".join(f"{tokens:.0f}" for tokens in sorted(spans.tokens))
        lines.append(f"{spans.number:>8} {spans.ramp:>8} {np.mean(spans.tokens):>8.1f}   {heads}")
    return "\n".join(lines)
