"""The settings of searches, which are also their commands' options and are stored in the search folder."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Optional

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.compare.settings import RECIPES
from lazyformer_fairseq.options import check, option, split_at_commas
from lazyformer_fairseq.patterns.grammar import PlannedSublayer, expand, producers, read_sublayer, split_sublayers
from lazyformer_fairseq.patterns.kinds import describe_letters, kinds
from lazyformer_fairseq.training.laptop import LAPTOP

TASKS = ("masked-lm", "language-model")
LAMB_LR = 1e-2  # PAR Transformer, section 2.2
GROWTH = 3  # ratio between run lengths on successive rungs

of_front = partial(option, section="A front")
of_gradient = partial(option, section="Gradient descent")


@dataclass(frozen=True)
class SearchSettings:
    """The settings of `lazyformer search`, with PAR Transformer's defaults (section 2.2) where the paper has any.

    Attributes:
        data: the folder of training data.
        task: one of TASKS.
        arch: the named model that determines sizes, dropout and the placement of norms.
        baseline: the expanded pattern to compare with; it has as many sublayers as there are layers to search.
        prices: milliseconds by sublayer, if set by the user.
        device: the device that everything runs on.
        fairseq_options: command-line options for fairseq's task and model.

    Raises:
        UserError: settings conflict.
    """

    data: str
    task: str
    arch: str
    baseline: str
    candidates: tuple[str, ...] = option(
        ("s", "f", "identity"),
        f"Candidates for each layer: {describe_letters()}. Settings may follow in brackets.",
    )
    budgets: tuple[float, ...] = option(
        (),
        "Find a front by successive halving: one pattern for each of these fractions of the baseline's latency.",
        low=0,
        is_open=True,
        metavar="FRACTION,...",
        shown="one pattern of any latency, by gradient descent",
    )
    max_updates: int = option(
        50_000,
        "Number of updates per complete run (front), or in total for weights and architecture (gradient descent).",
        low=1,
    )
    batch_size: int = option(128, "Number of sequences (or streams of text) per update.", low=1)
    evaluations: int = of_front(96, "Total number of patterns to sample for all budgets.", low=1)
    rungs: int = of_front(
        3,
        "Number of rungs (run lengths). The last rung has --max-updates updates, and every other rung has "
        f"1/{GROWTH} as many as the next.",
        low=1,
        high=20,
    )
    keep: float = of_front(
        0.33, "Fraction of each budget's patterns that reach the next rung; 1 for all.", low=0, is_open=True, high=1
    )
    control: bool = of_front(True, "For comparison, also run a random search of equal cost and two simple rules.")
    recipe: str = option(
        "adam",
        "Training recipe, as in `lazyformer compare`. Supernets are trained with LAMB unless the recipe is laptop.",
        choices=tuple(RECIPES),
    )
    lr: Optional[float] = of_front(
        None,
        "Peak learning rate, which stays constant until the decay.",
        low=0,
        is_open=True,
        high=1,
        shown="the recipe's",
    )
    validation_tokens: int = of_front(
        16_384, "Number of validation tokens; text and masks are the same for all patterns.", low=1
    )
    in_turn: Optional[bool] = of_front(
        None,
        "Train one pattern at a time (--in-turn), or several at once in separate processes (--alone).",
        "--in-turn/--alone",
        shown="alone if there are several GPUs",
    )
    constant_updates: int = of_gradient(
        10_000, "Number of initial updates that train only the weights, not the architecture.", low=0
    )
    update_freq: int = of_gradient(
        1,
        "Number of chunks that each update is split into to save memory; each chunk samples its own mixture. With "
        "streams of text, the number of streams is divided by this number, and each chunk is the next segment of every "
        "stream.",
        low=1,
    )
    weights_lr: Optional[float] = of_gradient(
        None,
        "Learning rate of the supernet's weights (LAMB or Muon).",
        low=0,
        is_open=True,
        shown=f"{LAMB_LR:g}, or {LAPTOP['lr']:g} with --recipe laptop",
    )
    architecture_lr: float = of_gradient(1e-2, "Learning rate of the architecture (Adam).", low=0, is_open=True)
    latency_tokens: Optional[int] = option(
        None, "Sequence length, in tokens, for latency measurements.", low=1, shown="same as for training"
    )
    seed: int = option(1, "Random seed for weights, data and sampled patterns.", low=0)
    prices: Optional[dict[str, float]] = None
    device: str = "cpu"
    fairseq_options: tuple[str, ...] = ()

    def __post_init__(self):
        check(self)
        read_candidates(self.candidates)
        if self.weights_lr is None:
            rate = LAMB_LR
            if self.recipe == "laptop":
                rate = LAPTOP["lr"]
            object.__setattr__(self, "weights_lr", rate)
        if self.budgets:
            if self.lengths[0] < 2:
                needed = 2 * GROWTH ** (self.rungs - 1)
                remedy = f"--max-updates {needed} or more"
                fitting = [rungs for rungs in range(1, self.rungs) if self.max_updates >= 2 * GROWTH ** (rungs - 1)]
                if fitting:
                    remedy = f"--rungs {fitting[-1]}, or {remedy}"
                raise UserError(
                    f"--rungs {self.rungs}: with --max-updates {self.max_updates}, the first rung would get "
                    f"fewer than two updates; use {remedy}"
                )
            if self.evaluations < len(self.budgets):
                raise UserError(
                    f"--evaluations {self.evaluations}: use at least one for each of the {len(self.budgets)} budgets"
                )
        else:
            if self.max_updates <= self.constant_updates:
                raise UserError(
                    f"--max-updates {self.max_updates}: must be more than --constant-updates {self.constant_updates}, "
                    "because the architecture is trained only after those; increase --max-updates, or use "
                    f"--constant-updates {self.max_updates // 5}, a fifth of --max-updates as in the paper"
                )
            if self.batch_size % self.update_freq:
                raise UserError(f"--update-freq {self.update_freq}: does not divide --batch-size {self.batch_size}")

    @property
    def lengths(self) -> list[int]:
        """The number of updates of a run up to each rung."""
        return [self.max_updates // GROWTH**left for left in reversed(range(self.rungs))]

    @property
    def layers(self) -> int:
        """The number of layers to search."""
        return len(split_sublayers(self.baseline))

    @property
    def priced(self) -> list[str]:
        """The distinct sublayers that need a price: all candidates and baseline sublayers except identity."""
        names = [*self.candidates, *split_sublayers(self.baseline)]
        return sorted({name for name in names if not read_sublayer(name).kind.is_identity})


@dataclass(frozen=True)
class CompressSettings:
    """The settings of `lazyformer search compress`.

    Attributes:
        checkpoint: the path of the trained model.
        weights: the checkpoint's SHA-256, so that a different checkpoint at the same path counts as a different search.
        text: the path of raw text or of a folder of binarized data.
        prices: milliseconds by sublayer, if set by the user.
    """

    checkpoint: str
    weights: str
    text: str
    budgets: tuple[float, ...] = option(
        (0.5, 0.6, 0.7, 0.8, 0.9),
        "Latency budgets as fractions of the model's latency; one pattern is found for each.",
        low=0,
        is_open=True,
        high=0.999,
        metavar="FRACTION,...",
    )
    candidates: tuple[str, ...] = option(
        (),
        "Sublayers that may replace the model's sublayers, written as in a pattern; identity removes a sublayer.",
        shown="every kind that can reuse the weights, windows of a sixteenth, an eighth and a quarter of the longest "
        "input, and identity",
    )
    tokens: int = option(32_768, "Number of tokens of TEXT to measure losses on.", low=1)
    top: int = option(4, "Number of patterns to measure per budget and round.", low=1)
    prices: Optional[dict[str, float]] = None
    latency_tokens: Optional[int] = option(
        None, "Sequence length, in tokens, for latency measurements.", low=1, shown="the model's longest input"
    )
    seed: int = option(1, "Random seed for newly initialized weights.", low=0)


def candidate_name(sublayer: PlannedSublayer) -> str:
    """Return a sublayer's text in ``--candidates``; ``identity`` is spelled out because a dash is easy to overlook."""
    if sublayer.kind.is_identity:
        return sublayer.kind.name
    return sublayer.text


def read_candidates(words: tuple[str, ...]) -> tuple[str, ...]:
    """Parse candidates into texts such as ``("s", "f", "identity")``, in the order of the table of kinds.

    Raises:
        UserError: a candidate is unknown, there are fewer than two, or one reads something that no other provides.
    """
    text = ",".join(words)
    given = read_sublayers(words)
    handed_on = {what for candidate in given for what in candidate.kind.hands_on}
    for candidate in given:
        if candidate.kind.reads and candidate.kind.reads not in handed_on:
            letters = producers(candidate.kind.reads)
            raise UserError(
                f"--candidates {text}: {candidate.text} reuses the {candidate.kind.reads} of an {letters} below it; "
                f"add {letters}"
            )
    in_order = sorted(given, key=lambda candidate: kinds().index(candidate.kind))
    names = tuple(candidate_name(candidate) for candidate in in_order)
    if len(names) < 2:
        raise UserError(f"--candidates {text}: specify at least two; otherwise there is nothing to choose from")
    return names


def read_sublayers(words: Sequence[str]) -> list[PlannedSublayer]:
    """Parse candidates, each written as in a pattern or as the name of a kind, and remove duplicates.

    Raises:
        UserError: a word is not a sublayer.
    """
    text = ",".join(words)
    found = {}
    for name in split_at_commas(text):
        try:
            candidate = read_sublayer(name)
        except UserError as error:
            raise UserError(f"--candidates {text}: {error}") from None
        found[candidate.text] = candidate
    return list(found.values())


def choose_baseline(pattern: Optional[str], sublayers: Optional[int], default_sublayers: int) -> str:
    """Return the baseline's expanded pattern.

    Args:
        pattern: the user's pattern, if any; by default, attention and feed-forward sublayers alternate, as in the
            paper's baseline.
        sublayers: the user's number of sublayers, if any.
        default_sublayers: the number of sublayers if the user sets neither.

    Raises:
        UserError: the pattern has a different number of sublayers, or no such baseline exists.
    """
    if pattern is not None:
        letters = expand(pattern)
        length = len(split_sublayers(letters))
        if sublayers is not None and length != sublayers:
            raise UserError(
                f"--baseline-pattern {pattern!r} has {length} sublayers, which does not match --sublayers {sublayers}; "
                "use the same number for both, or omit --sublayers"
            )
        return letters
    if sublayers is None:
        sublayers = default_sublayers
    if sublayers < 1:
        raise UserError(f"--sublayers {sublayers}: a search needs at least one layer")
    if sublayers % 2:
        raise UserError(
            f"--sublayers {sublayers}: the baseline (sf)x{max(sublayers // 2, 1)} cannot have an odd number of "
            "sublayers; use an even number, or specify a --baseline-pattern of this length"
        )
    return "sf" * (sublayers // 2)
