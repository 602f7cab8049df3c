"""The command ``lazyformer reproduce``, with a subcommand for each paper."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Optional

import click

from lazyformer_fairseq.arguments import separated
from lazyformer_fairseq.executors.options import ExecutorOptions
from lazyformer_fairseq.extras import needs_fairseq, refuse_without_extra
from lazyformer_fairseq.options import Group, option, takes

OUT = click.argument("out", type=click.Path(path_type=Path, file_okay=False))


@dataclass(frozen=True)
class ReproduceOptions:
    """Options of every paper."""

    tiny: bool = option(False, "Reproduce in miniature, on two cores.")
    only: tuple[str, ...] = option(
        (),
        "Run only these steps and what they need, such as 'bench_*'; --plan lists them.",
        "--steps",
        metavar="NAME,...",
        shown="all",
    )
    plan: bool = option(False, "Print cost, disk, state and command of each step; run nothing.")
    teraflops: Optional[float] = option(
        None,
        "For --plan, the speed of all devices together.",
        low=0,
        is_open=True,
        shown="21.4 per GPU, LazyFormer's V100; tiny: 0.005",
    )
    report: bool = option(False, "Write the report of what is there, and run nothing.")

    def carry_out(self, reproduction: Any, out: Path) -> None:
        """Run a reproduction, print its plan, or write its report."""
        if self.plan:
            from lazyformer_fairseq.executors.nvidia_smi import count_gpus

            if self.tiny:
                devices = 1
            else:
                devices = count_gpus() or 8
            speed = devices * reproduction.flops_per_second
            if self.teraflops:
                speed = 1e12 * self.teraflops
            click.echo(reproduction.plan(out, self.only, speed))
        elif self.report:
            reproduction.report(out)
        else:
            reproduction.carry_out(out, self.only)


@click.group(cls=Group, default="lazyformer")
def reproduce() -> None:
    """Reproduce the tables and figures of a paper, LazyFormer or PAR Transformer, from text to one page.

    `lazyformer reproduce RAW OUT` is `lazyformer reproduce lazyformer RAW OUT`.
    """


@reproduce.command()
@click.argument("raw")
@OUT
@takes(ReproduceOptions, into="options")
@click.option(
    "--models",
    multiple=True,
    callback=separated,
    metavar="ARCH,...",
    help="Pre-trained and fine-tuned models; all: Table 3's five others too, which are only timed otherwise. "
    " [default: those of Tables 1 and 4]",
)
@click.option(
    "--tasks",
    multiple=True,
    callback=separated,
    metavar="A,B,...",
    help="Tasks of GLUE.  [default: the paper's eight; with --tiny CoLA and RTE]",
)
@takes(ExecutorOptions, into="place")
def lazyformer(
    raw: str,
    out: Path,
    options: ReproduceOptions,
    models: tuple[str, ...],
    tasks: tuple[str, ...],
    place: ExecutorOptions,
) -> None:
    """Reproduce LazyFormer's Tables 1 to 4 and Figures 2 and 3: from text in RAW to OUT/report/report.md.

    It builds the corpus, times the models, pre-trains six of them (or --models) for a million updates, fine-tunes on
    GLUE from six checkpoints of each model of Table 1 and from the last one of the others, and writes one page with the
    paper's numbers beside its own. RAW is a folder: `glue` in it is GLUE's official download, `books` holds books, one
    per file, and everything else is text in any format that lazyformer corpus reads. With --tiny RAW may be the word
    demo: the prose that Python carries. --executor is where the jobs of the corpus and of fine-tuning run.

    Stop it at any time; rerun to resume. Look at --plan first: in full it takes weeks on eight GPUs.

    \b
    lazyformer reproduce lazyformer raw results/lazyformer --plan
    lazyformer reproduce lazyformer demo results/tiny --tiny
    lazyformer reproduce lazyformer raw results/lazyformer --models lazyformer_m3x4_sd --steps 'glue_*,bench_tables'
    """
    needs_fairseq("lazyformer reproduce", "lazyformer compare")
    refuse_without_extra("corpus", "lazyformer reproduce")
    from lazyformer_fairseq.executors.nvidia_smi import precision_here
    from lazyformer_fairseq.experiments.reproduce import lazyformer as paper

    if options.tiny:
        size = paper.TINY
    else:
        size = paper.PAPER
    size = replace(size, corpus={**size.corpus, **place.given()}, finetuning={**size.finetuning, **place.given()})
    inputs = paper.find_inputs(raw, out, size, models, tasks)
    options.carry_out(paper.reproduction(size, inputs, out, precision_here()), out)


@reproduce.command()
@click.argument("raw")
@OUT
@takes(ReproduceOptions, into="options")
def par(raw: str, out: Path, options: ReproduceOptions) -> None:
    """Reproduce PAR Transformer's Tables 1, 2, 3, 6 and 7 and Figures 1 and 2: from RAW to OUT/report/report.md.

    It searches, measures latencies, trains all models of these tables, evaluates them, and writes one page with the
    paper's numbers beside its own. RAW is a folder: `wikitext-103`, `enwik8` and `text8` in it are as they are
    distributed, or as scripts/prepare_wikitext103.sh and the like prepared them. With --tiny RAW may be the word demo:
    the prose that Python carries. Table 4, PAR BERT, is made by scripts/pretrain_par_bert.sh.

    Stop it at any time; rerun to resume. Look at --plan first.

    \b
    lazyformer reproduce par raw results/par --plan
    lazyformer reproduce par demo results/par_tiny --tiny
    lazyformer reproduce par raw results/par --steps '*_par_transformer_base,*_transformer_xl_base,bench'
    """
    needs_fairseq("lazyformer reproduce", "lazyformer compare")
    from lazyformer_fairseq.experiments.reproduce import par as paper

    if options.tiny:
        size = paper.TINY
    else:
        size = paper.PAPER
    inputs = paper.find_inputs(raw, size, out)
    options.carry_out(paper.reproduction(size, inputs, out), out)
