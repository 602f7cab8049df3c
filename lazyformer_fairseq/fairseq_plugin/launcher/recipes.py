"""The recipes of ``lazyformer pretrain``: named sets of sizes and training options for fairseq-train."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Optional

from lazyformer_fairseq.arguments import options_by_name, to_arguments
from lazyformer_fairseq.errors import UserError, whole_number
from lazyformer_fairseq.patterns.architectures import CausalArchitecture
from lazyformer_fairseq.training.laptop import LAPTOP, LAPTOP_TOKENS

LAZYFORMER_KEPT = ",".join(map(str, range(100_000, 1_000_000, 100_000)))
NVLAMB = """--optimizer nvlamb --lamb-betas '(0.9, 0.999)' --lamb-eps 1e-6 --weight-decay 0.01 --clip-norm 1.0
    --no-decay-bias-and-norm --no-ratio-without-decay --lr-scheduler polynomial_warmup --power 0.5
    --save-interval-updates 200 --keep-interval-updates 3 --log-interval 10"""


@dataclass(frozen=True)
class Recipe:
    """The sizes and options of a pre-training run.

    Attributes:
        tokens: tokens per sequence; None for the arch's number of positions.
        sequences: sequences per update.
        updates: the run's total number of updates.
        options: additional options for fairseq-train.
    """

    tokens: Optional[int]
    sequences: int
    updates: int
    options: str


ADAM = """--optimizer fused_adam --adam-betas '(0.9, 0.999)' --adam-eps 1e-6 --weight-decay 0.01 --clip-norm 1.0
    --lr-scheduler linear_warmup --lr 1e-4 --warmup-ratio 0.01
    --save-interval-updates 5000 --keep-interval-updates 3 --log-interval 100"""


def drop_unsupported_options(recipe: Sequence[str], given: Mapping[str, str]) -> list[str]:
    """Drop the options of a recipe that the user's own optimizer or schedule does not support.

    Args:
        recipe: the recipe's options as command-line arguments.
        given: the user's options by name.
    """
    found = options_by_name(recipe)
    for registry in given.keys() & {"optimizer", "lr_scheduler"}:
        from lazyformer_fairseq.fairseq_plugin.optim.others import unsupported_options  # imports fairseq

        lacking = unsupported_options(registry, given[registry])
        found = {name: value for name, value in found.items() if name not in lacking}
    return to_arguments({name: value or True for name, value in found.items()})


def convert_warmup(schedule: str, options: Mapping[str, str]) -> dict[str, str]:
    """Return a phase's options with the warm-up converted to a different schedule's unit.

    Depending on the schedule, the warm-up is a number of updates, is a fraction of all updates, or cannot be set.

    Args:
        schedule: a value of ``--lr-scheduler``.
        options: the phase's options that differ from the recipe's, by name.
    """
    from lazyformer_fairseq.fairseq_plugin.optim.others import unsupported_options  # imports fairseq

    found = dict(options)
    lacking = unsupported_options("lr_scheduler", schedule)
    if "warmup_updates" not in found or "warmup_updates" not in lacking:
        return found
    updates = int(found.pop("warmup_updates"))
    if "warmup_ratio" not in lacking:
        found["warmup_ratio"] = f"{updates / int(found['max_update']):g}"
    return found


RECIPES = {
    # LazyFormer, Table 5; a tenth of its updates when continuing from a trained model.
    "table5": Recipe(None, 256, 1_000_000, f"{ADAM} --keep-updates-list {LAZYFORMER_KEPT}"),
    "continue": Recipe(None, 256, 100_000, ADAM),
    # Tokens, sequences and updates are from PAR Transformer, section 3.2. The paper otherwise only names NVLAMB, so the
    # rest follows NVIDIA's BERT (DeepLearningExamples, PyTorch) with the same sequences and updates.
    "phase1": Recipe(128, 65_536, 7_038, f"{NVLAMB} --lr 6e-3 --warmup-ratio 0.2843"),
    "phase2": Recipe(512, 32_768, 1_563, f"{NVLAMB} --lr 4e-3 --warmup-ratio 0.128"),
}
PHASES = ("phase1", "phase2")
SAVES = "--save-interval-updates 1000 --keep-interval-updates 2 --log-interval 100"
RECIPES["laptop"] = Recipe(LAPTOP_TOKENS, 2, 20_000, f"{shlex.join(to_arguments(LAPTOP))} {SAVES}")

LONGFORMER = "longformer"
LONGFORMER_PHASE = "longformer-phase"
CAUSAL_CHOICES = ("nvidia", "transformer-xl", "igpt", LONGFORMER_PHASE, LONGFORMER)
_NVIDIA = """
    --optimizer nvlamb --lamb-betas (0.9,0.999) --lamb-eps 1e-6 --weight-decay 0 --max-weight-norm 10
    --no-bias-correction --clip-norm 0.25 --lr-scheduler cosine --lr 0.01 --warmup-init-lr 0
    --roll"""

# Chen et al., 2020, section 3: Adam, one epoch of ImageNet as warm-up, cosine decay to zero. The paper tries several
# learning rates; the choice per model is ours, as is the gradient clipping.
_IGPT = """
    --optimizer fused_adam --adam-betas (0.9,0.95) --adam-eps 1e-8 --weight-decay 0 --clip-norm 1.0
    --lr-scheduler cosine --warmup-updates 9609"""

# Options for fairseq-train. Keys are the names of the YAML files in ``configs/language_modeling/recipe``, plus
# ``longformer_phase`` for Longformer's phases.
CAUSAL_RECIPES = {
    "nvidia": f"{_NVIDIA} --min-lr 1e-3 --warmup-updates 1000",
    "nvidia_large": f"{_NVIDIA} --min-lr 1e-4 --warmup-updates 16000 --init-std 0.005",
    "transformer_xl": """
        --optimizer fused_adam --adam-betas (0.9,0.999) --adam-eps 1e-8 --weight-decay 0 --clip-norm 0.25
        --lr-scheduler cosine --lr 2.5e-4 --warmup-updates 1000""",
    "longformer_phase": """
        --optimizer fused_adam --adam-betas (0.9,0.999) --adam-eps 1e-8 --weight-decay 0.01 --clip-norm 0.25
        --lr-scheduler fixed --lr 2.5e-4 --warmup-updates 10000 --decoder-normalize-before --activation-fn gelu""",
    "igpt": f"{_IGPT} --lr 3e-3",
    "igpt_large": f"{_IGPT} --lr 1e-3",
}
# Longformer, Table 12, the small model's five phases: tokens per segment, segments per update, updates.
_LONGFORMER = (
    (2_048, 32, 430_000),
    (4_096, 32, 50_000),
    (8_192, 16, 50_000),
    (16_384, 16, 35_000),
    (23_040, 16, 5_000),
)


def longformer_phases(pattern: str, given: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return the options of Longformer's phases by phase name (Longformer, section 4.2).

    From phase to phase, windows and segments double and the learning rate halves. The last phase's segments are less
    than doubled, as in the paper. Each phase warms up for a tenth of its updates or for 10,000 updates, whichever is
    less, and then keeps its learning rate constant.

    Args:
        pattern: the first phase's pattern.
        given: options for all phases. ``--tgt-len`` and ``--lr`` apply to the first phase; all others are the same in
            every phase.

    Raises:
        UserError: the pattern has no window to double, or a number is invalid.
    """
    if "window=" not in pattern:
        raise UserError(
            f"--recipe {LONGFORMER} doubles windows, but {pattern} has none; use a pattern such as s[window=32]"
        )
    for name in ("tgt_len", "max_update"):
        if whole_number(given.get(name, "1")) is None:  # the bounds check accepts 1e3
            raise UserError(f"--{name.replace('_', '-')} {given[name]}: must be a whole number")
    try:
        rate = float(given.get("lr", 2.5e-4))
    except ValueError:
        raise UserError(f"--lr {given['lr']}: must be a single number, the first phase's learning rate") from None
    first = int(given.get("tgt_len", _LONGFORMER[0][0]))
    found = {}
    for number, (tokens, rows, usual) in enumerate(_LONGFORMER):
        updates = int(given.get("max_update", usual))
        options = {
            "tgt_len": first * tokens // _LONGFORMER[0][0],
            "lr": f"{rate / 2**number:g}",
            "sublayer_pattern": _with_windows_times(2**number, pattern),
            "sequences_per_update": given.get("sequences_per_update", rows),
            "max_update": updates,
            "warmup_updates": given.get("warmup_updates", max(1, min(10_000, updates // 10))),
        }
        found[f"phase{number + 1}"] = {name: str(value) for name, value in options.items()}
    return found


def _with_windows_times(factor: int, pattern: str) -> str:
    return re.sub(r"(window\s*=\s*)([0-9]+)", lambda found: f"{found[1]}{int(found[2]) * factor}", pattern)


def causal_options(row: CausalArchitecture, choice: Optional[str]) -> str:
    """Return the fairseq-train options of a causal model's recipe.

    Args:
        row: the model's row in the architecture table.
        choice: one of :data:`CAUSAL_CHOICES`; None for the row's own recipe.
    """
    name = row.recipe if choice is None else choice.replace("-", "_")
    return CAUSAL_RECIPES[row.recipe if row.recipe.startswith(name) else name]
