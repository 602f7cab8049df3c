"""Options of commands that can change a trained encoder's pattern; only :meth:`WarmOptions.start` imports torch."""

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
    """Options of a warm start, of which the first three change the model."""

    sublayer_pattern: Optional[str] = option(
        None,
        "Pattern of the new model, such as M2x6; its sublayers start from the weights of the old ones.",
        shown=OLD,
    )
    encoder_ffn_embed_dim: Optional[int] = option(
        None,
        "Width of the new model's feed-forwards. Wider ones compute the same at first.",
        low=1,
        shown=OLD,
    )
    max_positions: Optional[int] = option(
        None,
        "Number of positions of the new model. The old position embeddings are repeated to fill them.",
        low=1,
        shown=OLD,
    )
    from_sublayers: Optional[str] = option(
        None,
        "For each new sublayer, the number (from 0) of the old sublayer whose weights it takes, or - for none, as in "
        "0,1,-,3.",
        shown="the patterns are aligned",
    )
    text: Optional[Path] = option(
        None,
        "Held-out text on which to measure the masked-LM loss before and after the change: a file of raw text, or a "
        "folder that lazyformer corpus wrote, whose split valid is read.",
    )

    @property
    def changes(self) -> dict[str, Any]:
        """The options of the model that change, by name."""
        names = ("sublayer_pattern", "encoder_ffn_embed_dim", "max_positions")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def refuse_misfits(self) -> None:
        """Raise a UserError if options for a change are given without a change, or if the text does not exist."""
        if not self.changes and (self.from_sublayers or self.text):
            raise UserError("--from-sublayers and --text need a model that changes: give --sublayer-pattern too")
        refuse_missing(self.text)

    def start(self, old: "Trained", tokenizer: "TextTokenizer", source: str) -> "WarmStart":
        """Make the warm start; if a text is given, measure the losses for its record.

        Args:
            old: the model to start from.
            tokenizer: the old model's tokenizer.
            source: the name of the old model, for the record.

        Raises:
            UserError: :func:`~lazyformer_fairseq.training.warm_start.start.start_from` or
                :func:`~lazyformer_fairseq.training.warm_start.losses.read_text` raises it.
        """
        from lazyformer_fairseq.training.warm_start.start import start_from

        origins = self.from_sublayers and [word.strip() for word in self.from_sublayers.split(",")]
        start = start_from(old, self.changes, origins)  # before reading the text, as this may raise an error
        if self.text is not None:
            from lazyformer_fairseq.training.warm_start.losses import Scorer, measure_losses, read_text

            text = read_text(self.text, tokenizer, old.cfg.max_positions)
            start.record["losses"] = measure_losses(Scorer(old, text), start)
        start.record["source"] = source
        return start
