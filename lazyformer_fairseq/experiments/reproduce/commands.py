"""The command ``lazyformer reproduce``, a subcommand for each paper."""

from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import click

from lazyformer_fairseq.arguments import divided
from lazyformer_fairseq.extras import needs_fairseq, refuse_without_extra
from lazyformer_fairseq.options import Group, option, takes

OUT = click.argument("out", type=click.Path(path_type=Path, file_okay=False))


@dataclass(frozen=True)
class How:
    """Options of every paper."""

    tiny: bool = option(False, "The same way in miniature, for two cores.")
    only: tuple[str, ...] = option(
        (), "Only these and what they need, such as 'bench_*'; --plan lists them.", "--steps", metavar="NAME,...",
        shown="all"
    )  # fmt: skip
    plan: bool = option(False, "Print cost, disk, state and command of each step; run nothing.")
    teraflops: Optional[float] = option(
        None, "For --plan, of all devices.", low=0, is_open=True, shown="21.4 a GPU, LazyFormer's V100; tiny: 0.005"
    )
    report: bool = option(False, "Write the report of what is there, and run nothing.")

    def speed(self, of_one: float) -> float:
        """FLOP/s of all devices."""
        from lazyformer_fairseq.executors.nvidia_smi import count_gpus

        return 1e12 * self.teraflops if self.teraflops else of_one * (1 if self.tiny else count_gpus() or 8)


@click.group(cls=Group, default="lazyformer")
def reproduce() -> None:
    """Reproduce the tables and figures of a paper, LazyFormer or PAR Transformer, from text to one page.

    `lazyformer reproduce RAW OUT` is `lazyformer reproduce lazyformer RAW OUT`.
    """


@reproduce.command()
@click.argument("raw")
@OUT
@takes(How, into="how")
@click.option("--models", multiple=True, callback=divided, metavar="ARCH,...",
              help="Pre-trained and fine-tuned; all: Table 3's five others too, which are timed alone else.  [default: "
              "those of Tables 1 and 4]")  # fmt: skip
@click.option("--tasks", multiple=True, callback=divided, metavar="A,B,...",
              help="Of GLUE.  [default: the paper's eight; with --tiny CoLA and RTE]")  # fmt: skip
def lazyformer(raw: str, out: Path, how: How, models: tuple[str, ...], tasks: tuple[str, ...]) -> None:
    """Reproduce LazyFormer's Tables 1 to 4 and Figures 2 and 3: from text in RAW to OUT/report/report.md.

    Corpus, benchmarks, pre-trainings of a million updates (six, or --models), GLUE at six checkpoints of each model of
    Table 1 and at the last one of others, one page with the paper's numbers beside. RAW is a folder: `glue` in it is
    GLUE's official download, `books` are books, one a file, all else is text of any kind that lazyformer corpus reads.
    With --tiny RAW may be the word demo: the prose that Python carries.

    Stop it at any time; rerun to resume. Look at --plan first: in full it takes weeks on eight GPUs.

    \b
    lazyformer reproduce lazyformer raw results/lazyformer --plan
    lazyformer reproduce lazyformer demo results/tiny --tiny
    lazyformer reproduce lazyformer raw results/lazyformer --models lazyformer_m3x4_sd --steps 'glue_*,bench_tables'
    """
    needs_fairseq("lazyformer reproduce", "lazyformer compare")
    refuse_without_extra("corpus", "lazyformer reproduce")
    from lazyformer_fairseq.executors.nvidia_smi import precision_here
    from lazyformer_fairseq.experiments.reproduce import lazyformer as of
    from lazyformer_fairseq.experiments.reproduce.lazyformer_report import reproduction

    size = of.TINY if how.tiny else of.PAPER
    inputs = of.find_inputs(raw, tasks, size, of.Places(out).made, models)
    found = reproduction(size, inputs, out, precision_here(), how.speed(size.flops_per_second))
    found.carry_out(out, how.only, how.plan, how.report)


@reproduce.command()
@click.argument("raw")
@OUT
@takes(How, into="how")
def par(raw: str, out: Path, how: How) -> None:
    """Reproduce PAR Transformer's Tables 1, 2, 3, 5, 6 and 7 and Figures 1 and 2: from RAW to OUT/report/report.md.

    The search, latencies, trainings of all models of these tables, their evaluation, one page with the paper's numbers
    beside. RAW is a folder: `wikitext-103`, `enwik8` and `text8` in it are as they are distributed, or what
    scripts/prepare_wikitext103.sh and its like made of them. With --tiny RAW may be the word demo: the prose that
    Python carries. Table 4, PAR BERT, is scripts/pretrain_par_bert.sh's.

    Stop it at any time; rerun to resume. Look at --plan first: it says what the search needs of a GPU's memory, too.

    \b
    lazyformer reproduce par raw results/par --plan
    lazyformer reproduce par demo results/par_tiny --tiny
    lazyformer reproduce par raw results/par --steps '*_par_transformer_base,*_transformer_xl_base,bench'
    """
    needs_fairseq("lazyformer reproduce", "lazyformer compare")
    from lazyformer_fairseq.experiments.reproduce import par as of
    from lazyformer_fairseq.experiments.reproduce.par_report import reproduction

    size = of.TINY if how.tiny else of.PAPER
    found = reproduction(size, of.find_inputs(raw, size, out), out, how.speed(size.flops_per_second))
    found.carry_out(out, how.only, how.plan, how.report)
