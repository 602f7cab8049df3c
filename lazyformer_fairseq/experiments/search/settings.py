"""What decides a search's result, and its commands take; kept in its folder, so that only the same search resumes."""

from dataclasses import dataclass
from typing import Optional

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.options import check, divided, option
from lazyformer_fairseq.patterns.grammar import PlannedSublayer, expand, producers, read_sublayer, split_sublayers
from lazyformer_fairseq.patterns.kinds import describe_letters, kinds

TASKS = ("masked-lm", "language-model")
BUDGETS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)  # of a front, unless others are given
CONTROL = "random"

# How a search spends its evaluations once the supernet is trained. The architecture's parameters are PAR Transformer's,
# section 2, and FBNet's; random search is Li and Talwalkar's (2019, arXiv 1902.07638); evolution is of Real et al.
# (2019, arXiv 1802.01548) and Guo et al. (2020, arXiv 1904.00420).
GRADIENT = "gradient"
METHODS = {
    GRADIENT: "architecture's parameters for each budget, learned by gradient descent; then patterns drawn from them",
    CONTROL: "patterns drawn uniformly between each budget and the one below",
    "evolution": "children of the best of a few of the youngest patterns",
}


@dataclass(frozen=True)
class SearchSettings:
    """Of `lazyformer search`. Defaults are those of PAR Transformer, section 2.2, where it names them.

    Attributes:
        baseline: written-out pattern to compare with; it has as many sublayers as there are layers.
        budgets: empty for one pattern of any latency, which gradient descent alone finds.
        prices: milliseconds by kind, if the user gives them.
        latency_tokens: None for the training's.
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
    method: str = option(GRADIENT, f"{'; '.join(map(': '.join, METHODS.items()))}.", choices=list(METHODS))
    budgets: tuple[float, ...] = option(
        (),
        "A front: a pattern for each of these shares of the baseline's latency.",
        low=0,
        is_open=True,
        metavar="SHARE,...",
        shown=f"{','.join(map(str, BUDGETS))}; with --method gradient none, one pattern instead",
    )
    max_updates: int = option(
        50_000,
        "What a front may cost with all evaluations, in updates of the baseline by FLOPs; of one pattern, updates of "
        "weights and architecture.",
        low=1,
    )
    constant_updates: int = option(10_000, "Of these, weights alone, before the architecture learns.", low=0)
    evaluations: int = option(96, "Of a front: patterns that are judged with inherited weights.", low=1)
    judged_batches: int = option(8, "Batches of held-apart data that judge a pattern.", low=1)
    control: bool = option(True, "Of a front: random search of the same cost beside the method.")
    batch_size: int = option(128, "Sequences, or streams of text, an update.", low=1)
    update_freq: Optional[int] = option(
        None,
        "Parts of an update, one after the other, of which memory holds one; each draws its own mixture.",
        low=1,
        shown="1",
    )
    weights_lr: float = option(1e-2, "LAMB's learning rate.", low=0, is_open=True)
    architecture_lr: float = option(1e-2, "Adam's learning rate.", low=0, is_open=True)
    latency_price: float = option(
        1.0, "Nats a prediction that the architecture pays for a baseline's latency beyond its budget.", low=0
    )
    latency_tokens: Optional[int] = option(None, "Tokens that latency is measured with.", low=1, shown="the training's")
    seed: int = option(1, "Of weights, data and choices.", low=0)
    prices: Optional[dict[str, float]] = None
    device: str = "cpu"
    fairseq_options: tuple[str, ...] = ()

    def __post_init__(self):
        check(self)
        read_candidates(self.candidates)
        if not self.trains_mixtures:  # they have no architecture that would wait
            object.__setattr__(self, "budgets", self.budgets or BUDGETS)
            object.__setattr__(self, "constant_updates", 0)
        if self.max_updates <= self.constant_updates:
            raise UserError(
                f"--max-updates {self.max_updates}: must be more than the {self.constant_updates} of "
                "--constant-updates, for until then the architecture stays as it is"
            )
        if self.batch_size % self.parts:
            raise UserError(f"--update-freq {self.parts}: does not divide --batch-size {self.batch_size}")
        if self.evaluations < len(self.budgets):
            raise UserError(
                f"--evaluations {self.evaluations}: give one for each of {len(self.budgets)} budgets at least"
            )

    @property
    def parts(self) -> int:
        """Of an update."""
        return self.update_freq or 1

    @property
    def trains_mixtures(self) -> bool:
        """Whether an update of the weights trains mixtures of all candidates, whose architecture is then trained too,
        or one random pattern."""
        return self.method == GRADIENT

    @property
    def layers(self) -> int:
        return len(split_sublayers(self.baseline))

    @property
    def priced(self) -> list[str]:
        """The sublayers in candidates and baseline, without identity; each once."""
        names = [*self.candidates, *split_sublayers(self.baseline)]
        return sorted({name for name in names if not read_sublayer(name).kind.is_identity})


@dataclass(frozen=True)
class CompressSettings:
    """Of `lazyformer search compress`.

    Attributes:
        weights: hash of the checkpoint: another one of the same name is another search.
        text: raw text, or a folder of binarised data.
        prices: milliseconds by kind, if the user gives them.
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
        "What a sublayer may become, as in a pattern, and identity.",
        shown="every kind that takes its weights, windows of a sixteenth, an eighth and a quarter of the longest "
        "input, identity",
    )
    tokens: int = option(32_768, "Of TEXT, that losses are measured on.", low=1)
    top: int = option(4, "Patterns of each budget that are measured in a round.", low=1)
    prices: Optional[dict[str, float]] = None
    latency_tokens: Optional[int] = option(None, "Of a sequence.", low=1, shown="the longest the model reads")
    seed: int = option(1, "Of weights that start fresh.", low=0)


def candidate_name(sublayer: PlannedSublayer) -> str:
    """As in ``--candidates``: letter and settings; ``identity`` by its name, because a dash is easy to overlook."""
    return sublayer.kind.name if sublayer.kind.is_identity else sublayer.text


def read_candidates(words: tuple[str, ...]) -> tuple[str, ...]:
    """``("s", "f", "identity")`` as the candidates, in the order of the table of kinds.

    Raises:
        UserError: an unknown one, fewer than two, or one that reads what no other hands on.
    """
    text = ",".join(words)
    given = [_read(name, text) for name in divided(text)]
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
