"""Options of a command that may change the pattern of a trained encoder. Light: torch comes with :meth:`start`."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

import click

from lazyformer_fairseq.arguments import ExistingPath
from lazyformer_fairseq.errors import UserError

if TYPE_CHECKING:
    from lazyformer_fairseq.data.text.interface import TextTokenizer
    from lazyformer_fairseq.warm_start.start import Trained, WarmStart


@dataclass(frozen=True)
class WarmOptions:
    """What the user asked for.

    Attributes:
        changes: options of the model that change, by name.
        from_sublayers: for each new sublayer the old one, or "-"; None to align the patterns.
        text: raw text, or a folder of binarised data.
        report: whether to measure losses.
    """

    changes: dict[str, Any]
    from_sublayers: Optional[tuple[str, ...]]
    text: Optional[Path]
    report: bool

    def start(self, old: "Trained", tokenizer: "TextTokenizer", source: str) -> "WarmStart":
        """The warm start, its record with losses where they were asked for.

        Args:
            source: name of the old model, for the record.

        Raises:
            UserError: as :func:`~lazyformer_fairseq.warm_start.start.start_from` and
                :func:`~lazyformer_fairseq.warm_start.losses.read_text` do.
        """
        from lazyformer_fairseq.warm_start.losses import Scorer, measure_losses, read_text
        from lazyformer_fairseq.warm_start.start import start_from

        start = start_from(old, self.changes, self.from_sublayers)  # first, as it may refuse
        if self.text is not None and self.report:
            text = read_text(self.text, tokenizer, old.cfg.max_positions)
            start.record["losses"] = measure_losses(Scorer(old, text), start)
        start.record["source"] = source
        return start


def warm_start_options(command: Callable) -> Callable:
    """Adds the options; the command gets them as `warm`, a :class:`WarmOptions`, None where none was given."""

    @wraps(command)
    def with_warm(
        *args: Any,
        sublayer_pattern: Optional[str],
        encoder_ffn_embed_dim: Optional[int],
        max_positions: Optional[int],
        from_sublayers: Optional[str],
        text: Optional[Path],
        report: bool,
        **others: Any,
    ) -> Any:
        changes = {
            "sublayer_pattern": sublayer_pattern,
            "encoder_ffn_embed_dim": encoder_ffn_embed_dim,
            "max_positions": max_positions,
        }
        changes = {name: value for name, value in changes.items() if value is not None}
        if not changes and (from_sublayers or text):
            raise UserError("--from-sublayers and --text are for a model that changes: give --sublayer-pattern")
        given = None if from_sublayers is None else tuple(word.strip() for word in from_sublayers.split(","))
        warm = WarmOptions(changes, given, text, report) if changes else None
        return command(*args, warm=warm, **others)

    for option in reversed(_OPTIONS):
        with_warm = option(with_warm)
    return with_warm


_OPTIONS = (
    click.option(
        "--sublayer-pattern",
        help="Of the new model, such as M2x6: its sublayers start from those of the old one.  [default: the old one's]",
    ),
    click.option(
        "--encoder-ffn-embed-dim",
        type=click.IntRange(min=1),
        help="Width of the new feed-forwards; wider ones compute the same at first.  [default: the old one's]",
    ),
    click.option(
        "--max-positions",
        type=click.IntRange(min=1),
        help="Of the new model; the old positions are repeated.  [default: the old one's]",
    ),
    click.option(
        "--from-sublayers",
        help="For each new sublayer the number of the old one whose weights it takes, from 0, or -, as in 0,1,-,3.  "
        "[default: the patterns are aligned]",
    ),
    click.option(
        "--text",
        type=ExistingPath(),
        help="Held-out text: a file of raw text, or what lazyformer corpus wrote, whose split valid is read.",
    ),
    click.option(
        "--report/--no-report",
        default=True,
        help="With --text: measure the masked-LM loss before and after, and what the change of each sublayer costs.",
    ),
)
