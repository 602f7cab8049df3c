"""Options for commands that can change a trained encoder's pattern; only :meth:`WarmOptions.start` imports torch."""

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
    """Warm-start options; the first three change the model."""

    sublayer_pattern: Optional[str] = option(
        None,
        "The new model's pattern, such as M2x6. Its sublayers are initialized from the old model's sublayers.",
        shown=OLD,
    )
    encoder_ffn_embed_dim: Optional[int] = option(
        None,
        "The new model's feed-forward width. Wider feed-forward sublayers initially compute the same outputs.",
        low=1,
        shown=OLD,
    )
    max_positions: Optional[int] = option(
        None,
        "The new model's number of positions. The old position embeddings are repeated as needed.",
        low=1,
        shown=OLD,
    )
    from_sublayers: Optional[str] = option(
        None,
        "For each new sublayer, the index (from 0) of the old sublayer to initialize it from, or - for none, as in "
        "0,1,-,3.",
        shown="the patterns are aligned",
    )
    text: Optional[Path] = option(
        None,
        "Held-out text for measuring the masked-LM loss before and after the change: a raw text file, or a folder "
        "written by lazyformer corpus (its split valid is used).",
    )

    @property
    def changes(self) -> dict[str, Any]:
        """The model options that change, by name."""
        names = ("sublayer_pattern", "encoder_ffn_embed_dim", "max_positions")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def refuse_misfits(self) -> None:
        """Raise a UserError for ``--from-sublayers`` or ``--text`` without a change, or if the text does not exist."""
        if not self.changes and (self.from_sublayers or self.text):
            raise UserError("--from-sublayers and --text require a changed model: pass --sublayer-pattern too")
        refuse_missing(self.text)

    def start(self, old: "Trained", tokenizer: "TextTokenizer", source: str) -> "WarmStart":
        """Build the warm-started model; if ``--text`` is set, measure the losses for its record.

        Args:
            old: the model to start from.
            tokenizer: the old model's tokenizer.
            source: the old model's name, for the record.

        Raises:
            UserError: raised by :func:`~lazyformer_fairseq.training.warm_start.start.start_from` or
                :func:`~lazyformer_fairseq.training.warm_start.losses.read_text`.
        """
        from lazyformer_fairseq.training.warm_start.start import start_from

        origins = self.from_sublayers and [word.strip() for word in self.from_sublayers.split(",")]
        start = start_from(old, self.changes, origins)  # before reading the text, because this may fail
        if self.text is not None:
            from lazyformer_fairseq.training.warm_start.losses import Scorer, measure_losses, read_text

            text = read_text(self.text, tokenizer, old.cfg.max_positions)
            start.record["losses"] = measure_losses(Scorer(old, text), start)
        start.record["source"] = source
        return start
