"""Options of a command that may change the pattern of a trained encoder. Light: torch comes with :meth:`start`."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from lazyformer_fairseq.arguments import refuse_missing
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.options import option

if TYPE_CHECKING:
    from lazyformer_fairseq.data.text.interface import TextTokenizer
    from lazyformer_fairseq.training.warm_start.start import Trained, WarmStart

OLD = "the old one's"


@dataclass(frozen=True)
class WarmOptions:
    """Options of a warm start; the first three change the model."""

    sublayer_pattern: Optional[str] = option(
        None,
        "Of the new model, such as M2x6: its sublayers start from those of the old one.",
        shown=OLD,
    )
    encoder_ffn_embed_dim: Optional[int] = option(
        None,
        "Width of the new feed-forwards; wider ones compute the same at first.",
        low=1,
        shown=OLD,
    )
    max_positions: Optional[int] = option(None, "Of the new model; the old positions are repeated.", low=1, shown=OLD)
    from_sublayers: Optional[str] = option(
        None,
        "For each new sublayer the number of the old one whose weights it takes, from 0, or -, as in 0,1,-,3.",
        shown="the patterns are aligned",
    )
    text: Optional[Path] = option(
        None,
        "Held-out text, to measure the masked-LM loss before and after: a file of raw text, or what lazyformer corpus "
        "wrote, whose split valid is read.",
    )

    @property
    def changes(self) -> dict[str, Any]:
        """Return the options of the model that change, by name."""
        names = ("sublayer_pattern", "encoder_ffn_embed_dim", "max_positions")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def refuse_misfits(self) -> None:
        """Raise a UserError for options of a model that changes where none does, and for a text that is not there."""
        if not self.changes and (self.from_sublayers or self.text):
            raise UserError("--from-sublayers and --text are for a model that changes: give --sublayer-pattern")
        refuse_missing(self.text)

    def start(self, old: "Trained", tokenizer: "TextTokenizer", source: str) -> "WarmStart":
        """Make the warm start, its record with losses where there is a text.

        Args:
            old: the model that it starts from.
            tokenizer: the old model's.
            source: name of the old model, for the record.

        Raises:
            UserError: as :func:`~lazyformer_fairseq.training.warm_start.start.start_from` and
                :func:`~lazyformer_fairseq.training.warm_start.losses.read_text` do.
        """
        from lazyformer_fairseq.training.warm_start.start import start_from

        origins = self.from_sublayers and [word.strip() for word in self.from_sublayers.split(",")]
        start = start_from(old, self.changes, origins)  # first, as it may refuse
        if self.text is not None:
            from lazyformer_fairseq.training.warm_start.losses import Scorer, measure_losses, read_text

            text = read_text(self.text, tokenizer, old.cfg.max_positions)
            start.record["losses"] = measure_losses(Scorer(old, text), start)
        start.record["source"] = source
        return start
