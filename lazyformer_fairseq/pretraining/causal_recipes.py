"""How `lazyformer lm train` trains: optimizer and schedule, as in ``configs/language_modeling/recipe``."""

from typing import Optional

from lazyformer_fairseq.patterns.architectures import CausalArchitecture

CHOICES = ("nvidia", "transformer-xl")
_NVIDIA = """
    --optimizer nvlamb --lamb-betas (0.9,0.999) --lamb-eps 1e-6 --weight-decay 0 --max-weight-norm 10
    --no-bias-correction --clip-norm 0.25 --lr-scheduler cosine --lr 0.01 --warmup-init-lr 0
    --roll"""

# By the names of the YAML files: options of fairseq-train.
RECIPES = {
    "nvidia": f"{_NVIDIA} --min-lr 1e-3 --warmup-updates 1000",
    "nvidia_large": f"{_NVIDIA} --min-lr 1e-4 --warmup-updates 16000 --init-std 0.005",
    "transformer_xl": """
        --optimizer fused_adam --adam-betas (0.9,0.999) --adam-eps 1e-8 --weight-decay 0 --clip-norm 0.25
        --lr-scheduler cosine --lr 2.5e-4 --warmup-updates 1000""",
}


def options_of(row: CausalArchitecture, choice: Optional[str]) -> str:
    """Of fairseq-train, for a model.

    Args:
        choice: of CHOICES; None for the row's own.
    """
    name = row.recipe if choice is None else choice.replace("-", "_")
    return RECIPES[row.recipe if row.recipe.startswith(name) else name]
