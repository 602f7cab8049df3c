"""The commands ``lazyformer compare`` and ``lazyformer compare report``."""

import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Optional

import click

from lazyformer_fairseq.arguments import ExistingPath, named, some_of
from lazyformer_fairseq.child_process import stoppable
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.executors.options import ExecutorOptions
from lazyformer_fairseq.experiments.compare.models import EXAMPLE, random_orders
from lazyformer_fairseq.experiments.compare.settings import AXES, MODELS, TASKS, CompareSettings, Sizes, find_task
from lazyformer_fairseq.options import Group, OptionInSection, takes

BASELINE = "baseline"  # the target that is where the baseline ended


def _target(_ctx: click.Context, _option: click.Parameter, value: str) -> Any:
    """Return ``baseline``, or a number."""
    try:
        if value == BASELINE:
            return value
        return float(value)
    except ValueError:
        raise UserError(f"--target {value}: is neither a number nor `{BASELINE}`") from None


def _refuse_taken(added: Mapping[str, str], models: Mapping[str, str]) -> None:
    taken = sorted(added.keys() & models.keys())
    if taken:
        raise UserError(f"--model: {', '.join(taken)} is a model already; give another name")


@click.group(cls=Group, default="run")
def compare() -> None:
    """Train models side by side, equal in all that is not theirs, and report which gets how far in what time.

    `lazyformer compare DATA OUT` is `lazyformer compare run DATA OUT`; see `lazyformer compare run --help`.
    """


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
    help="A model; may be given several times.  [default: --presets]",
)
@click.option(
    "--presets",
    cls=OptionInSection,
    section=MODELS,
    type=int,
    metavar="SUBLAYERS",
    help="The task's own models of so many sublayers, beside those of --model: "
    f"{'; '.join(f'{task.name} has {sorted(task.presets)}' for task in TASKS)}.",
)
@click.option(
    "--random-orders",
    "orders",
    cls=OptionInSection,
    section=MODELS,
    type=click.IntRange(1, 10_000),
    metavar="N",
    help="Beside them N random orders of the baseline's sublayers, drawn with the first seed.",
)
@takes(CompareSettings, into="")
@takes(Sizes, into="sizes")
@takes(ExecutorOptions, into="place")
def run(
    data: str,
    out: Path,
    specs: dict[str, str],
    presets: Optional[int],
    orders: Optional[int],
    sizes: Sizes,
    place: ExecutorOptions,
    **given: Any,
) -> None:
    """Train models on DATA, equal in all that is not theirs, and report to OUT which gets how far in what time.

    DATA is what `lazyformer corpus` wrote (masked-lm) or `lazyformer lm prepare` (language-model). The models of a seed
    take turns, update by update, on the same batches under the same masks. The clock counts training alone.
    OUT gets results.json with curves, times, memory, versions and checksums; tables and pictures; and the trained
    models. Stop it at any time; rerun to resume. More in docs/compare.md.

    \b
    SPEC is a pattern, an arch of ours, fairseq:roberta_base, hf:bert or hf:modernbert; what is its own may follow:
      '(sff)x4 f'    'M2x3; ffn=448'    'bert_base; sizes=own'    'fairseq:roberta_base; layers=6'
      '(sf)x7; norm=rms; lr=1e-2,2e-2'    '(sf)x7; without=local-heads,optimizer'

    \b
    lazyformer compare data results/two --task masked-lm
    lazyformer compare data results/mine --task masked-lm --model 'bert=(sf)x6' --model 'mine=(sff)x4 f' \\
      --equal-parameters --lr 1e-3,2e-3,4e-3 --budget 10min --time-fractions 1,0.8,0.7
    """
    row = find_task(given["task"])
    for folder in map(Path, data.split(":")):  # before anything heavy is imported: a mistyped path is said at once
        if not (folder / row.holds).is_file() and not any(folder.glob(f"shard*/{row.holds}")):
            raise UserError(f"{folder / row.holds}: no such file; give a folder that `{row.prepares}` wrote")
    if presets not in (None, *row.presets):
        raise UserError(f"--presets {presets}: {row.name} has {', '.join(map(str, sorted(row.presets)))}")
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

    with stoppable():
        results = compare_models(settings, out, ["lazyformer", *sys.argv[1:]], place)
    click.echo(f"\n{write_report(comparison_of(results), out)}\nwritten: {out}")


@compare.command()
@click.argument("folders", metavar="FOLDER...", nargs=-1, required=True, type=ExistingPath())
@click.option(
    "--target",
    default=BASELINE,
    callback=_target,
    metavar="baseline|NUMBER",
    help="What each model is timed to: a value of the measure, or where the baseline ended (median over seeds).",
)
@click.option(
    "--against",
    multiple=True,
    default=AXES,
    show_default=False,
    callback=some_of(AXES),
    metavar="A,B,...",
    help=f"Of curves.png, a panel each: {', '.join(AXES)}.  [default: all]",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for tables and pictures.  [default: FOLDER, if it is the only one]",
)
def report(folders: tuple[Path, ...], target: Any, against: tuple[str, ...], output: Optional[Path]) -> None:
    """Write tables and pictures of finished comparisons anew, of another target if you like; train nothing.

    Each FOLDER is one that `lazyformer compare` wrote, or a file that was its results.json. Several are joined if they
    kept the same rules: the data by checksum, the lengths, the masks, the measure. Where they have other seeds of the
    same models, these count together; otherwise each model is compared with the baseline of its own folder.

    \b
    lazyformer compare report results/compare --target 5.2
    lazyformer compare report results/first results/second --output results/both
    """
    if output is None and (len(folders) > 1 or folders[0].is_file()):
        raise UserError("say with --output where the report goes; only that of one folder has a place of its own")
    from lazyformer_fairseq.experiments.compare.report import write_report
    from lazyformer_fairseq.experiments.compare.results import read_folders

    where = output or folders[0]
    click.echo(write_report(read_folders(folders), where, target, against))
    click.echo(f"written: {where}", err=True)
