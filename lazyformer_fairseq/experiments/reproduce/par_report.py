"""PAR Transformer's page: the paper's tables and figures, what was measured here beside what is printed there."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Optional

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.curves.report import draw, histories, labels, logs_of_runs, table
from lazyformer_fairseq.experiments.reproduce import par as of
from lazyformer_fairseq.experiments.reproduce.engine import Reproduction, Step, copied, missing, what_it_took
from lazyformer_fairseq.experiments.search.run import report_of
from lazyformer_fairseq.measure.bench.run import milliseconds
from lazyformer_fairseq.measure.bench.settings import REMEMBERED, SEGMENT
from lazyformer_fairseq.measure.costs.flops import count_flops, count_sublayer_flops
from lazyformer_fairseq.measure.costs.machine import describe_machine, describe_versions, device_named
from lazyformer_fairseq.measure.planning.job import job_of_arch
from lazyformer_fairseq.patterns.architectures import CAUSAL_ARCHITECTURES
from lazyformer_fairseq.patterns.grammar import expand, read_sublayer
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
    places.report.mkdir(parents=True, exist_ok=True)
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
    facts = {**describe_machine(device_named("auto")), **describe_versions()}
    said = (
        "Columns marked (paper) are printed in arXiv 2009.04534, with latencies of an A100; all others were measured "
        f"here, one seed each. Texts: {', '.join(inputs)}. Written on: "
        + "; ".join(f"{name} {value}" for name, value in facts.items())
        + "."
    )
    if size.is_tiny:
        said = (
            f"**This shows that everything runs, not which model is better**: width 32, segments and memory of 16 "
            f"tokens, 8 streams, {size.updates} updates. The paper's numbers are of other texts.\n\n{said}"
        )
    return said


def _measured(places: of.Places, name: str, split: str = "test") -> Optional[dict[str, Any]]:
    file = places.evaluation(name, split)
    return read_json(file) if file.exists() else None


def _ppl(found: Optional[Mapping[str, Any]]) -> str:
    return f"{found['perplexity']:.1f}" if found else NOTHING


def _pattern(arch: str) -> str:
    return f"`{CAUSAL_ARCHITECTURES[arch].sublayer_pattern}`"


def _figures(places: of.Places) -> str:
    sizes, latencies = job_of_arch("transformer_xl_base").sizes, places.search / "latencies.json"
    prices = read_json(latencies) if latencies.exists() else {}
    rows = [
        {
            "block": read_sublayer(letter).kind.name,
            "GFLOPs": f"{count_sublayer_flops(read_sublayer(letter), sizes, SEGMENT, REMEMBERED) / 1e9:.3f}",
            "latency grows with length as": grows,
            "ms here": f"{prices[letter]:.3f}" if letter in prices else NOTHING,
        }
        for letter, grows in (("s", "O(N²)"), ("f", "O(N)"))
    ]
    said = (
        f"GFLOPs are counted at the paper's size, for {SEGMENT} tokens behind {REMEMBERED} at batch 1; milliseconds "
        "are of one block in the search's sizes. The paper draws its figures and prints no numbers of them."
    )
    blocks = [markdown_table(rows, left=("latency grows with length as",)), said]
    if not (places.search / "result.json").exists():
        return "\n\n".join([*blocks, missing("search")])
    picture = copied(places.search / "probabilities.png", places.report, "probability of each block in each layer")
    return "\n\n".join([*blocks, picture, report_of(read_json(places.search / "result.json"))])


def _table_1(places: of.Places) -> str:
    rows = [
        {
            "s": str(expand(CAUSAL_ARCHITECTURES[arch].sublayer_pattern).count("s")),
            "pattern": _pattern(arch),
            "PPL": _ppl(_measured(places, arch)),
            "PPL (paper)": f"{printed:.1f}",
        }
        for arch, printed in of.TABLE_1.items()
    ]
    return markdown_table(rows, left=("pattern",))


def _table_2(places: of.Places, size: of.Size) -> str:
    results = places.bench / "results.json"
    cells = read_json(results)["cells"] if results.exists() else []
    timed = {row["model"]: row["seconds"] for cell in cells for row in cell["rows"] if cell["workload"] == "causal"}
    baseline, rows = timed.get(size.arch("transformer_xl_base")), []
    for arch, printed in of.TABLE_2.items():
        job, seconds = job_of_arch(arch), timed.get(size.arch(arch))
        millions, gigaflops = of.TABLE_6[arch]
        flops = count_flops(job.pattern, job.sizes, SEGMENT, REMEMBERED)
        rows.append(
            {
                "model": printed.name,
                "pattern": _pattern(arch),
                "ms": milliseconds(seconds) if seconds else NOTHING,
                "ms (paper)": f"{printed.milliseconds:.1f}",
                "of Transformer-XL's": f"{seconds['median'] / baseline['median']:.2f}"
                if seconds and baseline
                else NOTHING,
                "of Transformer-XL's (paper)": f"{printed.milliseconds / of.TABLE_2[of.BASE[0]].milliseconds:.2f}",
                "PPL": _ppl(_measured(places, arch)),
                "PPL (paper)": f"{printed.measure:.1f}",
                "parameters": f"{job.parameters / 1e6:.0f}M",
                "parameters (paper)": f"{millions}M",
                "GFLOPs": f"{flops / 1e9:.1f}",
                "GFLOPs (paper)": f"{gigaflops}",
            }
        )
    blocks = [markdown_table(rows, left=("pattern",)), "Parameters and GFLOPs are counted at the paper's size."]
    if not cells:
        blocks.append(missing("bench"))
    try:
        folders = [str(each) for each in map(places.training, of.BASE) if (each / "train.log").exists()]
        shown, silent = histories(logs_of_runs(folders))
    except UserError:
        return "\n\n".join([*blocks, missing("train_*")])
    draw(shown, labels(shown), ["updates", "hours", "flops"], places.report / "loss.png")
    picture = "![validation loss of the base models against updates, time and FLOPs](loss.png)"
    return "\n\n".join([*blocks, table(shown, labels(shown)), *silent, picture])


def _table_3(places: of.Places) -> str:
    rows = []
    for (corpus, arch), printed in of.TABLE_3.items():
        found = _measured(places, of.training_name(corpus, arch))
        is_words = corpus == of.WIKITEXT
        ours = _ppl(found) if is_words else f"{found['bits_per_token']:.3f}" if found else NOTHING
        rows.append(
            {
                "text": corpus,
                "model": printed.name,
                "pattern": _pattern(arch),
                "ms a segment": f"{1000 * found['tgt_len'] / found['tokens_per_second']:.1f}" if found else NOTHING,
                "ms (paper)": f"{printed.milliseconds:.1f}",
                "PPL / bpc": ours,
                "PPL / bpc (paper)": f"{printed.measure:.{1 if is_words else 2}f}",
            }
        )
    said = "A segment's time is the mean while the test split is evaluated at batch 1, in single precision."
    return f"{markdown_table(rows, left=('model', 'pattern'))}\n\n{said}"


def _table_5() -> str:
    row = CAUSAL_ARCHITECTURES["par_transformer_base"]
    rows = [
        {
            "hyperparameter": name,
            "Transformer-XL (paper)": str(original),
            "PAR (paper)": str(printed),
            "ours": str(getattr(row, field) if field else row.decoder_embed_dim // row.decoder_attention_heads),
        }
        for name, (original, printed, field) in of.TABLE_5.items()
    ]
    return markdown_table(rows)


def _table_7(places: of.Places, size: of.Size) -> str:
    first = size.updates or CAUSAL_ARCHITECTURES[of.BASE[0]].updates
    rows = [
        {
            "model": of.TABLE_2[arch].name,
            f"valid PPL at {first:,}": _ppl(_measured(places, arch, "valid")),
            "at 40k (paper)": f"{printed[0]:.1f}",
            f"valid PPL at {size.longer:,}": _ppl(
                _measured(places, of.training_name(of.WIKITEXT, arch, size.longer), "valid")
            ),
            "at 140k (paper)": f"{printed[1]:.1f}",
        }
        for arch, printed in of.TABLE_7.items()
    ]
    return markdown_table(rows)
