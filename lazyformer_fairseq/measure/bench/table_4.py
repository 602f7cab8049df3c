"""PAR Transformer's Table 4 without scores: costs of encoders in SQuAD's inference, the paper's latencies beside."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import torch

from lazyformer_fairseq.measure.bench.models.contenders import VOCAB_SIZE, OurModel, random_tokens
from lazyformer_fairseq.measure.bench.models.report import milliseconds
from lazyformer_fairseq.measure.bench.models.settings import check_names
from lazyformer_fairseq.measure.bench.paper_latency import PAPER_LATENCY
from lazyformer_fairseq.measure.costs.flops import count_flops, count_parameters, sublayer_flops
from lazyformer_fairseq.measure.costs.latency import measure
from lazyformer_fairseq.measure.costs.machine import PRECISIONS, describe_machine, describe_versions
from lazyformer_fairseq.modules.networks.heads import SPAN
from lazyformer_fairseq.patterns.architectures import ARCHITECTURES
from lazyformer_fairseq.patterns.grammar import plan
from lazyformer_fairseq.patterns.sizes import EncoderSizes
from lazyformer_fairseq.report.numbers import spread, with_spread
from lazyformer_fairseq.report.tables import markdown_table
from lazyformer_fairseq.storage.atomic import refuse_filled_folder, write_text
from lazyformer_fairseq.storage.json_files import write_json

BASELINE = "bert_base_absolute"
SPANS = "squad"  # the head's name
WARM_UP = 2


@dataclass(frozen=True)
class Cost:
    """What a row of :data:`ARCHITECTURES` costs by formula.

    Attributes:
        parameters: with the masked-LM head, at 32,768 pieces.
        flops: of one sequence through encoder and span head, twice the multiply-adds of the matrix products.
        attention_flops: of these the products of n x n numbers; the projections are no part of them.
    """

    parameters: int
    flops: int
    attention_flops: int


def cost_of(arch: str, length: int) -> Cost:
    """By formula, of a sequence of `length` tokens."""
    row = ARCHITECTURES[arch]
    widths = (row.encoder_embed_dim, row.encoder_ffn_embed_dim, row.encoder_attention_heads)
    sizes = EncoderSizes(VOCAB_SIZE, *widths, row.max_positions or 512, row.relative_position_buckets)
    span_head = 2 * length * row.encoder_embed_dim * 2
    products = (
        flops.scores + flops.values
        for flops in (sublayer_flops(planned, sizes, length) for planned in plan(row.sublayer_pattern))
    )
    encoder = count_flops(row.sublayer_pattern, sizes, length, predicted=0)
    return Cost(count_parameters(row.sublayer_pattern, sizes), encoder + span_head, sum(products))


class _Inference:
    """Span logits of one sequence; keeps the seconds that the process computed in each call, on all its threads."""

    def __init__(self, arch: str, length: int, device: str, precision: torch.dtype):
        self.model = OurModel(ARCHITECTURES[arch].options(), max(length, 512)).model
        self.model.register_classification_head(SPANS, 2, kind=SPAN)
        self.model.to(device, precision).eval()
        self.tokens_BT = random_tokens(1, length, device)
        self.seconds: list[float] = []

    @torch.inference_mode()
    def __call__(self) -> torch.Tensor:
        begin = time.process_time()
        logits, _ = self.model(self.tokens_BT, classification_head_name=SPANS, has_padding=False)
        self.seconds.append(time.process_time() - begin)
        return logits


def table_4_to(folder: Path, archs: Sequence[str], length: int, threads: Optional[int] = None, **how: Any) -> str:
    """Measures, writes ``table4.json`` and ``table4.md``, and returns what the latter holds.

    Args:
        archs, length: as for :func:`measure_table_4`, as is `how`.
        threads: of torch; None for as many as it has.

    Raises:
        UserError: there is no such arch, or the folder is not empty.
    """
    refuse_filled_folder(folder)
    check_names("--arch", archs, tuple(ARCHITECTURES))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads or before)
        rows = measure_table_4(archs, length, **how)
        machine = {**describe_machine(how["device"]), **describe_versions()}
    finally:
        torch.set_num_threads(before)
    facts = {**machine, "precision": how["precision"], "tokens": length, "rounds": rows[0]["seconds"]["n"]}
    described = "\n".join(f"- {name}: {value}" for name, value in facts.items())
    text = f"{described}\n\n{table(rows)}"
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "table4.json", {**facts, "rows": rows})
    write_text(folder / "table4.md", f"{text}\n")
    return text


def measure_table_4(
    archs: Sequence[str], length: int, rounds: int, minutes: Optional[float], device: str, precision: str
) -> list[dict[str, Any]]:
    """Measures all in turn, round after round; a row each: costs, samples, and times as a share of BERT's.

    Args:
        archs: of :data:`ARCHITECTURES`; :data:`BASELINE` is measured whether it is among them or not.
        length: n, tokens of the sequence.
        rounds, minutes, device: as for :func:`~lazyformer_fairseq.measure.costs.latency.measure`.
        precision: a key of :data:`PRECISIONS`.
    """
    named = list(dict.fromkeys([*archs, BASELINE]))
    things = {arch: _Inference(arch, length, device, PRECISIONS[precision]) for arch in named}
    seconds = None if minutes is None else 60 * minutes
    timings = measure(things, rounds, WARM_UP, device, description="table 4", seconds=seconds)
    wall = {arch: timings[arch].samples for arch in named}
    computed = {arch: tuple(things[arch].seconds[WARM_UP:]) for arch in named}
    return [_row(arch, length, wall, computed if device == "cpu" else {}) for arch in named]


def _row(arch: str, length: int, wall: Mapping[str, tuple], computed: Mapping[str, tuple]) -> dict[str, Any]:
    cost, of_baseline = cost_of(arch, length), cost_of(BASELINE, length)
    row = {
        "arch": arch,
        "pattern": ARCHITECTURES[arch].sublayer_pattern,
        "buckets": ARCHITECTURES[arch].relative_position_buckets,
        **vars(cost),
        "seconds": {**spread(wall[arch]), "samples": list(wall[arch])},
        "share_of_bert": spread(_ratios(wall, arch)),
        "share_of_bert_by_flops": cost.flops / of_baseline.flops,
        "paper_ms_on_a100": PAPER_LATENCY.get(arch),
    }
    if computed:
        row["processor_seconds"] = {**spread(computed[arch]), "samples": list(computed[arch])}
        row["processor_share_of_bert"] = spread(_ratios(computed, arch))
    return row


def _ratios(samples: Mapping[str, tuple], arch: str) -> list[float]:
    """To the baseline's, round by round."""
    return [one / other for one, other in zip(samples[arch], samples[BASELINE], strict=True)]


COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "model": lambda row: row["arch"],
    "pattern": lambda row: f"`{row['pattern']}`",
    "parameters": lambda row: f"{row['parameters'] / 1e6:.1f}M",
    "GFLOPs": lambda row: f"{row['flops'] / 1e9:.1f}",
    "of attention": lambda row: f"{row['attention_flops'] / 1e9:.1f}",
    "of BERT's": lambda row: f"{row['share_of_bert_by_flops']:.2f}",
    "ms": lambda row: milliseconds(row["seconds"]),
    "of BERT's ms": lambda row: with_spread(row["share_of_bert"], 2),
    "processor's ms": lambda row: milliseconds(row["processor_seconds"]),
    "of BERT's processor's ms": lambda row: with_spread(row["processor_share_of_bert"], 2),
    "A100, ms (paper)": lambda row: row["paper_ms_on_a100"] or "",
    "of BERT's (paper)": lambda row: _paper_share(row["paper_ms_on_a100"]),
}


def _paper_share(latency: Optional[str]) -> str:
    return f"{float(latency.rstrip('+')) / float(PAPER_LATENCY[BASELINE]):.2f}" if latency else ""


def table(rows: Sequence[dict[str, Any]]) -> str:
    """In Markdown, a model a line; without the processor's time for a GPU."""
    shown = [name for name in COLUMNS if "processor" not in name or "processor_seconds" in rows[0]]
    return markdown_table([{name: COLUMNS[name](row) for name in shown} for row in rows], left=("pattern",))
