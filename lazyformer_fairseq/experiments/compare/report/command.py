"""The command ``lazyformer compare report``."""

from pathlib import Path
from typing import Any, Optional

import click

from lazyformer_fairseq.arguments import ExistingPath
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.compare.report import BASELINE


def target_of(ctx: Optional[click.Context], option: Optional[click.Parameter], value: str) -> Any:
    """Callback: ``baseline``, or a number."""
    if value == BASELINE:
        return value
    try:
        return float(value)
    except ValueError:
        raise UserError(f"--target {value}: is neither a number nor `{BASELINE}`") from None


def target_option(command):
    """The option --target, a number or ``baseline``."""
    told = "What each model is timed to: a value of the measure, or where the baseline ended (median over seeds)."
    return click.option("--target", default=BASELINE, callback=target_of, metavar="baseline|NUMBER", help=told)(command)


@click.command()
@click.argument("folders", metavar="FOLDER...", nargs=-1, required=True, type=ExistingPath())
@target_option
@click.option("--output", type=click.Path(path_type=Path, file_okay=False),
              help="Folder for tables and pictures.  [default: FOLDER, if it is the only one]")  # fmt: skip
def report(folders: tuple[Path, ...], target: Any, output: Optional[Path]) -> None:
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
    from lazyformer_fairseq.experiments.compare.report.read_results import read_folders
    from lazyformer_fairseq.experiments.compare.report.write import write_files

    where = folders[0] if output is None else output
    click.echo(write_files(read_folders(folders), where, target))
    click.echo(f"written: {where}", err=True)
