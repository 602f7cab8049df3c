"""The latency that a pattern costs, as a number and as a differentiable expectation."""

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.patterns.grammar import PlannedSublayer, plan, read_sublayer
from lazyformer_fairseq.patterns.kinds import kinds
from lazyformer_fairseq.storage.json_files import read_json

# Milliseconds of single sublayers by text, such as ``s``, and by ``s_read`` where another one reads it (as ``s`` unless
# given), and of the rest of the model, embeddings and head. What is missing, such as identity, costs nothing.
Prices = Mapping[str, float]
READ, REST = "_read", "rest"


def latency_of(prices: Prices, pattern: str) -> float:
    """Milliseconds of a model of this pattern."""
    planned = plan(pattern) if pattern else ()
    return prices.get(REST, 0.0) + sum(_price(prices, sublayer, _is_read(sublayer)) for sublayer in planned)


def _price(prices: Prices, sublayer: PlannedSublayer, is_read: bool) -> float:
    alone = prices.get(sublayer.text, 0.0)
    return prices.get(sublayer.text + READ, alone) if is_read else alone


def _is_read(sublayer: PlannedSublayer) -> bool:
    return any(what in sublayer.kind.kept_for_consumers for what in sublayer.consumers)


def expected_latency(prices: Prices, probabilities_LK: Tensor, candidates: Sequence[str]) -> Tensor:
    """Mean milliseconds of a pattern drawn from these probabilities; differentiable.

    Exact if layers are drawn independently of each other and a kind keeps one thing for others. Whether an ``s``
    is read depends on the layers above: ``read[what]`` is the probability that one of them that reads it comes before
    the next that hands it on.
    """
    rows = [read_sublayer(name) for name in candidates]
    zero = probabilities_LK.new_zeros(())
    total = zero + prices.get(REST, 0.0)
    read = {what: zero for row in rows for what in (*row.kind.kept_for_consumers, row.kind.reads) if what}
    for layer in reversed(probabilities_LK.unbind()):
        for row, chance in zip(rows, layer.unbind(), strict=True):
            is_read = 1 - math.prod((1 - read[what] for what in row.kind.kept_for_consumers), start=zero + 1)
            alone, kept = _price(prices, row, False), _price(prices, row, True)
            total = total + chance * (alone + is_read * (kept - alone))
        for what, before in read.items():
            reads = _sum_where(layer, [row.kind.reads == what for row in rows])
            renews = _sum_where(layer, [what in row.kind.hands_on for row in rows])
            read[what] = reads + (1 - reads - renews) * before
    return total


def _sum_where(chances_K: Tensor, is_meant: Sequence[bool]) -> Tensor:
    return chances_K[torch.tensor(is_meant, device=chances_K.device)].sum()


def read_price_list(path: Path, sublayers: Collection[str]) -> Prices:
    """Reads ``{"s": 1.2, "f": 0.7}``: milliseconds by sublayer; ``s_read`` is as ``s`` and ``rest`` 0 unless given.

    Raises:
        UserError: the file is not such an object, lacks a sublayer, or has an unknown name or a price below 0.
    """
    content = read_json(path, 'give an object of milliseconds like {"s": 1.2, "f": 0.7}')
    plain = [kind.letter for kind in kinds() if not kind.is_identity]
    names = dict.fromkeys([*plain, *sublayers])
    known = [*names, *(name + READ for name in names if read_sublayer(name).kind.kept_for_consumers), REST]
    if not set(content) <= set(known):
        raise UserError(f'{path}: must be an object of milliseconds like {{"s": 1.2, "f": 0.7}}; names: {known}')
    for name, value in content.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            raise UserError(f"{path}: {name} is {value!r}, must be milliseconds, 0 or more")
    for name in sublayers:
        if name not in content:
            raise UserError(f"{path}: has no price of {name}, which the candidates or the baseline have")
    return content
