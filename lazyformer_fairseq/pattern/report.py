"""A pattern as text: its plan with what each sublayer costs, and what sublayers look at."""

from collections.abc import Iterator, Sequence

from torch import Tensor

from lazyformer_fairseq.measure.costs.flops import (
    count_flops,
    count_parameters,
    count_sublayer_flops,
    count_sublayer_parameters,
)
from lazyformer_fairseq.pattern.seen import Seen
from lazyformer_fairseq.patterns.grammar import PlannedSublayer, places_read, plan
from lazyformer_fairseq.patterns.sizes import Sizes
from lazyformer_fairseq.report.tables import markdown_table

SEEN, FAINT, UNSEEN = "■", "□", "·"
LEGEND = (
    f"rows: queries, columns: keys; {SEEN} seen, {FAINT} with less than half the weight of its row's most, {UNSEEN} not"
)


def plan_table(pattern: str, sizes: Sizes, time: int, memory: int = 0) -> str:
    """A Markdown table: a row for each sublayer, one for what is around them, one for all.

    Args:
        sizes: of the model, its direction included.
        time: T, tokens of the sequence whose FLOPs count; the head predicts all of them.
        memory: M, remembered positions.

    Raises:
        UserError: the pattern cannot be read, or is not for this direction.
    """
    sublayers = plan(pattern, sizes.direction)
    rows, inside = [], [0, 0]
    for number, (planned, reads) in enumerate(zip(sublayers, _what_each_reads(sublayers), strict=True), 1):
        costs = count_sublayer_parameters(planned, sizes), count_sublayer_flops(planned, sizes, time, memory)
        inside = [before + cost for before, cost in zip(inside, costs, strict=True)]
        rows.append(_row(str(number), planned.text, planned.kind.name, reads, *costs))
    costs = count_parameters(pattern, sizes), count_flops(pattern, sizes, time, memory)
    rows.append(
        _row("", "", "shared, embeddings, head", "", *(all_ - part for all_, part in zip(costs, inside, strict=True)))
    )
    rows.append(_row("all", "", "", "", *costs))
    return markdown_table(rows, left=("sublayer", "kind", "reads"))


def _row(number: str, text: str, kind: str, reads: str, parameters: int, flops: int) -> dict[str, str]:
    return {
        "": number,
        "sublayer": text,
        "kind": kind,
        "reads": reads,
        "parameters": f"{parameters:,}",
        "MFLOP": f"{flops / 1e6:,.2f}",
    }


def _what_each_reads(sublayers: Sequence[PlannedSublayer]) -> Iterator[str]:
    """``distribution of 3`` for a sublayer that reads the third's, nothing for one that reads none."""
    for planned, place in zip(sublayers, places_read(sublayers), strict=True):
        yield "" if place is None else f"{planned.kind.reads} of {place + 1}"


def text_picture(seen: Seen) -> str:
    """What a sublayer looks at, a line for each query."""
    blocks = []
    for heads, weights_TK in seen.by_heads:
        title = seen.title if len(seen.by_heads) == 1 else f"{seen.title}, {name_heads(heads)}"
        blocks.append("\n".join([title, *map(_line, weights_TK)]))
    return "\n\n".join(blocks)


def name_heads(heads: range) -> str:
    """``head 1`` or ``heads 1 to 8``."""
    return f"head {heads.start + 1}" if len(heads) == 1 else f"heads {heads.start + 1} to {heads.stop}"


def _line(weights_K: Tensor) -> str:
    return " ".join(UNSEEN if weight == 0 else FAINT if weight < 0.5 else SEEN for weight in weights_K.tolist())
