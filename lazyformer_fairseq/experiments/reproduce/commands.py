"""The command ``lazyformer reproduce``."""

from pathlib import Path
from typing import Optional

import click

from lazyformer_fairseq.arguments import divided
from lazyformer_fairseq.child_process import stoppable
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.extras import refuse_without_extra


@click.command()
@click.argument("raw")
@click.argument("out", type=click.Path(path_type=Path, file_okay=False))
@click.option("--tiny", is_flag=True, help="The same way in miniature, for two cores.")
@click.option("--tasks", multiple=True, callback=divided, metavar="A,B,...",
              help="Of GLUE.  [default: the paper's eight; with --tiny CoLA and RTE]")  # fmt: skip
@click.option("--plan", is_flag=True, help="Print cost, disk, state and command of each step; run nothing.")
@click.option("--teraflops", type=click.FloatRange(min=0, min_open=True),
              help="For --plan, of all devices.  [default: 21.4 a GPU, the paper's V100; tiny: 0.005]")  # fmt: skip
@click.option("--report", is_flag=True, help="Write the report of what is there, and run nothing.")
def reproduce(
    raw: str, out: Path, tiny: bool, tasks: tuple[str, ...], plan: bool, teraflops: Optional[float], report: bool
) -> None:
    """Reproduce LazyFormer's Tables 1 to 4 and Figures 2 and 3: from text in RAW to OUT/report/report.md.

    Corpus, benchmarks, six pre-trainings of a million updates, GLUE at six checkpoints of each model of Table 1, one
    page with the paper's numbers beside. RAW is a folder: `glue` in it is GLUE's official download, `books` are books,
    one a file, all else is text of any kind that lazyformer corpus reads. With --tiny RAW may be the word demo: the
    prose that Python carries.

    Stop it at any time; rerun to resume. Look at --plan first: in full it takes weeks on eight GPUs.

    \b
    lazyformer reproduce raw results/lazyformer --plan
    lazyformer reproduce demo results/tiny --tiny
    """
    refuse_without_extra("corpus", "lazyformer reproduce")
    from lazyformer_fairseq.devices.nvidia_smi import count_gpus, precision_here
    from lazyformer_fairseq.experiments.reproduce import steps as of

    size = of.TINY if tiny else of.PAPER
    inputs = of.find_inputs(raw, tasks, size, of.Places(out).made)
    all_steps = of.steps(size, inputs, out, precision_here())
    if plan:
        speed = 1e12 * teraflops if teraflops else size.flops_per_second * (1 if tiny else count_gpus() or 8)
        click.echo(of.plan(all_steps, size, inputs, out, speed))
        return
    failures: list[str] = []
    if not report:
        with stoppable():
            failures = of.run_steps(all_steps, out, of.as_json(size, inputs))
    from lazyformer_fairseq.experiments.reproduce.report import write_report

    if report or len(failures) < len(all_steps):
        click.echo(f"written: {write_report(all_steps, size, inputs, out)}")
    if failures:
        raise UserError("\n".join([*failures, "the same command tries again what is not done"]))
