"""What is reproduced, in the paper's size and in miniature, and what the paper prints (arXiv 2102.12702).

Table 1 as printed is with GLUE's reports.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Optional

from lazyformer_fairseq.data.glue import TASKS, find_task
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.finetuning.papers import LEARNING_RATES, PAPER_TASKS, SEEDS
from lazyformer_fairseq.measure.planning import PAPER_TERAFLOPS
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
    average: float
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

    @property
    def mid(self) -> int:
        """Update of Table 1's last row: halfway."""
        return self.updates // 2

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
        *("--tokens-per-sample", "32", "--max-positions", "64", "--lr", "2e-3", "--warmup-ratio", "0.1"),
        *("--dropout", "0", "--attention-backend", "eager", "--sequences-per-gpu", "8"),
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
    """

    raw: Optional[Path]
    glue: Path
    tasks: tuple[str, ...]

    def texts(self, made: Path) -> list[str]:
        """What `lazyformer corpus` reads; `made` is the folder of Python's prose."""
        if self.raw is None:
            return [str(made / "prose.jsonl")]
        parts = sorted(path for path in self.raw.iterdir() if path.name != GLUE and not path.name.startswith("."))
        return [f"book:{path}" if path.name == BOOKS and path.is_dir() else str(path) for path in parts]


def find_inputs(raw: str, tasks: tuple[str, ...], size: Size, made: Path) -> Inputs:
    """Checks that everything is there.

    Args:
        raw: folder, in which `glue` is GLUE's download; or ``demo``.
        tasks: those given; none for the size's, in miniature as many of them as are there.
        made: where Python's prose, and the task that is made of it, go.

    Raises:
        UserError: a folder or a task's file is missing.
    """
    chosen = tuple(find_task(name).name for name in tasks)
    if raw == PYTHONS_PROSE:
        if not size.is_tiny:
            raise UserError(f"{PYTHONS_PROSE}: is a megabyte of text, for --tiny alone; give a folder of text")
        return Inputs(None, made / GLUE, ("CoLA",))
    folder = Path(raw)
    if not folder.is_dir():
        raise UserError(f"{raw}: no such folder; scripts/download_wikipedia.sh and scripts/download_books.sh fill it")
    glue = folder / GLUE
    lacking = {task: missing for task in chosen or size.tasks if (missing := _missing_files(glue, task))}
    if lacking and (chosen or not size.is_tiny or len(lacking) == len(size.tasks)):
        raise UserError(
            f"{glue}: lacks {', '.join(file for files in lacking.values() for file in files)}; put GLUE's official "
            "download there (gluebenchmark.com/tasks), or a link to it, or give fewer --tasks"
        )
    found = Inputs(folder, glue, tuple(task for task in chosen or size.tasks if task not in lacking))
    if not found.texts(made):
        raise UserError(f"{raw}: holds no text; give it a dump of Wikipedia, and a folder `{BOOKS}` of books")
    return found


def _missing_files(glue: Path, task: str) -> list[str]:
    description = TASKS[task]
    needed = (split.file for name, split in description.splits.items() if not name.startswith("test"))
    return [f"{description.folder}/{file}" for file in needed if not (glue / description.folder / file).is_file()]


def as_json(size: Size, inputs: Inputs) -> dict[str, Any]:
    """What must stay the same when a reproduction is resumed."""
    raw = PYTHONS_PROSE if inputs.raw is None else str(inputs.raw.absolute())
    of_inputs = {"raw": raw, "glue": str(inputs.glue.absolute()), "tasks": list(inputs.tasks)}
    return {**of_inputs, "size": "tiny" if size.is_tiny else "paper", "updates": size.updates}
