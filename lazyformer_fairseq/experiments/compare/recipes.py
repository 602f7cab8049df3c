"""How the models of a comparison learn: optimizer and learning-rate schedule."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    """A row.

    Attributes:
        help: one line.
        warmup_ratio: share of the updates until the highest rate, unless the user gives another.
        decayed_to: share of the highest rate that is left in the end.
        options: of fairseq-train.
    """

    help: str
    warmup_ratio: float
    decayed_to: float
    options: str

    def schedule(self, rate: float, warmup_ratio: float, updates: int) -> list[str]:
        """Options of fairseq-train for a training of so many updates."""
        if not self.decayed_to:
            return ["--lr-scheduler", "linear_warmup", "--warmup-ratio", str(warmup_ratio), "--lr", str(rate)]
        warmup = ["--warmup-updates", str(round(warmup_ratio * updates)), "--warmup-init-lr", "0"]
        return ["--lr-scheduler", "cosine", *warmup, "--lr", str(rate), "--min-lr", str(self.decayed_to * rate)]


RECIPES = {
    "adam": Recipe(
        "Adam (0.9, 0.98), linear decay to zero", 0.1, 0.0, "--optimizer fused_adam --adam-betas (0.9,0.98)"
    ),
    "nvidia": Recipe(
        "LAMB, cosine decay to a tenth, as NVIDIA's Transformer-XL",
        0.025,
        0.1,
        "--optimizer nvlamb --weight-decay 0 --max-weight-norm 10 --no-bias-correction",
    ),
}
