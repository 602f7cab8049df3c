"""The command ``lazyformer reproduce``, with one subcommand per paper."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Optional

import click

from lazyformer_fairseq.arguments import separated
from lazyformer_fairseq.executors.options import ExecutorOptions
from lazyformer_fairseq.extras import needs_fairseq, refuse_without_extra
from lazyformer_fairseq.options import Group, option, with_options_from

OUT = click.argument("out", type=click.Path(path_type=Path, file_okay=False))


@dataclass(frozen=True)
class ReproduceOptions:
    """The options that apply to every paper."""

    tiny: bool = option(False, "Run a miniature version, which needs only two cores.")
    only: tuple[str, ...] = option(
        (),
        "Run only these steps, such as 'bench_*', and the steps they depend on; --plan lists all steps.",
        "--steps",
        metavar="NAME,...",
        shown="all",
    )
    plan: bool = option(False, "Print each step's cost, disk space, state and command without running anything.")
    teraflops: Optional[float] = option(
        None,
        "Combined training speed of all devices that --plan assumes, in TFLOP/s.",
        low=0,
        is_open=True,
        shown="21.4 per GPU, as on LazyFormer's V100s; 0.005 with --tiny",
    )
    report: bool = option(False, "Write the report on the results so far without running any step.")

    def carry_out(self, reproduction: Any, out: Path) -> None:
        """Run a reproduction, print its plan, or write its report, depending on the options."""
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
    """Reproduce the tables and figures of a paper, LazyFormer or PAR Transformer, from raw text to a report."""


@reproduce.command()
@click.argument("raw")
@OUT
@with_options_from(ReproduceOptions, into="options")
@click.option(
    "--models",
    multiple=True,
    callback=separated,
    metavar="ARCH,...",
    help="Models to pre-train and fine-tune; `all` adds the other five models in Table 3, which are otherwise only "
    "timed.  [default: the models in Tables 1 and 4]",
)
@click.option(
    "--tasks",
    multiple=True,
    callback=separated,
    metavar="A,B,...",
    help="GLUE tasks to fine-tune on.  [default: the paper's eight; CoLA and RTE with --tiny]",
)
@with_options_from(ExecutorOptions, into="place")
def lazyformer(
    raw: str,
    out: Path,
    options: ReproduceOptions,
    models: tuple[str, ...],
    tasks: tuple[str, ...],
    place: ExecutorOptions,
) -> None:
    """Reproduce Tables 1 to 4 and Figures 2 and 3 of LazyFormer, from text in RAW to OUT/report/report.md.

    The command builds the corpus, times the models, and pre-trains six of them (or the models set by --models) for a
    million updates. It fine-tunes on GLUE from six checkpoints of each model in Table 1 and from the last checkpoint of
    the other models. Finally, it writes a report with the measured numbers next to the paper's. RAW is a folder: its
    subfolder `glue` is GLUE's official download, `books` contains books, one per file, and everything else is text in
    any format that `lazyformer corpus` reads. With --tiny, RAW may be the word demo, which stands for the English prose
    that ships with Python. --executor sets where the corpus and fine-tuning jobs run.

    You can stop the command at any time and rerun it to resume. Check --plan first: a full reproduction takes weeks on
    eight GPUs.

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
    corpus = {**size.corpus, **place.given()}
    finetuning = {**size.finetuning, **place.given()}
    size = replace(size, corpus=corpus, finetuning=finetuning)
    inputs = paper.find_inputs(raw, out, size, models, tasks)
    options.carry_out(paper.reproduction(size, inputs, out, precision_here()), out)


@reproduce.command()
@click.argument("raw")
@OUT
@with_options_from(ReproduceOptions, into="options")
def par(raw: str, out: Path, options: ReproduceOptions) -> None:
    """Reproduce Tables 1, 2, 3, 6 and 7 and Figures 1 and 2 of PAR Transformer, from RAW to OUT/report/report.md.

    The command runs the search, measures latencies, trains and evaluates all models in these tables, and writes a
    report with the measured numbers next to the paper's. RAW is a folder with the subfolders `wikitext-103`, `enwik8`
    and `text8`, which contain the texts as distributed, or as prepared by scripts/prepare_wikitext103.sh and the
    corresponding scripts. With --tiny, RAW may be the word demo, which stands for the English prose that ships with
    Python. To reproduce Table 4 (PAR BERT), use scripts/pretrain_par_bert.sh.

    You can stop the command at any time and rerun it to resume. Check --plan first.

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
