"""The command ``lazyformer diagnostics``: makes tasks with long inputs, which show whether a pattern sees far enough.

No leaderboard. `lazyformer compare --task listops`, or pairs, trains patterns on them.
"""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Optional

import click

from lazyformer_fairseq.arguments import ExistingPath
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.extras import refuse_without_extra
from lazyformer_fairseq.options import Command, option, takes
from lazyformer_fairseq.storage.atomic import refuse_filled_folder, refuse_unwritable

ROWS = {"listops": (96_000, 2_000, 2_000), "pairs": (10_000, 1_000, 1_000)}  # of the splits
SPLITS = ("train", "valid", "test")
LISTOPS, PAIRS = "ListOps", "Pairs"  # sections of --help


def _rows(number: int) -> Any:
    shown = ", ".join(f"{rows[number]} of {task}" for task, rows in ROWS.items())
    return option(None, f"Examples of {SPLITS[number]}.", low=1, shown=shown)


@dataclass(frozen=True)
class DiagnosticsOptions:
    """Of both tasks, then of either; the sizes are Long Range Arena's (Tay et al., 2020, section 2.1)."""

    train: Optional[int] = _rows(0)
    valid: Optional[int] = _rows(1)
    test: Optional[int] = _rows(2)
    min_length: int = option(500, "Tokens of an input, at least.", low=1)
    max_length: int = option(2_000, "Tokens of an input, at most.", low=1)
    seed: int = option(1, "The same seed gives the same data on every machine.", low=0)
    max_depth: int = option(10, "Levels; on the last one are digits alone.", low=1, section=LISTOPS)
    max_arguments: int = option(10, "Of an operator, which has two at least.", low=1, section=LISTOPS)
    operators: tuple[str, ...] = option(
        ("MAX", "MIN", "MED", "SM"),
        "Of MAX, MIN, MED (median, rounded down), SM (sum modulo 10).",
        section=LISTOPS,
        metavar="NAME,NAME,...",
    )
    gap: int = option(32, "Tokens left out between the halves of a document.", low=0, section=PAIRS)
    per_document: int = option(1, "Examples of a long document, at most.", low=1, section=PAIRS)
    vocab_size: int = option(8192, "Of the tokenizer of raw text.", low=10, section=PAIRS)


@click.command(cls=Command)
@click.argument("task", type=click.Choice(list(ROWS)))
@click.argument("places", metavar="[CORPUS] OUT", nargs=-1, required=True)
@takes(DiagnosticsOptions)
@click.option("--tokenizer", type=ExistingPath(), help="Of pairs: its folder, in place of one trained on raw text.")
def diagnostics(task: str, places: tuple[str, ...], settings: DiagnosticsOptions, tokenizer: Optional[Path]) -> None:
    """Make a task with long inputs, which is a diagnostic and no leaderboard, and write it to OUT.

    listops draws nested operations on digits, whose value from 0 to 9 is to be found. pairs makes pairs of texts of
    CORPUS, halves of one document or of two; CORPUS is what `lazyformer corpus` wrote, or raw text that it reads.
    OUT/report.md has the balance of classes and what simple rules reach: a model has learnt something where it beats
    all of them. `lazyformer compare OUT RESULTS --task listops` trains patterns on it.

    \b
    lazyformer diagnostics listops listops
    lazyformer diagnostics listops short --min-length 8 --max-length 64 --max-depth 4 --max-arguments 5 --train 20000
    lazyformer diagnostics pairs data pairs
    """
    wanted = "CORPUS OUT" if task == "pairs" else "OUT"
    if len(places) != len(wanted.split()):
        raise UserError(f"lazyformer diagnostics {task}: give {wanted}")
    corpus, out = places[0], Path(places[-1])
    refuse_unwritable(out)
    refuse_filled_folder(out)
    rows = {split: getattr(settings, split) or ROWS[task][number] for number, split in enumerate(SPLITS)}
    if task == "listops":
        refuse_without_extra("huggingface", "lazyformer diagnostics listops")
        from lazyformer_fairseq.finetuning.tasks.listops import ListOpsSettings, prepare_listops

        manifest = prepare_listops(_settings(ListOpsSettings, rows, settings), out)
    else:
        if not (Path(corpus) / "dict.txt").is_file():
            refuse_without_extra("corpus", "lazyformer diagnostics pairs of raw text")
            from lazyformer_fairseq.corpus.commands import refuse_missing_inputs

            refuse_missing_inputs((corpus,))
        from lazyformer_fairseq.finetuning.tasks.pairs import PairsSettings, prepare_pairs

        made = _settings(PairsSettings, rows, settings)
        manifest = prepare_pairs(made, corpus, out, settings.vocab_size, tokenizer)
    from lazyformer_fairseq.finetuning.made import report_of

    click.echo(f"{report_of(manifest)}\n\nwritten: {out}")


def _settings(kind: type, rows: dict[str, int], options: DiagnosticsOptions) -> Any:
    return kind(rows=rows, **{one.name: getattr(options, one.name) for one in fields(kind) if one.name != "rows"})
