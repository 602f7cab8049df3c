"""The reproduction of LazyFormer (arXiv 2102.12702): the paper's numbers, the steps, and the report's sections."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Optional

from lazyformer_fairseq.data.glue import TASKS, find_task
from lazyformer_fairseq.errors import UserError, nearest
from lazyformer_fairseq.evaluation.bench.models import OURS, REGISTERED
from lazyformer_fairseq.evaluation.planning import PAPER_TERAFLOPS
from lazyformer_fairseq.experiments.reproduce.engine import (
    PYTHONS_PROSE,
    Reproduction,
    Step,
    missing,
    our_command,
    show_losses,
    show_picture,
)
from lazyformer_fairseq.finetuning.benchmark import TableRow
from lazyformer_fairseq.finetuning.paper_numbers import COLUMNS, PAPER_TASKS
from lazyformer_fairseq.finetuning.report import average_of, model_row
from lazyformer_fairseq.finetuning.report import write_report as write_glue_report
from lazyformer_fairseq.finetuning.results import Results, read_results
from lazyformer_fairseq.finetuning.tasks.glue import BENCHMARK as GLUE
from lazyformer_fairseq.patterns.architectures import ARCHITECTURES
from lazyformer_fairseq.report.numbers import NOTHING
from lazyformer_fairseq.report.tables import markdown_table
from lazyformer_fairseq.storage.json_files import read_json

TABLE_1 = ("bert_base", "lazyformer_m2x6_s", "lazyformer_m2x6_sd", "lazyformer_m2x6")
TABLE_4 = ("lazyformer_m2x6_w6144", "lazyformer_m2x7")
FIGURE_3 = ("lazyformer_m2x6_s", "lazyformer_m3x4_s", "lazyformer_m4x3_s", "lazyformer_m6x2_s")
FURTHER_CHECKPOINTS = 5  # besides the checkpoints in Figure 2: the latest three, checkpoint_best and checkpoint_last
BOOKS = "books"
PROSE_MODULE = "lazyformer_fairseq.experiments.prose"
NOT_TEXT = ("glue", "glue.download")  # scripts/download_glue.sh unpacks to glue.download


@dataclass(frozen=True)
class Printed:
    """A model in the paper's tables, with the paper's numbers.

    Attributes:
        arch: the model's name in this package.
        name: the model's name in the paper.
        seconds: the seconds per 100 updates on eight V100s; None for the models in Table 4, for which the paper only
            says "the same pre-training cost".
        average: the average GLUE score.
        mnli: the MNLI scores, matched/mismatched, if Table 4 has them.
    """

    arch: str
    name: str
    seconds: Optional[int]
    average: float
    mnli: Optional[str] = None


MODELS = (
    # The MNLI scores of M2x6-S are as printed in Table 4; Table 1 has 85.69/85.46.
    Printed(arch="bert_base", name="BERT", seconds=45, average=83.52),
    Printed(arch="lazyformer_m2x6_s", name="M2x6-S", seconds=35, average=83.69, mnli="85.72/35.67"),
    Printed(arch="lazyformer_m2x6_sd", name="M2x6-SD", seconds=38, average=83.52),
    Printed(arch="lazyformer_m2x6", name="M2x6", seconds=45, average=84.56, mnli="86.34/86.31"),
    Printed(arch="lazyformer_m3x4_sd", name="M3x4-SD", seconds=35, average=82.94),
    Printed(arch="lazyformer_m4x3_sd", name="M4x3-SD", seconds=34, average=83.22),
    Printed(arch="lazyformer_m6x2_sd", name="M6x2-SD", seconds=33, average=82.47),
    Printed(arch="lazyformer_m5m3m2m2_sd", name="M5M3M2M2-SD", seconds=35, average=82.89),
    Printed(arch="lazyformer_m2m2m3m5_sd", name="M2M2M3M5-SD", seconds=35, average=82.82),
    Printed(arch="lazyformer_m2x6_w6144", name="M2x6 (6144, 768, 12)", seconds=None, average=84.77, mnli="86.08/86.57"),
    Printed(arch="lazyformer_m2x7", name="M2x7", seconds=None, average=84.75, mnli="86.25/86.26"),
)
PRINTED = {row.arch: row for row in MODELS}


@dataclass(frozen=True)
class Size:
    """The sizes of a reproduction, either full or miniature.

    Attributes:
        corpus: further options of `lazyformer corpus`, with underscores instead of dashes.
        pretraining: further options of `lazyformer pretrain`.
        bench: further options of `lazyformer bench`.
        finetuning: further options of `lazyformer finetune`.
        updates: the number of pre-training updates.
        kept: the updates at which checkpoints are kept and fine-tuned, as in Figure 2; the paper prints scores only for
            500,000 updates.
        validate_every: the number of updates between validations.
        length: the number of tokens per sequence.
        sequences: the number of sequences per update.
        tasks: the GLUE tasks.
        lengths: the sequence lengths in Figure 3.
        flops_per_second: the training speed per device that the plan assumes, in FLOP/s.
        shrink: the number by which all widths are divided.
    """

    corpus: Mapping[str, Any]
    pretraining: Mapping[str, Any]
    bench: Mapping[str, Any]
    finetuning: Mapping[str, Any]
    updates: int
    kept: tuple[int, ...]
    validate_every: int
    length: int
    sequences: int
    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    flops_per_second: float
    shrink: int = 1

    @property
    def is_tiny(self) -> bool:
        """True if this is the miniature version."""
        return self.shrink > 1

    def widths(self, arch: str) -> tuple[int, int, int]:
        """Return an arch's embedding dimension, feed-forward width and number of heads.

        In the miniature version, the head size is 8.
        """
        row = ARCHITECTURES[arch]
        embed_dim = row.encoder_embed_dim // self.shrink
        if self.is_tiny:
            heads = embed_dim // 8
        else:
            heads = row.encoder_attention_heads
        return embed_dim, row.encoder_ffn_embed_dim // self.shrink, heads

    def bench_arch(self, arch: str) -> str:
        """Return the name of the arch to time, or of its `_tiny` counterpart in the miniature version."""
        if self.is_tiny:
            return f"{arch.removesuffix('_base')}_tiny"
        return arch


PAPER = Size(
    corpus={"vocab_size": 32768},
    pretraining={},
    bench={"tokens": 8192, "rounds": 20, "budget": "45min"},
    finetuning={},
    updates=1_000_000,
    kept=(200_000, 400_000, 500_000, 600_000, 800_000, 1_000_000),
    validate_every=5000,  # that is, at every checkpoint
    length=512,
    sequences=256,
    tasks=PAPER_TASKS,
    lengths=(512, 1024, 2048, 4096, 6144),
    flops_per_second=PAPER_TERAFLOPS * 1e12,
)

TINY = Size(
    corpus={"vocab_size": 4000, "valid_share": 0.1, "word_coverage": 1},
    pretraining={
        "recipe": "laptop",
        "without": "length-schedule,attention-dropout",
        "tokens_per_sample": 32,
        "max_positions": 64,
        "attention_backend": "eager",
        "sequences_per_gpu": 8,
        "num_workers": 0,
        "batch_size_valid": 64,
        "max_valid_steps": 20,
        "log_interval": 20,
    },
    bench={
        "tokens": 64,
        "rounds": 3,
        "budget": "2min",
        "baseline_arch": "bert_tiny",
        "backend": "eager",
        "baseline_backend": "eager",
    },
    finetuning={"lrs": 1e-3, "seeds": "1,2", "epochs": 6, "max_train_rows": 800},
    updates=1200,
    kept=(300, 600, 1200),
    validate_every=100,
    length=32,
    sequences=8,
    tasks=("CoLA", "RTE"),
    lengths=(32, 64),
    flops_per_second=5e9,  # on one core, at these sizes
    shrink=16,
)


@dataclass(frozen=True)
class Inputs:
    """The texts, tasks and models of a reproduction.

    Attributes:
        raw: the folder of text as the user specified it, or "demo".
        texts: the inputs of `lazyformer corpus`.
        glue: the folder containing GLUE's official download.
        tasks: the tasks' names in the table of GLUE tasks.
        models: the archs to pre-train and fine-tune.
    """

    raw: str
    texts: tuple[str, ...]
    glue: Path
    tasks: tuple[str, ...]
    models: tuple[str, ...]


def find_inputs(raw: str, out: Path, size: Size, models: Sequence[str] = (), tasks: Sequence[str] = ()) -> Inputs:
    """Find a reproduction's inputs and check that they exist.

    Args:
        raw: the folder of text, with GLUE's official download in its subfolder `glue`; or "demo".
        out: the reproduction's folder.
        size: the reproduction's sizes.
        models: the archs to pre-train and fine-tune; empty for Tables 1 and 4, "all" to include Table 3.
        tasks: the GLUE tasks; empty for the tasks in `size` (a miniature version uses only tasks that exist).

    Raises:
        UserError: a folder or a task file is missing, or a model is not in the paper's tables.
    """
    if "all" in models:
        models = tuple(PRINTED)
    else:
        models = tuple(models or (*TABLE_1, *TABLE_4))
    for name in models:
        if name not in PRINTED:
            raise UserError(f"--models {name}: choose from {', '.join(PRINTED)}, or all{nearest(name, PRINTED)}")
    chosen = tuple(find_task(name).name for name in tasks)
    if raw == PYTHONS_PROSE:
        if not size.is_tiny:
            raise UserError(
                f"{PYTHONS_PROSE}: this text is only about a megabyte long and works only with --tiny; use "
                "a folder of text"
            )
        made = out / "raw"
        return Inputs(raw, (str(made / "prose.jsonl"),), made / "glue", ("CoLA",), models)

    folder = Path(raw)
    if not folder.is_dir():
        raise UserError(
            f"{raw}: no such folder; create it with scripts/download_wikipedia.sh and scripts/download_books.sh"
        )
    glue = folder / "glue"
    wanted = chosen or size.tasks
    missing_files = {task: _missing_files(glue, task) for task in wanted}
    present = tuple(task for task in wanted if not missing_files[task])
    may_leave_out = size.is_tiny and not chosen and present
    if len(present) < len(wanted) and not may_leave_out:
        files = ", ".join(file for files in missing_files.values() for file in files)
        raise UserError(
            f"{glue} does not contain {files}; put GLUE's official download there (scripts/download_glue.sh {glue}) "
            "or a link to it, or choose fewer --tasks"
        )
    texts = []
    for path in sorted(folder.iterdir()):
        if path.name == BOOKS and path.is_dir():
            texts.append(f"book:{path}")
        elif path.name not in NOT_TEXT and not path.name.startswith("."):
            texts.append(str(path))
    if not texts:
        raise UserError(f"{raw} contains no text; add a Wikipedia dump and a folder `{BOOKS}` that contains books")
    return Inputs(str(folder.absolute()), tuple(texts), glue, present, models)


def _missing_files(glue: Path, task: str) -> list[str]:
    folder = TASKS[task].folder
    splits = TASKS[task].splits
    needed = [split.file for name, split in splits.items() if not name.startswith("test")]
    return [f"{folder}/{file}" for file in needed if not (glue / folder / file).is_file()]


def reproduction(size: Size, inputs: Inputs, out: Path, precision: str) -> Reproduction:
    """Return the reproduction of the paper.

    Args:
        size: the reproduction's sizes.
        inputs: its texts, tasks and models.
        out: the folder for the results.
        precision: the benchmarks' precision; all other commands choose theirs based on the machine.
    """
    page = _Page(size, inputs, out)
    settings = {
        "raw": inputs.raw,
        "glue": str(inputs.glue.absolute()),
        "tasks": list(inputs.tasks),
        "size": "tiny" if size.is_tiny else "paper",
        "updates": size.updates,
    }

    timed_alone = ", ".join(arch for arch in PRINTED if arch not in inputs.models) or "none"
    introduction = (
        "Columns and rows marked (paper) show the numbers printed in arXiv 2102.12702. All others were measured here "
        f"with one pre-training seed. Pre-trained and fine-tuned (--models): {', '.join(inputs.models)}. Only timed: "
        f"{timed_alone}. GLUE tasks: {', '.join(inputs.tasks)}."
    )
    if size.is_tiny:
        introduction = (
            f"**This shows that everything runs, not which model is better**: widths are divided by {size.shrink}, "
            f"and each model trains for {size.updates:,} updates of {size.sequences} sequences with {size.length} "
            f"tokens each. In the benchmarks, all models have the same tiny widths.\n\n{introduction}"
        )

    return Reproduction(
        paper="LazyFormer",
        settings=settings,
        steps=list_steps(size, inputs, out, precision),
        sections={
            f"Tables 1 and 4: GLUE after {size.updates:,} updates": page.glue,
            "Figure 2: validation loss and GLUE": page.losses,
            "Tables 2 and 3: time per update": page.times,
            "Figure 3: speed-up against length": page.speedups,
        },
        introduction=introduction,
        note=f"Pre-trained: {', '.join(inputs.models)}. Only timed: {timed_alone}; choose others with --models.",
        flops_per_second=size.flops_per_second,
        is_tiny=size.is_tiny,
    )


def finetuned_updates(arch: str, size: Size) -> tuple[int, ...]:
    """Return the updates whose checkpoints are fine-tuned: all of Figure 2 for a model in Table 1, else the last."""
    if arch in TABLE_1:
        return size.kept
    return size.kept[-1:]


def list_steps(size: Size, inputs: Inputs, out: Path, precision: str) -> list[Step]:
    """Return all steps in execution order.

    Args:
        size: the reproduction's sizes.
        inputs: its texts, tasks and models.
        out: the folder for the results.
        precision: the benchmarks' precision.
    """
    steps = []
    if inputs.raw == PYTHONS_PROSE:
        step = Step(
            name="text",
            what="Python's prose, and a task built from it",
            command=(PROSE_MODULE, str(inputs.glue.parent), str(size.corpus["valid_share"])),
            output=inputs.glue,
        )
        steps.append(step)

    steps += [
        Step(
            name="corpus",
            what="prepare the data",
            command=our_command("corpus", *inputs.texts, out / "data", **size.corpus),
            output=out / "data" / "manifest.json",
            needs=tuple(step.name for step in steps),
        ),
        Step(
            name="bench_tables",
            what="times for Tables 2 to 4",
            command=_bench(size, PRINTED, (size.length,), precision, out / "bench" / "tables"),
            output=out / "bench" / "tables" / "results.json",
            removes_partial_output=True,
        ),
        Step(
            name="bench_figure_3",
            what="speed-up against length for Figure 3",
            command=_bench(size, ("bert_base", *FIGURE_3), size.lengths, precision, out / "bench" / "figure_3"),
            output=out / "bench" / "figure_3" / "results.json",
            removes_partial_output=True,
        ),
    ]

    for arch in inputs.models:
        updates = finetuned_updates(arch, size)
        pretrained = out / "pretraining" / arch
        steps += [
            Step(
                name=f"pretrain_{arch}",
                what=f"{arch}, {size.updates:,} updates",
                command=_pretrain(size, arch, out / "data", pretrained),
                output=pretrained / f"checkpoint_update_{size.updates}.pt",
                needs=("corpus",),
                checkpoints=len(size.kept) + FURTHER_CHECKPOINTS,
            ),
            Step(
                name=f"glue_{arch}",
                what=f"{arch}, fine-tuned from {len(updates)} of its checkpoints",
                command=_finetune(size, inputs, arch, pretrained, out / "glue"),
                output=out / "glue" / "runs" / f"{arch}-{updates[-1]}",
                needs=(f"pretrain_{arch}",),
            ),
        ]
    return steps


def _bench(
    size: Size,
    archs: Iterable[str],
    lengths: Sequence[int],
    precision: str,
    output: Path,
) -> tuple[str, ...]:
    options = {
        "arch": ",".join(map(size.bench_arch, archs)),
        "lengths": ",".join(map(str, lengths)),
        "what": "training",
        "relative_position_buckets": 32,
        "precision": precision,
        **size.bench,
        "output": output,
    }
    return our_command("bench", "models", **options)


def _pretrain(size: Size, arch: str, data: Path, save_dir: Path) -> tuple[str, ...]:
    options = dict(size.pretraining)
    if size.is_tiny:
        names = ("encoder_embed_dim", "encoder_ffn_embed_dim", "encoder_attention_heads")
        options |= dict(zip(names, size.widths(arch), strict=True))
    options |= {
        "max_update": size.updates,
        "sequences_per_update": size.sequences,
        "keep_updates_list": ",".join(map(str, size.kept)),
        "validate_interval_updates": size.validate_every,
        "save_dir": save_dir,
    }
    return our_command("pretrain", arch, data, **options)


def _finetune(size: Size, inputs: Inputs, arch: str, pretrained: Path, output: Path) -> tuple[str, ...]:
    models = []
    for updates in finetuned_updates(arch, size):
        models.append(f"{arch}-{updates}={pretrained / f'checkpoint_update_{updates}.pt'}")
    options = {
        "data": inputs.glue,
        "output": output,
        "tasks": ",".join(inputs.tasks),
        **size.finetuning,
        "keep_checkpoints": "none",
    }
    return our_command("finetune", *models, **options)


class _Page:
    """The report's sections, which show the measured numbers next to the paper's."""

    def __init__(self, size: Size, inputs: Inputs, out: Path):
        self.size = size
        self.inputs = inputs
        self.out = out

    def _glue_results(self) -> Optional[Results]:
        folder = self.out / "glue"
        if not (folder / "runs" / "grid.json").exists():
            return None
        results = read_results(folder, GLUE)
        if results.runs:
            return results
        return None

    def _glue_row(self, arch: str) -> Optional[TableRow]:
        """Return a model's GLUE scores after its last update, or None if there are none yet."""
        results = self._glue_results()
        name = f"{arch}-{self.size.updates}"
        if results is None or name not in results.grid.models:
            return None
        return model_row(results, GLUE, name)

    def _glue_average(self, arch: str) -> str:
        row = self._glue_row(arch)
        average = row and average_of(row, GLUE)
        if average is None:
            return NOTHING
        return f"{average:.2f}"

    def glue(self, report: Path) -> str:
        """Return the table of average scores, and write the separate GLUE report, which covers all of Table 1."""
        if self._glue_results() is None:
            return missing("glue_*")
        write_glue_report(self.out / "glue", report / "glue")
        rows = []
        for arch, printed in PRINTED.items():
            row = self._glue_row(arch)
            scores = [f"{row.scores[name]:.2f}" for name in COLUMNS["MNLI-m/mm"] if row and name in row.scores]
            embed_dim, ffn_embed_dim, heads = self.size.widths(arch)
            rows.append(
                {
                    "model": printed.name,
                    "(W, H, N)": f"{ffn_embed_dim}, {embed_dim}, {heads}",
                    "MNLI-m/mm": "/".join(scores) or NOTHING,
                    "MNLI-m/mm (paper)": printed.mnli or NOTHING,
                    "Avg.": self._glue_average(arch),
                    "Avg. (paper)": f"{printed.average:.2f}",
                }
            )
        return (
            f"{markdown_table(rows)}\n\nThe paper prints 85.72/35.67 in Table 4, but 85.69/85.46 for the same model in "
            "Table 1. [glue/glue.md](glue/glue.md) shows each task's scores at every checkpoint next to Table 1."
        )

    def losses(self, report: Path) -> str:
        """Return the validation losses and the picture of GLUE scores by checkpoint."""
        blocks = [show_losses([self.out / "pretraining" / arch for arch in PRINTED], report, "pretrain_*")]
        if (report / "glue" / "glue.png").exists():
            blocks.append("![GLUE scores against pre-training updates](glue/glue.png)")
        return "\n\n".join(blocks)

    def _benchmark(self, name: str) -> Optional[dict[str, Any]]:
        path = self.out / "bench" / name / "results.json"
        if path.exists():
            return read_json(path)
        return None

    def times(self, _: Path) -> str:
        """Return each model's time per update and its speed-up over BERT."""
        results = self._benchmark("tables")
        if results is None:
            return missing("bench_tables")
        cell = results["cells"][0]
        berts_seconds = PRINTED["bert_base"].seconds
        rows = [{"model": "BERT, no attention dropout (ours)", **_times(cell, OURS)}]
        for arch, printed in PRINTED.items():
            row = {"model": printed.name, **_times(cell, self.size.bench_arch(arch))}
            row["GLUE Avg."] = self._glue_average(arch)
            row["speed-up (paper)"] = NOTHING
            if printed.seconds:
                row["speed-up (paper)"] = f"{berts_seconds / printed.seconds:.2f}x"
            row["GLUE Avg. (paper)"] = f"{printed.average:.2f}"
            rows.append(row)
        rows[0] |= {header: NOTHING for header in rows[1] if header not in rows[0]}
        explanation = (
            f"Times are for an update on {cell['batch']} sequences of {cell['time']} tokens in {cell['precision']}, on "
            f"one {results['machine']['device']}. The first speed-up is relative to the paper's BERT, which has "
            "attention dropout 0.1, as do the SD models. The second is relative to the same BERT without "
            "attention dropout on its fastest back end; this isolates the gain from lazy attention. The paper's "
            "speed-ups are computed from its seconds per 100 updates on eight V100s."
        )
        return f"{markdown_table(rows, left=('back end',))}\n\n{explanation}"

    def speedups(self, report: Path) -> str:
        """Return the speed-up over BERT at each length, with the benchmark's pictures."""
        results = self._benchmark("figure_3")
        if results is None:
            return missing("bench_figure_3")
        rows = []
        for arch in FIGURE_3:
            row = {"model": arch}
            for cell in results["cells"]:
                row[f"n = {cell['time']:,}"] = _speedup(fastest(cell, self.size.bench_arch(arch)), REGISTERED)
            rows.append(row)
        explanation = (
            "Speed-ups are relative to the paper's BERT, which has attention dropout 0.1. The pictures also show "
            "speed-ups relative to BERT without attention dropout. The paper's figure has no numbers, but its text "
            "says almost 2x."
        )
        pictures = sorted((self.out / "bench" / "figure_3").glob("speedup_training_*.png"))
        show = partial(show_picture, report=report, what="speed-up against tokens per sequence")
        return "\n\n".join([markdown_table(rows), explanation, *map(show, pictures)])


def fastest(cell: Mapping[str, Any], model: str) -> Optional[dict[str, Any]]:
    """Return the row of a model's fastest back end in a benchmark cell, or None if the model was not timed."""
    rows = [row for row in cell["rows"] if row["model"] == model]
    return min(rows, key=lambda row: row["seconds"]["median"], default=None)


def _times(cell: Mapping[str, Any], model: str) -> dict[str, str]:
    row = fastest(cell, model)
    columns = {
        "ms": NOTHING,
        "speed-up": _speedup(row, REGISTERED),
        "speed-up over BERT, no attention dropout": _speedup(row, OURS),
        "back end": NOTHING,
    }
    if row:
        columns["ms"] = f"{1000 * row['seconds']['median']:.1f}"
        columns["back end"] = row["back_end"]
    return columns


def _speedup(row: Optional[Mapping[str, Any]], baseline: str) -> str:
    against = row and row["against"].get(baseline)
    if against:
        return f"{against['speedup']:.2f}x"
    return NOTHING
