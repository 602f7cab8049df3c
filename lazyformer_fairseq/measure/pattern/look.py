"""Which tokens a sublayer looks at, asked of the sublayer itself: no kind describes its own picture, or could lie."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.modules.networks.causal_decoder import CausalDecoder
from lazyformer_fairseq.modules.networks.encoder import Encoder
from lazyformer_fairseq.modules.networks.stack import Stack
from lazyformer_fairseq.modules.sublayers.attention import AttentionSublayer
from lazyformer_fairseq.modules.sublayers.attention_variant import variant_classes
from lazyformer_fairseq.modules.sublayers.interface import Context, SharedState
from lazyformer_fairseq.patterns.grammar import PlannedSublayer, plan
from lazyformer_fairseq.patterns.kinds import DISTRIBUTION, ENCODER

HEAD_SIZE = 8
# Weights so small that scores are nearly equal: how much a key counts is then the kind's doing, not the weights'.
STD = 1e-3
# Of what the most important token counts for a query; less than this comes from the query itself, not from a key.
NOTICEABLE = 1e-3


@dataclass(frozen=True)
class Seen:
    """What one sublayer looks at.

    Attributes:
        title: the sublayer, and whom it reads.
        by_heads: (heads, weights) of each group of neighbouring heads that look at the same tokens. Weights are (T, K):
            how much the output at a token depends on the input at another, 1 for each row's greatest and 0 for what it
            does not see. K = M + T, the memory of a causal model first.
    """

    title: str
    by_heads: tuple[tuple[range, Tensor], ...]


def refuses_bias(pattern: str, direction: str) -> bool:
    """Whether a sublayer of the pattern cannot stand with T5's bias."""
    return any("bias" in choice.refuses for each in plan(pattern, direction) for choice in variant_classes(each.values))


def build_network(
    pattern: str, direction: str, num_heads: int, tokens: int, memory: int = 0, bias_buckets: int = 0
) -> Stack:
    """A narrow network of a pattern, in double precision, whose weights are all alike to :func:`look`.

    Args:
        bias_buckets: of T5's bias in an encoder, which is 0 and shows nothing: what cannot stand with it is refused.

    Raises:
        UserError: the pattern cannot be built for this direction, these heads or so many tokens.
    """
    torch.manual_seed(1)
    sizes = (HEAD_SIZE * num_heads, HEAD_SIZE, num_heads)
    options: dict[str, Any] = {"attention_backend": "eager"}
    try:
        if direction == ENCODER:
            options["relative_position_buckets"] = bias_buckets
            network = Encoder(pattern, None, *sizes, max_positions=tokens, **options)
        else:
            network = CausalDecoder(pattern, 2, *sizes, mem_len=memory, **options)
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
    """What its sublayers look at, each kind and settings once, the lowest first.

    Each is run on random vectors; the gradient of its heads' outputs tells how much they depend on each token. An
    ``l`` looks at what its ``s`` looks at, and is left out.

    Args:
        tokens: T.
        memory: M, remembered positions of a causal model.
    """
    found: dict[str, Seen] = {}
    below: SharedState = {}
    x_BTC = torch.randn(1, tokens, network.embed_dim, dtype=torch.float64)
    memory_BMC = torch.randn(1, memory, network.embed_dim, dtype=torch.float64) if memory else None
    shared = network.context(x_BTC, memory)
    for planned, sublayer in zip(network.plan, network.sublayers, strict=True):
        inner = getattr(sublayer, "inner", sublayer)
        heads, handed_on = _run(inner, x_BTC, below, shared, memory_BMC)
        title = _title(planned)
        if inner.attends and planned.kind.reads != DISTRIBUTION and title not in found:
            inputs = [part for part in (memory_BMC, x_BTC) if part is not None]
            found[title] = Seen(title, tuple(_groups(_dependence(heads, inputs))))
        below = {**below, **handed_on}
    return list(found.values())


def _title(planned: PlannedSublayer) -> str:
    return planned.text if planned.producer is None else f"{planned.text} reading {planned.producer.text}"


def _run(
    inner: nn.Module, x_BTC: Tensor, below: SharedState, shared: Context, memory_BMC: Tensor | None
) -> tuple[Tensor, SharedState]:
    """What each head puts out, (T, N, D), and what the sublayer hands on. Its inputs become leaves of a graph."""
    for part in (x_BTC, memory_BMC):
        if part is not None:
            part.requires_grad_()
    merged: list[Tensor] = []
    has_heads = isinstance(inner, AttentionSublayer)
    hook = inner.out_proj.register_forward_pre_hook(lambda _, given: merged.append(given[0])) if has_heads else None
    output, handed_on = inner(x_BTC, below, shared, *([memory_BMC] if inner.attends else []))
    if hook is None:
        return output[0][:, None], handed_on
    hook.remove()
    return merged[0][0].unflatten(-1, (inner.num_heads, -1)), handed_on


def _dependence(heads_TND: Tensor, inputs: list[Tensor]) -> Tensor:
    """(N, T, K): length of the gradient of a random mix of each head's outputs, by the token that it is taken of."""
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
    """Neighbouring heads that see the same tokens, with their mean."""
    first = 0
    for head in range(1, len(dependence_NTK) + 1):
        if head == len(dependence_NTK) or not torch.equal(dependence_NTK[head] > 0, dependence_NTK[first] > 0):
            yield range(first, head), dependence_NTK[first:head].mean(0)
            first = head
