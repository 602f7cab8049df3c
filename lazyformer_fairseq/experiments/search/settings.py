"""What decides a search's result, and its commands take; kept in its folder, so that only the same search resumes."""

import re
from dataclasses import dataclass, field
from typing import Any, Optional

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.options import check, option
from lazyformer_fairseq.patterns.grammar import PlannedSublayer, expand, producers, read_sublayer, split_sublayers
from lazyformer_fairseq.patterns.kinds import describe_letters, kinds

FRONTS_PRICE = 1.0  # of latency, nats, unless the user gives another
# Task, criterion, and the model whose architectures fit them.
TASKS = {
    "masked-lm": ("full_sentences_masked_lm", "masked_lm_accuracy", "lazyformer"),
    "language-model": ("stream_language_modeling", "causal_lm", "lazyformer_lm"),
}


def a_rate(default: float, help: str, *flags: str) -> Any:
    """An option above 0."""
    return option(default, help, *flags, low=0, is_open=True)


def share(text: str) -> float:
    """Raises a UserError for what is no number."""
    try:
        return float(text)
    except ValueError:
        raise UserError(f"{text}: give shares of the baseline's latency, such as 0.5,0.75,1.0") from None


def share_below_1(text: str) -> float:
    """Raises a UserError for what is no share of a model that is to be faster."""
    found = share(text)
    if not 0 < found < 1:
        raise UserError(f"{text}: a share of the model's latency is above 0 and below 1")
    return found


@dataclass(frozen=True)
class Schedule:
    """PAR Transformer, section 2.2; the temperature is FBNet's, which the paper follows.

    The pattern is found when it has not changed for `unchanged_share` of an architecture stage's updates in a row.
    """

    constant_updates: int = option(10_000, "Updates of weights alone, before the architecture's first stage.", low=0)
    max_updates: int = option(
        50_000,
        "Updates of weights and architecture together; of a front: its cost with all evaluations, in updates of the "
        "baseline, by FLOPs.",
        low=1,
    )
    temperature: float = a_rate(5.0, "Of the Gumbel-softmax, until the architecture learns.")
    final_temperature: float = a_rate(0.087, "At the last update; exponential decay from --constant-updates on.")
    unchanged_share: float = a_rate(0.75, "Architecture stages without a change after which the pattern is found.")

    def temperature_at(self, update: int) -> float:
        """Constant while the architecture is, then exponential decay."""
        decaying = self.max_updates - self.constant_updates
        share = max(update - self.constant_updates, 0) / decaying
        return self.temperature * (self.final_temperature / self.temperature) ** share

    def is_converged(self, unchanged: int, stage_updates: int) -> bool:
        """Whether `unchanged` architecture updates in a row suffice; a stage has `stage_updates`."""
        return unchanged >= self.unchanged_share * stage_updates

    def first_architecture_update(self, weights_updates: int) -> int:
        """Weights updates before the first architecture update; a stage of weights has `weights_updates`."""
        stages = -(-self.constant_updates // weights_updates)
        return max(stages, 1) * weights_updates


@dataclass(frozen=True)
class SearchSettings:
    """Of `lazyformer search`. Defaults are those of PAR Transformer, section 2.2, where it names them.

    Attributes:
        baseline: written-out pattern to compare with; it has as many sublayers as there are layers.
        prices: milliseconds by kind, if the user gives them.
        latency_tokens, latency_memory: None for the training's.
        fairseq_options: of task and model, as given.

    Raises:
        UserError: values that do not fit together.
    """

    data: str
    task: str
    arch: str
    baseline: str
    candidates: tuple[str, ...] = option(
        ("s", "f", "identity"), f"What a layer chooses from: {describe_letters()}; settings in brackets."
    )
    schedule: Schedule = field(default_factory=Schedule)
    batch_size: int = option(128, "Sequences, or streams of text, an update.", low=1)
    architecture_share: float = a_rate(0.2, "Share of the training data that is held apart for the architecture.")
    weights_lr: float = a_rate(1e-2, "LAMB's learning rate.")
    weights_decay: float = option(1e-4, "LAMB's weight decay.", low=0)
    clip_norm: float = option(0.25, "Longest gradient of the weights; 0 for any.", low=0)
    architecture_lr: float = a_rate(1e-2, "Adam's learning rate.")
    architecture_decay: float = option(5e-4, "Adam's weight decay.", low=0)
    latency_price: float = option(
        0.0,
        "Nats a prediction that the architecture pays for one baseline's latency.",
        low=0,
        shown=f"0.0; of a front {FRONTS_PRICE}",
    )
    latency_budget: float = option(0.0, "Share of the baseline's latency that is free.", low=0)
    prices: Optional[dict[str, float]] = None
    latency_tokens: Optional[int] = option(None, "Tokens that latency is measured with.", low=1, shown="the training's")
    latency_memory: Optional[int] = option(None, "Tokens remembered then.", low=0, shown="the model's --mem-len")
    seed: int = option(1, "Of weights, data and choices.")
    device: str = "cpu"
    fairseq_options: tuple[str, ...] = ()
    log_interval: int = option(100, "Updates between lines of the history.", low=1)

    def __post_init__(self):
        read_candidates(",".join(self.candidates))
        if self.schedule.max_updates <= self.schedule.constant_updates:
            raise UserError(
                f"--max-updates {self.schedule.max_updates}: must be more than the {self.schedule.constant_updates} of "
                "--constant-updates, for until then the architecture stays as it is"
            )

    @property
    def layers(self) -> int:
        return len(split_sublayers(self.baseline))

    @property
    def priced(self) -> list[str]:
        """The sublayers in candidates and baseline, without identity; each once."""
        names = [*self.candidates, *split_sublayers(self.baseline)]
        return sorted({name for name in names if not read_sublayer(name).kind.is_identity})


@dataclass(frozen=True)
class Method:
    """A row of METHODS.

    Attributes:
        help: one line.
        source: where it comes from.
        trains_mixtures: whether an update of the weights trains mixtures of all candidates, whose architecture is then
            trained too, or one random pattern.
    """

    help: str
    source: str
    trains_mixtures: bool = False


# How a search spends its evaluations once the supernet is trained.
METHODS = {
    "gradient": Method(
        "architecture's parameters for each budget, learned by gradient descent; then patterns drawn from them",
        "PAR Transformer, section 2; FBNet",
        trains_mixtures=True,
    ),
    "random": Method(
        "patterns drawn uniformly between each budget and the one below", "Li and Talwalkar, 2019, arXiv 1902.07638"
    ),
    "evolution": Method(
        "children of the best of a few of the youngest patterns",
        "Real et al., 2019, arXiv 1802.01548; Guo et al., 2020, arXiv 1904.00420",
    ),
    "greedy": Method("from the baseline on, the best of a few single changes at a time", "ours"),
}
CONTROL = "random"


def describe_methods() -> str:
    """``gradient: ...; random: ...`` for help texts."""
    return "; ".join(f"{name}: {method.help}" for name, method in METHODS.items())


@dataclass(frozen=True)
class FrontSettings:
    """Of a front, beside the settings of the search itself.

    Raises:
        UserError: values out of range.
    """

    method: str = option("gradient", f"{describe_methods()}.", choices=list(METHODS))
    budgets: tuple[float, ...] = option(
        (0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
        "A front: a pattern for each of these shares of the baseline's latency.",
        parse=share,
        metavar="SHARE,...",
        shown="0.5,0.6,0.7,0.8,0.9,1.0; with --method gradient none, one pattern instead",
    )
    evaluations: int = option(96, "Of a front: patterns that are judged with inherited weights.", low=1)
    judged_batches: int = option(8, "Of a front: batches of held-apart data that judge a pattern.", low=1)
    check_patterns: int = option(12, "Of a front: patterns whose latency is predicted and measured; or 0.", low=0)
    control: bool = option(True, "Of a front: random search of the same cost beside the method.")

    def __post_init__(self):
        check(self)
        if not self.budgets or min(self.budgets) <= 0 or len(set(self.budgets)) < len(self.budgets):
            raise UserError(
                f"--budgets {','.join(map(str, self.budgets))}: give shares of the baseline's latency above 0, each "
                "once, such as 0.5,0.6,0.7,0.8,0.9,1.0"
            )
        if self.evaluations < len(self.budgets):
            raise UserError(
                f"--evaluations {self.evaluations}: give one for each of {len(self.budgets)} budgets at least"
            )
        if self.check_patterns in (1, 2):
            raise UserError(
                f"--check-patterns {self.check_patterns}: a rank correlation needs 3 or more, or 0 for none"
            )

    @property
    def trains_mixtures(self) -> bool:
        return METHODS[self.method].trains_mixtures

    @property
    def has_control(self) -> bool:
        return self.control and self.method != CONTROL


@dataclass(frozen=True)
class FrontSearch(SearchSettings):
    """A search for a front, as its folder keeps it."""

    front: FrontSettings = field(default_factory=FrontSettings)


@dataclass(frozen=True)
class TrainSettings:
    """What is trained from scratch when a front is found; may be given, or given anew, after the search."""

    updates: int = option(
        0, "Of a front: updates from scratch of each pattern found, and of the control's.", "--train-updates", low=0
    )
    patterns: int = option(
        0,
        "Of those whose latency is checked: trained too, with the first seed, to compare with inherited losses.",
        "--train-patterns",
        low=0,
    )
    rate: float = a_rate(1e-3, "Adam's highest learning rate then.", "--train-lr")
    seeds: tuple[int, ...] = option((1,), "That train each pattern.", "--train-seeds", metavar="N,N,...")

    def __post_init__(self):
        if self.patterns and not self.updates:
            raise UserError(f"--train-patterns {self.patterns}: give --train-updates too")
        if self.patterns in (1, 2):
            raise UserError(f"--train-patterns {self.patterns}: a rank correlation needs 3 or more; 0 for none")


@dataclass(frozen=True)
class Recipe:
    """How patterns learn from scratch: Adam, a warm-up over a tenth of the updates, linear decay to zero.

    Attributes:
        updates: of each pattern and seed.
        rate: the highest one.
        seeds: each trains every pattern.
        fairseq_options: of task and model.
    """

    data: str
    task: str
    arch: str
    updates: int = option(2000, "Of each training.", low=1)
    rate: float = a_rate(1e-3, "Adam's highest learning rate.", "--lr")
    batch_size: int = option(32, "Sequences, or streams of text, an update.", low=1)
    seeds: tuple[int, ...] = (1,)
    device: str = "cpu"
    fairseq_options: tuple[str, ...] = ()
    valid_tokens: int = option(32_768, "Of the validation split, its first.", low=1)


@dataclass(frozen=True)
class OrdersSettings:
    """What `lazyformer search orders` draws."""

    sublayers: int = option(16, "Of each order, half of them s and half f.", low=1)
    orders: int = option(20, "Random orders of as many s as f.", low=1)
    balances: int = option(0, "Random orders of equal parameters, whatever the numbers.", low=0)
    sandwich: tuple[int, ...] = option(
        (2, 4, 6), "Sandwich's orders beside them: K times s, the rest in turn, K times f.", metavar="K,K,..."
    )
    baseline_seeds: int = option(5, "Trainings of the interleaved order: how far seeds alone go apart.", low=1)
    seed: int = option(1, "Of what is drawn, and of the trainings.")


@dataclass(frozen=True)
class CompressSettings:
    """Of `lazyformer search compress`.

    Attributes:
        weights: hash of the checkpoint: another one of the same name is another search.
        text: raw text, or a folder of binarised data.
        heads: always "plain"; a search with matched heads, which went, cannot go on.
        prices: milliseconds by kind, if the user gives them.
    """

    checkpoint: str
    weights: str
    text: str
    budgets: tuple[float, ...] = option(
        (0.5, 0.6, 0.7, 0.8, 0.9), "Shares of the model's latency.", parse=share_below_1, metavar="SHARE,..."
    )
    candidates: tuple[str, ...] = option(
        (),
        "What a sublayer may become, as in a pattern, and identity.",
        shown="every kind that takes its weights, windows of a sixteenth, an eighth and a quarter of the longest "
        "input, identity",
    )
    tokens: int = option(32_768, "Of TEXT, that losses are measured on.", low=1)
    reach: int = option(4, "An l or k may read from so many s below, the nearest first.", low=1)
    top: int = option(4, "Patterns of each budget that are measured in a round.", low=1)
    rounds: int = option(2, "From the second on, the changes of the best patterns are scored where they stand.", low=1)
    control: Optional[int] = option(
        None, "Random patterns of each budget.", low=0, shown="in all as many as the search measures"
    )
    heads: str = "plain"
    prices: Optional[dict[str, float]] = None
    latency_tokens: Optional[int] = option(None, "Of a sequence.", low=1, shown="the longest the model reads")
    seed: int = option(1, "Of random patterns, and of weights that start fresh.")


def candidate_name(sublayer: PlannedSublayer) -> str:
    """As in ``--candidates``: letter and settings; ``identity`` by its name, because a dash is easy to overlook."""
    return sublayer.kind.name if sublayer.kind.is_identity else sublayer.text


def read_candidates(text: str) -> tuple[str, ...]:
    """``"s,f,identity"`` as the candidates, in the order of the table of kinds; commas in brackets do not separate.

    Raises:
        UserError: an unknown one, fewer than two, or one that reads what no other hands on.
    """
    given = [_read(name.strip(), text) for name in re.split(r",(?![^\[]*\])", text) if name.strip()]
    handed_on = {what for candidate in given for what in candidate.kind.hands_on}
    for candidate in given:
        if candidate.kind.reads and candidate.kind.reads not in handed_on:
            letters = producers(candidate.kind.reads)
            raise UserError(
                f"--candidates {text}: {candidate.text} reuses the {candidate.kind.reads} of an {letters} below it; "
                f"add {letters}"
            )
    in_order = sorted(given, key=lambda candidate: kinds().index(candidate.kind))
    names = tuple(dict.fromkeys(candidate_name(candidate) for candidate in in_order))
    if len(names) < 2:
        raise UserError(f"--candidates {text}: with fewer than two there is nothing to choose")
    return names


def _read(name: str, text: str) -> PlannedSublayer:
    try:
        return read_sublayer(name)
    except UserError as error:
        known = ", ".join(candidate_name(PlannedSublayer(kind)) for kind in kinds())
        raise UserError(f"--candidates {text}: unknown {name!r}; choose from {known}\n{error}") from None


def choose_baseline(pattern: Optional[str], sublayers: Optional[int], default_sublayers: int) -> str:
    """The baseline's letters: as given, else attention and feed-forward in turn, the paper's baseline.

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
    sublayers = default_sublayers if sublayers is None else sublayers
    if sublayers < 1:
        raise UserError(f"--sublayers {sublayers}: a search needs at least one layer")
    if sublayers % 2:
        raise UserError(
            f"--sublayers {sublayers}: the baseline (sf)x{max(sublayers // 2, 1)} cannot have an odd number of "
            "sublayers; give an even one, or a --baseline-pattern of as many"
        )
    return "sf" * (sublayers // 2)
