"""LazyFormer (arXiv 2102.12702): what is reproduced, in its size and in miniature, what it prints, and the steps.

Table 1 as printed is with GLUE's reports.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Optional

from lazyformer_fairseq.data.glue import TASKS, find_task
from lazyformer_fairseq.data.labelled_files import TaskDescription
from lazyformer_fairseq.errors import UserError, nearest
from lazyformer_fairseq.evaluation.costs.flops import count_flops
from lazyformer_fairseq.evaluation.planning import PAPER_TERAFLOPS
from lazyformer_fairseq.evaluation.planning.job import Job, job_of_arch, with_options
from lazyformer_fairseq.experiments.reproduce.engine import CLI, GB, Cost, Step
from lazyformer_fairseq.finetuning.paper_numbers import LEARNING_RATES, PAPER_TASKS, SEEDS
from lazyformer_fairseq.patterns.architectures import ARCHITECTURES

TABLE_1 = ("bert_base", "lazyformer_m2x6_s", "lazyformer_m2x6_sd", "lazyformer_m2x6")
TABLE_4 = ("lazyformer_m2x6_w6144", "lazyformer_m2x7")
TABLE_3 = ("lazyformer_m3x4_sd", "lazyformer_m4x3_sd", "lazyformer_m6x2_sd", "lazyformer_m5m3m2m2_sd",
           "lazyformer_m2m2m3m5_sd")  # fmt: skip
FIGURE_3 = ("lazyformer_m2x6_s", "lazyformer_m3x4_s", "lazyformer_m4x3_s", "lazyformer_m6x2_s")
PYTHONS_PROSE = "demo"
GLUE, BOOKS = "glue", "books"
VALID_SHARE = "0.1"  # in miniature


class Printed(NamedTuple):
    """What the paper prints of a model.

    Attributes:
        seconds: of 100 updates on eight V100s; of Table 4's two no table has any: "the same pre-training cost".
        average: of GLUE.
        mnli: m/mm, where Table 4 has it.
    """

    name: str
    seconds: Optional[int]
    average: Optional[float]
    mnli: Optional[str] = None


PRINTED = {  # by our name
    "bert_base": Printed("BERT", 45, 83.52),
    "lazyformer_m2x6_s": Printed("M2x6-S", 35, 83.69, "85.72/35.67"),  # as printed; Table 1 has 85.69/85.46
    "lazyformer_m2x6_sd": Printed("M2x6-SD", 38, 83.52),
    "lazyformer_m2x6": Printed("M2x6", 45, 84.56, "86.34/86.31"),
    "lazyformer_m3x4_sd": Printed("M3x4-SD", 35, 82.94),
    "lazyformer_m4x3_sd": Printed("M4x3-SD", 34, 83.22),
    "lazyformer_m6x2_sd": Printed("M6x2-SD", 33, 82.47),
    "lazyformer_m5m3m2m2_sd": Printed("M5M3M2M2-SD", 35, 82.89),
    "lazyformer_m2m2m3m5_sd": Printed("M2M2M3M5-SD", 35, 82.82),
    "lazyformer_m2x6_w6144": Printed("M2x6 (6144, 768, 12)", None, 84.77, "86.08/86.57"),
    "lazyformer_m2x7": Printed("M2x7", None, 84.75, "86.25/86.26"),
}


@dataclass(frozen=True)
class Size:
    """How large everything is. Words are options of the commands.

    Attributes:
        corpus, pretraining, bench: further options of `lazyformer corpus`, `pretrain`, `bench`.
        updates: of pre-training.
        kept: updates at which checkpoints are kept and fine-tuned, as Figure 2 does; the paper prints 500,000 alone.
        validate_every: updates between validations.
        length, sequences: tokens of a sequence, sequences of an update, for the plan.
        tasks: of GLUE.
        rates, seeds, epochs, rows: of fine-tuning; rows None for all.
        lengths: of Figure 3.
        minutes: that each benchmark may take, before its last round.
        flops_per_second: what the plan takes for the speed of one device.
    """

    corpus: tuple[str, ...]
    pretraining: tuple[str, ...]
    bench: tuple[str, ...]
    updates: int
    kept: tuple[int, ...]
    validate_every: int
    length: int
    sequences: int
    tasks: tuple[str, ...]
    rates: tuple[float, ...]
    seeds: tuple[int, ...]
    epochs: int
    rows: Optional[int]
    lengths: tuple[int, ...]
    minutes: float
    flops_per_second: float
    is_tiny: bool = False

    def widths(self, arch: str) -> dict[str, int]:
        """Embedding, feed-forward and heads; in miniature a sixteenth of the widths, heads of 8."""
        row = ARCHITECTURES[arch]
        embed, inner, heads = row.encoder_embed_dim, row.encoder_ffn_embed_dim, row.encoder_attention_heads
        if self.is_tiny:
            embed, inner, heads = embed // 16, inner // 16, embed // 16 // 8
        return {"encoder-embed-dim": embed, "encoder-ffn-embed-dim": inner, "encoder-attention-heads": heads}

    def bench_arch(self, arch: str) -> str:
        """The row of the table that is timed."""
        return (arch.removesuffix("_base") if arch.endswith("_base") else arch) + "_tiny" if self.is_tiny else arch


PAPER = Size(
    corpus=("--vocab-size", "32768"),
    pretraining=(),
    bench=("--tokens", "8192", "--rounds", "20"),
    updates=1_000_000,
    kept=(200_000, 400_000, 500_000, 600_000, 800_000, 1_000_000),
    validate_every=5000,  # as it saves
    length=512,
    sequences=256,
    tasks=PAPER_TASKS,
    rates=LEARNING_RATES,
    seeds=SEEDS,
    epochs=TASKS["MNLI"].epochs,
    rows=None,
    lengths=(512, 1024, 2048, 4096, 6144),
    minutes=45,
    flops_per_second=PAPER_TERAFLOPS * 1e12,
)

TINY = Size(
    corpus=("--vocab-size", "4000", "--valid-share", VALID_SHARE, "--word-coverage", "1"),
    pretraining=(
        *("--recipe", "laptop", "--without", "length-schedule,attention-dropout"),
        *("--tokens-per-sample", "32", "--max-positions", "64"),
        *("--attention-backend", "eager", "--sequences-per-gpu", "8"),
        *("--num-workers", "0", "--batch-size-valid", "64", "--max-valid-steps", "20", "--log-interval", "20"),
    ),
    bench=(
        *("--tokens", "64", "--rounds", "3", "--baseline-arch", "bert_tiny", "--backend", "eager"),
        *("--baseline-backend", "eager"),
    ),
    updates=1200,
    kept=(300, 600, 1200),
    validate_every=100,
    length=32,
    sequences=8,
    tasks=("CoLA", "RTE"),
    rates=(1e-3,),
    seeds=(1, 2),
    epochs=6,
    rows=800,
    lengths=(32, 64),
    minutes=2,
    flops_per_second=5e9,  # of one core, at these sizes
    is_tiny=True,
)


@dataclass(frozen=True)
class Inputs:
    """Where the text and GLUE's files are.

    Attributes:
        raw: a folder of text, whose `books` are a document a file; None for the prose that Python carries.
        glue: the official download.
        tasks: names in GLUE's table.
        models: those that are pre-trained and fine-tuned.
    """

    raw: Optional[Path]
    glue: Path
    tasks: tuple[str, ...]
    models: tuple[str, ...]

    def texts(self, made: Path) -> list[str]:
        """What `lazyformer corpus` reads; `made` is the folder of Python's prose."""
        if self.raw is None:
            return [str(made / "prose.jsonl")]
        others = (GLUE, f"{GLUE}.download")  # the second has what scripts/download_glue.sh unpacks
        parts = sorted(path for path in self.raw.iterdir() if path.name not in others and path.name[0] != ".")
        return [f"book:{path}" if path.name == BOOKS and path.is_dir() else str(path) for path in parts]


def find_inputs(raw: str, tasks: tuple[str, ...], size: Size, made: Path, models: tuple[str, ...] = ()) -> Inputs:
    """Checks that everything is there.

    Args:
        raw: folder, in which `glue` is GLUE's download; or ``demo``.
        tasks: those given; none for the size's, in miniature as many of them as are there.
        made: where Python's prose, and the task that is made of it, go.
        models: none for those of Tables 1 and 4; "all" for Table 3's too.

    Raises:
        UserError: a folder or a task's file is missing, or a model is none of the paper's tables.
    """
    models = tuple(PRINTED) if models == ("all",) else models or TRAINED
    if unknown := [name for name in models if name not in PRINTED]:
        close = nearest(unknown[0], PRINTED)
        raise UserError(f"--models {unknown[0]}: choose from {', '.join(PRINTED)}, or all{close}")
    chosen = tuple(find_task(name).name for name in tasks)
    if raw == PYTHONS_PROSE:
        if not size.is_tiny:
            raise UserError(f"{PYTHONS_PROSE}: is a megabyte of text, for --tiny alone; give a folder of text")
        return Inputs(None, made / GLUE, ("CoLA",), models)
    folder = Path(raw)
    if not folder.is_dir():
        raise UserError(f"{raw}: no such folder; scripts/download_wikipedia.sh and scripts/download_books.sh fill it")
    glue = folder / GLUE
    lacking = {task: missing for task in chosen or size.tasks if (missing := _missing_files(glue, TASKS[task]))}
    if lacking and (chosen or not size.is_tiny or len(lacking) == len(size.tasks)):
        raise UserError(
            f"{glue}: lacks {', '.join(file for files in lacking.values() for file in files)}; put GLUE's official "
            f"download there (scripts/download_glue.sh {glue}), or a link to it, or give fewer --tasks"
        )
    found = Inputs(folder, glue, tuple(task for task in chosen or size.tasks if task not in lacking), models)
    if not found.texts(made):
        raise UserError(f"{raw}: holds no text; give it a dump of Wikipedia, and a folder `{BOOKS}` of books")
    return found


def _missing_files(glue: Path, description: TaskDescription) -> list[str]:
    needed = (split.file for name, split in description.splits.items() if not name.startswith("test"))
    return [f"{description.folder}/{file}" for file in needed if not (glue / description.folder / file).is_file()]


def as_json(size: Size, inputs: Inputs) -> dict[str, Any]:
    """What must stay the same when a reproduction is resumed."""
    raw = PYTHONS_PROSE if inputs.raw is None else str(inputs.raw.absolute())
    of_inputs = {"raw": raw, "glue": str(inputs.glue.absolute()), "tasks": list(inputs.tasks)}
    return {**of_inputs, "size": "tiny" if size.is_tiny else "paper", "updates": size.updates}


TRAINED, TIMED = (*TABLE_1, *TABLE_4), (*TABLE_1, *TABLE_3, *TABLE_4)
BYTES_OF_PARAMETER = 16  # in a checkpoint, all in 32 bits: weights, the optimizer's copy, two moments
FURTHER_CHECKPOINTS = 5  # the last three, best and last
DISK_OF_CORPUS = 3  # times the text, while it is made
MEGABYTES_A_CORE_SECOND = 1.2
BYTES_OF_TOKEN = 5  # of English in GLUE's files, other columns included


class Places:
    """Folders in OUT: `made` for Python's prose, `data` of the corpus, results of `glue`, and the `report`."""

    def __init__(self, out: Path):
        self.out = out
        self.made, self.data, self.glue, self.report = (out / name for name in ("raw", "data", "glue", "report"))

    def pretraining(self, arch: str) -> Path:
        return self.out / "pretraining" / arch

    def checkpoint(self, arch: str, updates: int) -> Path:
        return self.pretraining(arch) / f"checkpoint_update_{updates}.pt"

    def bench(self, name: str) -> Path:
        return self.out / "bench" / name


def model_name(arch: str, updates: int) -> str:
    """Of a checkpoint, in GLUE's tables."""
    return f"{arch}-{updates}"


def finetuned_updates(arch: str, size: Size) -> tuple[int, ...]:
    """At which a model's checkpoints are fine-tuned: those of Figure 2; of Tables 3 and 4 the last."""
    return size.kept if arch in TABLE_1 else size.kept[-1:]


def steps(size: Size, inputs: Inputs, out: Path, precision: str) -> list[Step]:
    """All of them, in the order in which they run.

    Args:
        precision: of the benchmarks; all other commands take that of the machine.
    """
    places = Places(out)
    prose = (CLI.replace("cli", "experiments.demo.text"), str(places.made), VALID_SHARE)
    corpus = (CLI, "corpus", *inputs.texts(places.made), str(places.data), *size.corpus)
    found = [Step("text", "Python's prose, and a task made of it", prose, places.made / "glue")]
    found = found if inputs.raw is None else []
    return [
        *found,
        Step("corpus", "text becomes data", corpus, places.data / "manifest.json", tuple(each.name for each in found)),
        _bench("tables", "times of Tables 2 to 4", size, places, precision, TIMED, (size.length,)),
        _bench("figure_3", "speed-up against length, Figure 3", size, places, precision, FIGURE_3, size.lengths),
        *(step for arch in inputs.models for step in _training(arch, size, inputs, places)),
    ]


def _bench(
    name: str, what: str, size: Size, places: Places, precision: str, archs: tuple[str, ...], lengths: tuple[int, ...]
) -> Step:
    folder = places.bench(name)
    named = ",".join(size.bench_arch(arch) for arch in dict.fromkeys(("bert_base", *archs)))
    command = (
        *(CLI, "bench", "models", "--arch", named),
        *("--lengths", ",".join(map(str, lengths)), "--what", "training", "--relative-position-buckets", "32"),
        *("--precision", precision, "--budget", f"{size.minutes:g}min", *size.bench, "--output", str(folder)),
    )
    return Step(f"bench_{name}", what, command, folder / "results.json", starts_anew=True)


def _training(arch: str, size: Size, inputs: Inputs, places: Places) -> tuple[Step, Step]:
    """Pre-training of a model, and fine-tuning at its checkpoints."""
    widths = (f"--{name} {value}" for name, value in size.widths(arch).items()) if size.is_tiny else ()
    command = (
        *(CLI, "pretrain", arch, str(places.data), *" ".join(widths).split(), *size.pretraining),
        *("--max-update", str(size.updates), "--sequences-per-update", str(size.sequences)),
        *("--keep-updates-list", ",".join(map(str, size.kept))),
        *("--validate-interval-updates", str(size.validate_every), "--save-dir", str(places.pretraining(arch))),
    )
    what, last = f"{arch}, {size.updates:,} updates", places.checkpoint(arch, size.updates)
    pretraining = Step(f"pretrain_{arch}", what, command, last, ("corpus",))
    updates = finetuned_updates(arch, size)
    models = [f"{model_name(arch, each)}={places.checkpoint(arch, each)}" for each in updates]
    command = (
        *(CLI, "finetune", *models, "--data", str(inputs.glue), "--output", str(places.glue)),
        *("--tasks", *inputs.tasks, "--lrs", *map(str, size.rates), "--seeds", *map(str, size.seeds)),
        *(("--epochs", str(size.epochs), "--max-train-rows", str(size.rows)) if size.rows else ()),
        *("--keep-checkpoints", "none"),
    )
    last = places.glue / "runs" / model_name(arch, updates[-1])
    what = f"{arch} at {len(updates)} checkpoint{'s' * (len(updates) > 1)}"
    return pretraining, Step(f"glue_{arch}", what, command, last, (pretraining.name,))


# --- What each costs, before any runs: arithmetic, not measurement


def cost_of(step: Step, size: Size, inputs: Inputs, speed: float) -> Cost:
    """By the step's name: what it trains, reads or measures."""
    kind, _, arch = step.name.partition("_")
    if kind == "bench":
        return Cost(hours=size.minutes / 60)
    if kind == "corpus" and inputs.raw is not None:
        read = sum(_bytes_in(Path(text.removeprefix("book:"))) for text in inputs.texts(Path()))
        seconds = read / 1e6 / MEGABYTES_A_CORE_SECOND / len(os.sched_getaffinity(0))
        return Cost(seconds / 3600, None, DISK_OF_CORPUS * read / GB)
    if kind == "pretrain":
        job = job_of(arch, size)
        gigabytes = (len(size.kept) + FURTHER_CHECKPOINTS) * BYTES_OF_PARAMETER * job.parameters / GB
        return Cost(job.flops / speed / 3600, job.flops, gigabytes)
    if kind == "glue":
        flops = sum(_flops_of_epoch(task, arch, size, inputs.glue) for task in inputs.tasks)
        flops *= len(size.rates) * len(size.seeds) * size.epochs * len(finetuned_updates(arch, size))
        return Cost(flops / speed / 3600, flops) if flops else Cost()
    return Cost()


def job_of(arch: str, size: Size) -> Job:
    """A pre-training, as `lazyformer plan` counts it."""
    vocabulary = int(size.corpus[size.corpus.index("--vocab-size") + 1])
    options = {name.replace("-", "_"): value for name, value in size.widths(arch).items()}
    options |= {"tokens_per_sample": size.length, "sequences_per_update": size.sequences, "max_update": size.updates}
    return with_options(job_of_arch(arch, vocabulary), options)


def _flops_of_epoch(task: str, arch: str, size: Size, glue: Path) -> float:
    """By the bytes of the task's file; 0 where it is not there yet."""
    split = TASKS[task].splits["train"]
    file = glue / TASKS[task].folder / split.file
    if not file.is_file():
        return 0.0
    rows = min(size.rows or split.rows, split.rows)
    length = max(2, min(2 * size.length, round(file.stat().st_size / split.rows / BYTES_OF_TOKEN)))
    job = job_of(arch, size)
    return 3 * rows * count_flops(job.pattern, job.sizes, length, predicted=0)


def _bytes_in(path: Path) -> int:
    files = [path] if path.is_file() else (file for file in path.rglob("*") if file.is_file())
    return sum(file.stat().st_size for file in files)
