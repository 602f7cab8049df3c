"""PAR Transformer's page: the paper's tables and figures, what was measured here beside what is printed there."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Optional

from lazyformer_fairseq.evaluation.bench.run import milliseconds
from lazyformer_fairseq.evaluation.bench.settings import REMEMBERED, SEGMENT
from lazyformer_fairseq.evaluation.costs.flops import count_flops, count_sublayer_flops, makers_of_blocks
from lazyformer_fairseq.evaluation.planning.job import job_of_arch
from lazyformer_fairseq.experiments.reproduce import par as of
from lazyformer_fairseq.experiments.reproduce.engine import (
    Reproduction,
    Step,
    copied,
    losses_of,
    missing,
    what_it_took,
    written_on,
)
from lazyformer_fairseq.experiments.search.run import report_of
from lazyformer_fairseq.patterns.architectures import CAUSAL_ARCHITECTURES
from lazyformer_fairseq.patterns.grammar import read_sublayer
from lazyformer_fairseq.report.numbers import NOTHING
from lazyformer_fairseq.report.tables import markdown_table
from lazyformer_fairseq.storage.atomic import write_text
from lazyformer_fairseq.storage.json_files import read_json


def reproduction(size: of.Size, inputs: Mapping[str, Path], out: Path, speed: float) -> Reproduction:
    """All of it.

    Args:
        speed: FLOP/s of training that all devices reach together.
    """
    steps = of.steps(size, inputs, out)
    found, whole = of.supernet_fit(), of.supernet_job().count_memory(128, "fp32", "cuda", "eager")
    rests_on = (
        f"By arithmetic: {speed / 1e12:g} TFLOP/s of training (--teraflops), a backward pass of two forward passes, "
        f"{of.BYTES_OF_PARAMETER} bytes a parameter of a checkpoint. Evaluations, benchmarks and the preparation of "
        "text are not counted.",
        "The search at the paper's size (128 streams of 192 tokens an update, 32 layers of s, f and identity) in fp32: "
        f"by formula {whole.peak / of.GB:.0f} GB in one piece; on a V100 of 16 GB an update takes "
        f"{found.update_freq} pieces of {found.batch} streams (--update-freq), {found.memory.peak / of.GB:.1f} GB. "
        "It is one process, and its hours are at the speed of one device in half precision: in fp32 it is slower.",
    )
    write = partial(write_report, steps, size, inputs, out)
    costs = partial(of.cost_of, size=size, speed=speed)
    return Reproduction(steps, of.as_json(size, inputs), costs, rests_on, write, size.is_tiny)


def write_report(steps: Sequence[Step], size: of.Size, inputs: Mapping[str, Path], out: Path) -> Path:
    """Writes OUT/report: report.md and pictures, of what is there. Returns the page."""
    places = of.Places(out)
    parts = [
        ("# PAR Transformer, reproduced" + (" in miniature" if size.is_tiny else ""), _introduction(size, inputs)),
        ("## Figures 1 and 2: the supernet, and what it finds", _figures(places)),
        ("## Table 1: how much attention a model needs", _table_1(places)),
        ("## Tables 2 and 6: base models", _table_2(places, size)),
        ("## Table 3: large models, and models of characters", _table_3(places)),
        ("## Table 5: hyperparameters of the base models", _table_5()),
        ("## Table 7: longer training", _table_7(places, size)),
        ("## What it took", what_it_took(steps, out)),
    ]
    page = places.report / "report.md"
    write_text(page, "\n\n".join(f"{title}\n\n{text}" for title, text in parts) + "\n")
    return page


def _introduction(size: of.Size, inputs: Mapping[str, Path]) -> str:
    said = (
        "Columns marked (paper) are printed in arXiv 2009.04534, with latencies of an A100; all others were measured "
        f"here, one seed each. Texts: {', '.join(inputs)}. {written_on()}"
    )
    tiny = (
        "**This shows that everything runs, not which model is better**: width 32, segments and memory of 16 tokens, 8 "
        f"streams, {size.updates} updates. The paper's numbers are of other texts.\n\n"
    )
    return tiny * size.is_tiny + said


def _table(header: str, rows: Iterable[Sequence[str]]) -> str:
    names = header.split("; ")
    return markdown_table([dict(zip(names, row, strict=True)) for row in rows], left=("model", "pattern"))


def _measured(places: of.Places, name: str, split: str = "test") -> Optional[dict[str, Any]]:
    file = places.evaluation(name, split)
    return read_json(file) if file.exists() else None


def _ppl(found: Optional[Mapping[str, Any]]) -> str:
    return f"{found['perplexity']:.1f}" if found else NOTHING


def _attentions(arch: str) -> str:
    return str(len(list(makers_of_blocks(CAUSAL_ARCHITECTURES[arch].sublayer_pattern))))


def _pattern(arch: str) -> str:
    return f"`{CAUSAL_ARCHITECTURES[arch].sublayer_pattern}`"


def _figures(places: of.Places) -> str:
    sizes, latencies = job_of_arch(of.BASE[0]).sizes, places.search / "latencies.json"
    prices, rows = read_json(latencies) if latencies.exists() else {}, []
    for letter, growth in (("s", "O(N²)"), ("f", "O(N)")):
        block = read_sublayer(letter)
        flops = f"{count_sublayer_flops(block, sizes, SEGMENT, REMEMBERED) / 1e9:.3f}"
        rows.append((block.kind.name, flops, growth, f"{prices[letter]:.3f}" if letter in prices else NOTHING))
    blocks = [
        _table("block; GFLOPs; latency grows with length as; ms here", rows),
        f"GFLOPs are counted at the paper's size, for {SEGMENT} tokens behind {REMEMBERED} at batch 1; milliseconds "
        "are of one block in the search's sizes. The paper draws its figures and prints no numbers of them.",
    ]
    result, picture = places.search / "result.json", places.search / "probabilities.png"
    if result.exists():
        blocks.append(copied(picture, places.report, "probability of each block in each layer"))
    return "\n\n".join([*blocks, report_of(read_json(result)) if result.exists() else missing("search")])


def _table_1(places: of.Places) -> str:
    rows = (
        (_attentions(arch), _pattern(arch), ours, f"{printed:.1f}")
        for arch, printed in of.TABLE_1.items()
        for ours in [_ppl(_measured(places, arch))]
    )
    return _table("s; pattern; PPL; PPL (paper)", rows)


def _table_2(places: of.Places, size: of.Size) -> str:
    results = places.bench / "results.json"
    cells = read_json(results)["cells"] if results.exists() else []
    timed = {row["model"]: row["seconds"] for cell in cells for row in cell["rows"] if cell["workload"] == "causal"}
    baseline, rows = timed.get(size.arch(of.BASE[0])), []
    for arch, printed in of.TABLE_2.items():
        job, seconds = job_of_arch(arch), timed.get(size.arch(arch))
        share = f"{seconds['median'] / baseline['median']:.2f}" if seconds and baseline else NOTHING
        theirs = f"{printed.milliseconds / of.TABLE_2[of.BASE[0]].milliseconds:.2f}"
        times = (milliseconds(seconds) if seconds else NOTHING, f"{printed.milliseconds:.1f}", share, theirs)
        gigaflops = f"{count_flops(job.pattern, job.sizes, SEGMENT, REMEMBERED) / 1e9:.1f}"
        counts = (f"{job.parameters / 1e6:.0f}M", f"{of.TABLE_6[arch][0]}M", gigaflops, f"{of.TABLE_6[arch][1]}")
        quality = (_ppl(_measured(places, arch)), f"{printed.measure:.1f}")
        rows.append((printed.name, _pattern(arch), *times, *quality, *counts))
    header = (
        "model; pattern; ms; ms (paper); of Transformer-XL's; of Transformer-XL's (paper); PPL; PPL (paper); "
        "parameters; parameters (paper); GFLOPs; GFLOPs (paper)"
    )
    said = "Parameters and GFLOPs are counted at the paper's size."
    losses = losses_of(list(map(places.training, of.BASE)), places.report, "train_*")
    return "\n\n".join([_table(header, rows), said, *([] if cells else [missing("bench")]), *losses])


def _table_3(places: of.Places) -> str:
    rows = []
    for (corpus, arch), printed in of.TABLE_3.items():
        found, is_words = _measured(places, of.training_name(corpus, arch)), corpus == of.WIKITEXT
        time = ours = NOTHING
        if found:
            time = f"{1000 * found['tgt_len'] / found['tokens_per_second']:.1f}"
            ours = _ppl(found) if is_words else f"{found['bits_per_token']:.3f}"
        theirs = f"{printed.milliseconds:.1f}", f"{printed.measure:.{1 if is_words else 2}f}"
        rows.append((corpus, printed.name, _pattern(arch), time, theirs[0], ours, theirs[1]))
    said = "A segment's time is the mean while the test split is evaluated at batch 1, in single precision."
    header = "text; model; pattern; ms a segment; ms (paper); PPL / bpc; PPL / bpc (paper)"
    return f"{_table(header, rows)}\n\n{said}"


def _table_5() -> str:
    row = CAUSAL_ARCHITECTURES["par_transformer_base"]
    d_head = row.decoder_embed_dim // row.decoder_attention_heads
    rows = (
        (name, str(original), str(printed), str(getattr(row, field, d_head)))
        for name, (original, printed, field) in of.TABLE_5.items()
    )
    return _table("hyperparameter; Transformer-XL (paper); PAR (paper); ours", rows)


def _table_7(places: of.Places, size: of.Size) -> str:
    rows = []
    for arch, printed in of.TABLE_7.items():
        names = (arch, of.training_name(of.WIKITEXT, arch, size.longer))
        ours = [_ppl(_measured(places, name, "valid")) for name in names]
        rows.append((of.TABLE_2[arch].name, ours[0], f"{printed[0]:.1f}", ours[1], f"{printed[1]:.1f}"))
    first = size.updates or CAUSAL_ARCHITECTURES[of.BASE[0]].updates
    at_first, at_last = f"valid PPL at {first:,}", f"valid PPL at {size.longer:,}"
    return _table(f"model; {at_first}; at 40k (paper); {at_last}; at 140k (paper)", rows)
