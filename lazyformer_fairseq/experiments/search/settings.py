"""What decides a search's result; kept in its folder, so that a second run resumes only the same search."""

import re
from dataclasses import dataclass, field
from typing import Optional

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.patterns.grammar import PlannedSublayer, expand, producers, read_sublayer, split_sublayers
from lazyformer_fairseq.patterns.kinds import kinds


@dataclass(frozen=True)
class Schedule:
    """PAR Transformer, section 2.2; the temperature is FBNet's, which the paper follows.

    Attributes:
        constant_updates: of weights alone, before the first architecture stage.
        max_updates: of both kinds together.
        temperature: of the Gumbel-softmax at first.
        final_temperature: at `max_updates`.
        unchanged_share: of an architecture stage's updates; this many in a row without a new pattern end the search.
    """

    constant_updates: int = 10_000
    max_updates: int = 50_000
    temperature: float = 5.0
    final_temperature: float = 0.087
    unchanged_share: float = 0.75

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
    """One option of `lazyformer search` each. Defaults are those of PAR Transformer, section 2.2, where it names them.

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
    candidates: tuple[str, ...] = ("s", "f", "identity")
    schedule: Schedule = field(default_factory=Schedule)
    architecture_share: float = 0.2
    batch_size: int = 128
    weights_lr: float = 1e-2
    weights_decay: float = 1e-4
    clip_norm: float = 0.25
    architecture_lr: float = 1e-2
    architecture_decay: float = 5e-4
    latency_price: float = 0.0
    latency_budget: float = 0.0
    prices: Optional[dict[str, float]] = None
    latency_tokens: Optional[int] = None
    latency_memory: Optional[int] = None
    seed: int = 1
    device: str = "cpu"
    fairseq_options: tuple[str, ...] = ()
    log_interval: int = 100

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
