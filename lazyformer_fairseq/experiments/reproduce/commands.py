"""The command ``lazyformer reproduce``, with one subcommand per paper."""

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
    """The options that apply to every paper."""

    tiny: bool = option(False, "Reproduce a miniature, which runs on two cores.")
    only: tuple[str, ...] = option(
        (),
        "Run only these steps, such as 'bench_*', and those that they need; --plan lists all steps.",
        "--steps",
        metavar="NAME,...",
        shown="all",
    )
    plan: bool = option(False, "Print the cost, disk space, state and command of each step, without running any.")
    teraflops: Optional[float] = option(
        None,
        "Training speed of all devices together that --plan assumes, in TFLOP/s.",
        low=0,
        is_open=True,
        shown="21.4 per GPU, as for LazyFormer's V100; with --tiny 0.005",
    )
    report: bool = option(False, "Write the report of the results so far, without running any step.")

    def carry_out(self, reproduction: Any, out: Path) -> None:
        """Run a reproduction, print its plan, or write its report, as the options say."""
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
    """Reproduce the tables and figures of a paper, LazyFormer or PAR Transformer, from raw text to one page."""


@reproduce.command()
@click.argument("raw")
@OUT
@takes(ReproduceOptions, into="options")
@click.option(
    "--models",
    multiple=True,
    callback=separated,
    metavar="ARCH,...",
    help="Models to pre-train and fine-tune; `all` adds the five other models of Table 3, which are otherwise only "
    "timed.  [default: those of Tables 1 and 4]",
)
@click.option(
    "--tasks",
    multiple=True,
    callback=separated,
    metavar="A,B,...",
    help="GLUE tasks to fine-tune on.  [default: the paper's eight; with --tiny CoLA and RTE]",
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
    """Reproduce Tables 1 to 4 and Figures 2 and 3 of LazyFormer, from text in RAW to OUT/report/report.md.

    The command builds the corpus, times the models, and pre-trains six of them (or those of --models) for a million
    updates. It fine-tunes on GLUE from six checkpoints of each model of Table 1 and from the last checkpoint of the
    others. Finally it writes one page that shows the measured numbers beside the paper's. RAW is a folder: its
    subfolder `glue` is GLUE's official download, `books` holds books, one per file, and everything else is text in any
    format that `lazyformer corpus` reads. With --tiny, RAW may be the word demo, which stands for the English prose
    that comes with Python. --executor says where the jobs of the corpus and of fine-tuning run.

    You can stop the command at any time and rerun it to resume. Look at --plan first: a full reproduction takes weeks
    on eight GPUs.

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
    """Reproduce Tables 1, 2, 3, 6 and 7 and Figures 1 and 2 of PAR Transformer, from RAW to OUT/report/report.md.

    The command runs the search, measures latencies, trains and evaluates all models of these tables, and writes one
    page that shows the measured numbers beside the paper's. RAW is a folder whose subfolders `wikitext-103`, `enwik8`
    and `text8` hold the texts as they are distributed, or as scripts/prepare_wikitext103.sh and the corresponding
    scripts prepared them. With --tiny, RAW may be the word demo, which stands for the English prose that comes with
    Python. For Table 4, PAR BERT, use scripts/pretrain_par_bert.sh.

    You can stop the command at any time and rerun it to resume. Look at --plan first.

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
