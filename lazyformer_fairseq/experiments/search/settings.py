"""Settings of searches, which are options of the commands; the folder of a search keeps them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Optional

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.compare.settings import RECIPES
from lazyformer_fairseq.options import check, divided, option
from lazyformer_fairseq.patterns.grammar import PlannedSublayer, expand, producers, read_sublayer, split_sublayers
from lazyformer_fairseq.patterns.kinds import describe_letters, kinds
from lazyformer_fairseq.training.laptop import LAPTOP

TASKS = ("masked-lm", "language-model")
LAMB_LR = 1e-2  # PAR Transformer, section 2.2
GROWTH = 3  # of a training from rung to rung

of_front = partial(option, section="A front")
of_gradient = partial(option, section="Gradient descent")


@dataclass(frozen=True)
class SearchSettings:
    """Settings of `lazyformer search`. Defaults are those of PAR Transformer, section 2.2, where it names them.

    Attributes:
        data: the folder that training reads.
        task: one of TASKS.
        arch: gives sizes, dropout and norm position.
        baseline: written-out pattern to compare with; it has as many sublayers as there are layers.
        prices: milliseconds by sublayer, if the user gives them.
        device: the device that everything runs on.
        fairseq_options: options of task and model, as given.

    Raises:
        UserError: values that do not fit together.
    """

    data: str
    task: str
    arch: str
    baseline: str
    candidates: tuple[str, ...] = option(
        ("s", "f", "identity"),
        f"Candidates of each layer: {describe_letters()}; settings in brackets.",
    )
    budgets: tuple[float, ...] = option(
        (),
        "Find a front by successive halving: a pattern for each of these shares of the baseline's latency.",
        low=0,
        is_open=True,
        metavar="SHARE,...",
        shown="one pattern of any latency, by gradient descent",
    )
    max_updates: int = option(
        50_000,
        "Updates of a whole training of a front; of one pattern, updates of weights and architecture.",
        low=1,
    )
    batch_size: int = option(128, "Sequences, or streams of text, per update.", low=1)
    evaluations: int = of_front(96, "Patterns that are drawn, of all budgets together.", low=1)
    rungs: int = of_front(
        3,
        f"Lengths of training; the last is --max-updates, each 1/{GROWTH} of the next.",
        low=1,
        high=20,
    )
    keep: float = of_front(0.33, "Share of a budget's patterns that go on; 1: all.", low=0, is_open=True, high=1)
    control: bool = of_front(True, "Random search of the same cost beside it, and two rules.")
    recipe: str = option(
        "adam",
        "Recipe of `lazyformer compare`. A supernet learns by laptop, or else by LAMB.",
        choices=tuple(RECIPES),
    )
    lr: Optional[float] = of_front(
        None,
        "Learning rate, constant until it decays.",
        low=0,
        is_open=True,
        high=1,
        shown="the recipe's",
    )
    validation_tokens: int = of_front(16_384, "Tokens that are scored, the same text and masks for all.", low=1)
    in_turn: Optional[bool] = of_front(
        None,
        "One training at a time, or several, a process each.",
        "--in-turn/--alone",
        shown="alone on several GPUs",
    )
    constant_updates: int = of_gradient(10_000, "Updates of the weights alone, before the architecture learns.", low=0)
    update_freq: int = of_gradient(
        1,
        "Chunks of an update, one after the other, of which memory holds one; each draws its own mixture. Of streams "
        "of text there are as many times fewer, and a chunk is the next segment of each.",
        low=1,
    )
    weights_lr: Optional[float] = of_gradient(
        None,
        "The supernet's learning rate, LAMB's or Muon's.",
        low=0,
        is_open=True,
        shown=f"{LAMB_LR:g}, or {LAPTOP['lr']:g} by the recipe laptop",
    )
    architecture_lr: float = of_gradient(1e-2, "Adam's learning rate.", low=0, is_open=True)
    latency_tokens: Optional[int] = option(None, "Tokens that latency is measured with.", low=1, shown="the training's")
    seed: int = option(1, "Seed of weights, data and draws.", low=0)
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
                raise UserError(
                    f"--rungs {self.rungs}: the first lacks two of --max-updates {self.max_updates}; give fewer"
                )
            if self.evaluations < len(self.budgets):
                raise UserError(
                    f"--evaluations {self.evaluations}: give one for each of {len(self.budgets)} budgets at least"
                )
        else:
            if self.max_updates <= self.constant_updates:
                raise UserError(
                    f"--max-updates {self.max_updates}: must be more than the {self.constant_updates} of "
                    "--constant-updates, for until then the architecture stays as it is"
                )
            if self.batch_size % self.update_freq:
                raise UserError(f"--update-freq {self.update_freq}: does not divide --batch-size {self.batch_size}")

    @property
    def lengths(self) -> list[int]:
        """The updates of a front's trainings by rung."""
        return [self.max_updates // GROWTH**left for left in reversed(range(self.rungs))]

    @property
    def layers(self) -> int:
        """The number of layers that are searched."""
        return len(split_sublayers(self.baseline))

    @property
    def priced(self) -> list[str]:
        """The sublayers among candidates and baseline, without identity; each once."""
        names = [*self.candidates, *split_sublayers(self.baseline)]
        return sorted({name for name in names if not read_sublayer(name).kind.is_identity})


@dataclass(frozen=True)
class CompressSettings:
    """Settings of `lazyformer search compress`.

    Attributes:
        checkpoint: the trained model.
        weights: hash of the checkpoint: another one of the same name is another search.
        text: raw text, or a folder of binarised data.
        prices: milliseconds by sublayer, if the user gives them.
    """

    checkpoint: str
    weights: str
    text: str
    budgets: tuple[float, ...] = option(
        (0.5, 0.6, 0.7, 0.8, 0.9),
        "Shares of the model's latency.",
        low=0,
        is_open=True,
        high=0.999,
        metavar="SHARE,...",
    )
    candidates: tuple[str, ...] = option(
        (),
        "Sublayers that may replace another, as in a pattern, and identity.",
        shown="every kind that takes its weights, windows of a sixteenth, an eighth and a quarter of the longest "
        "input, identity",
    )
    tokens: int = option(32_768, "Tokens of TEXT that losses are measured on.", low=1)
    top: int = option(4, "Patterns of each budget that are measured per round.", low=1)
    prices: Optional[dict[str, float]] = None
    latency_tokens: Optional[int] = option(None, "Tokens of a sequence.", low=1, shown="the longest the model reads")
    seed: int = option(1, "Seed of weights that start fresh.", low=0)


def candidate_name(sublayer: PlannedSublayer) -> str:
    """Return a sublayer as in ``--candidates``; ``identity`` by its name, because a dash is easy to overlook."""
    if sublayer.kind.is_identity:
        return sublayer.kind.name
    return sublayer.text


def read_candidates(words: tuple[str, ...]) -> tuple[str, ...]:
    """Return candidates such as ``("s", "f", "identity")``, in the order of the table of kinds.

    Raises:
        UserError: an unknown one, fewer than two, or one that reads what no other hands on.
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
        raise UserError(f"--candidates {text}: with fewer than two there is nothing to choose")
    return names


def read_sublayers(words: Sequence[str]) -> list[PlannedSublayer]:
    """Read candidates as written in a pattern, or by name, each once.

    Raises:
        UserError: one is no sublayer.
    """
    text = ",".join(words)
    found = {}
    for name in divided(text):
        try:
            candidate = read_sublayer(name)
        except UserError as error:
            raise UserError(f"--candidates {text}: {error}") from None
        found[candidate.text] = candidate
    return list(found.values())


def choose_baseline(pattern: Optional[str], sublayers: Optional[int], default_sublayers: int) -> str:
    """Return the baseline's letters: as given, else attention and feed-forward in turn, the paper's baseline.

    Without a number of `sublayers` it has as many as the arch, `default_sublayers`.

    Raises:
        UserError: the numbers do not fit together, or no such baseline exists.
    """
    if pattern is not None:
        letters = expand(pattern)
        length = len(split_sublayers(letters))
        if sublayers is not None and length != sublayers:
            raise UserError(
                f"--baseline-pattern {pattern!r} has {length} sublayers, but --sublayers {sublayers} are to be "
                "searched; the two are compared, so give equal numbers, or leave --sublayers out"
            )
        return letters
    if sublayers is None:
        sublayers = default_sublayers
    if sublayers < 1:
        raise UserError(f"--sublayers {sublayers}: a search needs at least one layer")
    if sublayers % 2:
        raise UserError(
            f"--sublayers {sublayers}: the baseline (sf)x{max(sublayers // 2, 1)} cannot have an odd number of "
            "sublayers; give an even one, or a --baseline-pattern of as many"
        )
    return "sf" * (sublayers // 2)
