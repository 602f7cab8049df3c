"""The commands ``lazyformer compare`` and ``lazyformer compare report``."""

import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Optional

import click

from lazyformer_fairseq.arguments import ExistingPath, named, subset_of
from lazyformer_fairseq.child_process import exit_on_interrupt
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.executors.options import ExecutorOptions
from lazyformer_fairseq.experiments.compare.models import EXAMPLE, random_orders
from lazyformer_fairseq.experiments.compare.settings import AXES, MODELS, TASKS, CompareSettings, Sizes, find_task
from lazyformer_fairseq.options import Group, OptionInSection, with_options_from
from lazyformer_fairseq.training.trackers import ReportOptions, refuse_missing_trackers

BASELINE = "baseline"  # the value of --target that stands for the baseline's final value


def _target(_ctx: click.Context, _option: click.Parameter, value: str) -> Any:
    """Parse the value of ``--target``, which is ``baseline`` or a number."""
    try:
        if value == BASELINE:
            return value
        return float(value)
    except ValueError:
        raise UserError(f"--target {value}: must be a number or `{BASELINE}`") from None


def _refuse_taken(added: Mapping[str, str], models: Mapping[str, str]) -> None:
    taken = sorted(added.keys() & models.keys())
    if taken:
        raise UserError(f"--model: a model called {', '.join(taken)} already exists; choose a different name")


@click.group(cls=Group, default="run")
def compare() -> None:
    """Train models side by side under equal conditions, and report how low each model's loss gets in a given time."""


@compare.command(context_settings={"max_content_width": 120})
@click.argument("data")
@click.argument("out", type=click.Path(path_type=Path))
@click.argument("fairseq_options", nargs=-1, type=click.UNPROCESSED, metavar="[-- OPTIONS OF FAIRSEQ-TRAIN]")
@click.option(
    "--model",
    "specs",
    cls=OptionInSection,
    section=MODELS,
    multiple=True,
    callback=named(EXAMPLE),
    metavar="NAME=SPEC",
    help="Model to train. May be repeated.  [default: the task's presets]",
)
@click.option(
    "--presets",
    cls=OptionInSection,
    section=MODELS,
    type=int,
    metavar="SUBLAYERS",
    help="Also train the task's preset models with this number of sublayers: "
    f"{'; '.join(f'one of {sorted(task.presets)} for {task.name}' for task in TASKS)}.",
)
@click.option(
    "--random-orders",
    "orders",
    cls=OptionInSection,
    section=MODELS,
    type=click.IntRange(1, 10_000),
    metavar="N",
    help="Also train N models with the baseline's sublayers in random order, drawn with the first seed.",
)
@with_options_from(CompareSettings, into="")
@with_options_from(Sizes, into="sizes")
@with_options_from(ExecutorOptions, into="place")
@with_options_from(ReportOptions, into="")
def run(
    data: str,
    out: Path,
    specs: dict[str, str],
    presets: Optional[int],
    orders: Optional[int],
    sizes: Sizes,
    *,
    place: ExecutorOptions,
    report_to: tuple[str, ...],
    **given: Any,
) -> None:
    """Train models on DATA under equal conditions, and report to OUT how low each model's loss gets in a given time.

    DATA is a folder written by `lazyformer corpus` (for masked-lm) or by `lazyformer lm prepare` (for language-model).
    For each seed, the models' updates are interleaved, and all models train on the same batches with the same masks.
    Only training time is counted. The command writes tables, plots and the trained models to the folder OUT, along with
    results.json, which contains curves, times, memory, versions and checksums. You can stop the command at any time and
    rerun it to resume. See docs/compare.md for details.

    \b
    SPEC is a pattern, a named arch from this package, fairseq:roberta_base, hf:bert or hf:modernbert, optionally
    followed by options for this model only:
      '(sff)x4 f'    'M2x3; ffn=448'    'bert_base; sizes=own'    'fairseq:roberta_base; layers=6'
      '(sf)x7; norm=rms; lr=1e-2,2e-2'    '(sf)x7; without=local-heads,optimizer'

    \b
    lazyformer compare data results/two --task masked-lm
    lazyformer compare data results/mine --task masked-lm --model 'bert=(sf)x6' --model 'mine=(sff)x4 f' \\
      --equal-parameters --lr 1e-3,2e-3,4e-3 --budget 10min --time-fractions 1,0.8,0.7
    """
    refuse_missing_trackers(report_to)
    row = find_task(given["task"])
    for folder in map(Path, data.split(":")):  # before any slow import, so that a mistyped path is reported immediately
        has_data = (folder / row.data_file).is_file() or any(folder.glob(f"shard*/{row.data_file}"))
        if not has_data:
            raise UserError(f"{folder / row.data_file}: no such file; specify a folder written by `{row.prepared_by}`")
    if presets not in (None, *row.presets):
        raise UserError(
            f"--presets {presets}: {row.name} has presets with {', '.join(map(str, sorted(row.presets)))} sublayers"
        )
    of_task = row.presets.get(presets, {})
    _refuse_taken(of_task, specs)
    from lazyformer_fairseq.evaluation.costs.machine import device_named

    given["device"] = device_named(given["device"])
    settings = CompareSettings(data=data, models={**of_task, **specs}, sizes=asdict(sizes), **given)
    if orders:
        pattern = settings.specs[settings.baseline].pattern
        drawn = random_orders(pattern, orders, settings.seeds[0], settings.row.direction)
        _refuse_taken(drawn, settings.models)
        settings = replace(settings, models={**settings.models, **drawn})
    from lazyformer_fairseq.experiments.compare.report import write_report
    from lazyformer_fairseq.experiments.compare.results import comparison_of
    from lazyformer_fairseq.experiments.compare.run import compare as compare_models

    with exit_on_interrupt():
        results = compare_models(settings, out, ["lazyformer", *sys.argv[1:]], place, report_to)
    click.echo(f"\n{write_report(comparison_of(results), out)}\nwritten: {out}")


@compare.command()
@click.argument("folders", metavar="FOLDER...", nargs=-1, required=True, type=ExistingPath())
@click.option(
    "--target",
    default=BASELINE,
    callback=_target,
    metavar="baseline|NUMBER",
    help="Metric value to reach: a number, or `baseline` for the baseline's final value (median over seeds).",
)
@click.option(
    "--against",
    multiple=True,
    default=AXES,
    show_default=False,
    callback=subset_of(AXES),
    metavar="A,B,...",
    help=f"Costs to plot the curves in curves.png against, one panel each: {', '.join(AXES)}.  [default: all]",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for tables and plots.  [default: FOLDER, if there is only one]",
)
def report(folders: tuple[Path, ...], target: Any, against: tuple[str, ...], output: Optional[Path]) -> None:
    """Rewrite the tables and plots of finished comparisons without retraining, optionally for a different target.

    Each FOLDER is a folder written by `lazyformer compare`, or a copy of its results.json under any name. Comparisons
    can be joined if they used the same data (by checksum), sequence lengths, masks and metric. If they trained the same
    models with different seeds, the seeds are pooled. Otherwise each model is compared with the baseline from the
    same folder.

    \b
    lazyformer compare report results/compare --target 5.2
    lazyformer compare report results/first results/second --output results/both
    """
    if output is None and (len(folders) > 1 or folders[0].is_file()):
        raise UserError("specify the report's folder with --output; the default applies only to a single FOLDER")
    from lazyformer_fairseq.experiments.compare.report import write_report
    from lazyformer_fairseq.experiments.compare.results import read_folders

    where = output or folders[0]
    click.echo(write_report(read_folders(folders), where, target, against))
    click.echo(f"written: {where}", err=True)
