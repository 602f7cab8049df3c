"""What the demo trains: two tiny models of the same size, on the same batches."""

from dataclasses import dataclass
from typing import Any, Optional

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.options import duration, option
from lazyformer_fairseq.training.laptop import LAPTOP_HELP, laptop

# Equal parameters, as in the paper's Table 2: what the lazy attention saves in projections widens its feed-forward.
MODELS = {
    "bert_m1x4": ("bert_tiny", {"sublayer_pattern": "M1x4", "encoder_ffn_embed_dim": 128}),
    "lazyformer_m2x2": ("lazyformer_m2x6_s_tiny", {"sublayer_pattern": "M2x2", "encoder_ffn_embed_dim": 160}),
}
# At this size "eager" takes two thirds of the time of what "auto" chooses.
SAME_FOR_BOTH = {
    **{"encoder_embed_dim": 64, "encoder_attention_heads": 8, "max_positions": 64, "dropout": 0.0},
    **{"attention_dropout": 0.0, "attention_backend": "eager"},
}
FEWEST = 12  # updates: made however late it is, and what the first plan goes by


@dataclass(frozen=True)
class DemoSettings:
    """All that decides the demo's result; kept in its folder, so that a second run knows what it may reuse.

    Attributes:
        vocab_size: all symbols included.
        valid_share: of the documents; the acceptability task is made of these.
        tokens_per_sample: longest block.
        sequences: of an update.
        minutes: in which all must be over, at the price of fewer updates; None for no limit.
        updates: of pre-training, at most.
        rate: peak learning rate of pre-training; None for the recipe's, Adam's 2e-3.
        finetuning_updates: on the acceptability task, at most.
        seed: of everything.
    """

    corpus: Optional[str] = option(
        None, "Text file or folder of .txt files.", shown="the English prose that Python carries"
    )
    vocab_size: int = 4000
    valid_share: float = 0.2
    tokens_per_sample: int = 32
    sequences: int = 8
    minutes: Optional[float] = option(
        None,
        "Time for all of it, such as 4min.",
        "--budget",
        parse=lambda text: duration(text) / 60,
        metavar="TIME",
        shown="4min, or none with --updates",
    )
    recipe: str = option("laptop", f"How they learn. {LAPTOP_HELP}.", choices=("laptop", "adam"))
    without: Optional[tuple[str, ...]] = option(None, "Options of --recipe laptop to leave out.", metavar="NAME,...")
    updates: Optional[int] = option(None, "Updates of pre-training, at most.", low=FEWEST, shown="5000")
    rate: Optional[float] = None
    finetuning_updates: int = 400
    seed: int = 1

    def __post_init__(self):
        if self.minutes is None and self.updates is None:
            object.__setattr__(self, "minutes", 4.0)
        object.__setattr__(self, "updates", self.updates or 5000)
        usual = self.how.get("lr", 2e-3)
        object.__setattr__(self, "rate", self.rate or usual)

    @property
    def how(self) -> dict[str, Any]:
        """Options of the recipe laptop by name; none of Adam's."""
        if self.recipe == "laptop":
            return laptop(self.without or ())
        if self.without:
            raise UserError(f"--without {','.join(self.without)}: is of --recipe laptop")
        return {}
