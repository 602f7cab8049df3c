"""What decides a search's result; kept in its folder, so that a second run resumes only the same search."""

from dataclasses import asdict, dataclass, field
from typing import Any, Optional

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.patterns.grammar import expand, read_sublayer, split_sublayers
from lazyformer_fairseq.search.schedule import Schedule
from lazyformer_fairseq.search.supernet.choices import read_candidates


@dataclass(frozen=True)
class SearchSettings:
    """Defaults are those of PAR Transformer, section 2.2, where it names them.

    Attributes:
        data: what the task reads.
        task: ``masked-lm`` or ``language-model``.
        arch: a named architecture, for its sizes; the search replaces its pattern.
        baseline: written-out pattern to compare with; it has as many sublayers as there are layers.
        candidates: of each layer.
        schedule: of updates and temperature.
        architecture_share: of the training data, held apart for the architecture's updates.
        batch_size: sequences or streams per update.
        weights_lr, weights_decay: of LAMB.
        clip_norm: of the weights' gradient; 0 for none.
        architecture_lr, architecture_decay: of Adam.
        latency_price: nats per prediction for one baseline's latency.
        latency_budget: share of the baseline's latency that is free.
        prices: milliseconds by kind, if the user gives them.
        latency_tokens, latency_memory: of the sequence for measuring latency; None for the training's.
        seed: for everything.
        device: ``cpu`` or ``cuda``.
        fairseq_options: of task and model, as given.
        log_interval: updates between lines of the history.
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
        """Raises UserError if values do not fit together."""
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

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"candidates": list(self.candidates), "fairseq_options": list(self.fairseq_options)}


def choose_baseline(pattern: Optional[str], sublayers: Optional[int], default_sublayers: int) -> str:
    """The baseline's letters: as given, else attention and feed-forward in turn, the paper's baseline.

    Args:
        pattern: of the baseline, or None.
        sublayers: layers to search, or None: as many as the baseline, else `default_sublayers`, have.
        default_sublayers: of the arch.

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
