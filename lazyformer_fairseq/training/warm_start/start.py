"""Warm starts: a new encoder initialized from a trained one, and a record of which sublayer came from which.

The record is written to ``warm_start.json`` and, in human-readable form, to ``warm_start.md`` in the new model's
folder.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Optional

import torch
from torch import Tensor

from lazyformer_fairseq.errors import UserError, whole_number
from lazyformer_fairseq.evaluation.loading import model_of
from lazyformer_fairseq.evaluation.match import POSITION_EMBEDDINGS
from lazyformer_fairseq.modules.networks.masked_lm import MaskedLM
from lazyformer_fairseq.modules.networks.options import MaskedLMOptions
from lazyformer_fairseq.modules.sublayers.attention import AttentionSublayer
from lazyformer_fairseq.modules.sublayers.convolution import Convolution
from lazyformer_fairseq.modules.sublayers.feed_forward import Experts, FeedForward, ResidualSublayer
from lazyformer_fairseq.modules.sublayers.recurrent import Recurrent
from lazyformer_fairseq.patterns.grammar import PlannedSublayer, plan, producer_indices
from lazyformer_fairseq.patterns.kinds import ENCODER
from lazyformer_fairseq.report.tables import markdown_table
from lazyformer_fairseq.storage.atomic import write_text
from lazyformer_fairseq.storage.json_files import write_json
from lazyformer_fairseq.training.warm_start.weights import INNER, Old, Taken, Weights, carry_norms, take

RECORD_FILE = "warm_start.json"
PAGE_FILE = "warm_start.md"


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Write ``warm_start.json`` and ``warm_start.md`` into a folder."""
    write_json(folder / RECORD_FILE, record)
    write_text(folder / PAGE_FILE, page(record))


def page(record: Mapping[str, Any]) -> str:
    """Format a warm start's record as a Markdown page."""
    rows = []
    for index, sublayer in enumerate(record["sublayers"]):
        was = "none" if sublayer["from"] is None else f"`{sublayer['was']}` {sublayer['from']}"
        rows.append(
            {
                "": str(index),
                "sublayer": f"`{sublayer['sublayer']}`",
                "was": was,
                "kept": ", ".join(sublayer["kept"]),
                "borrowed": ", ".join(sublayer["borrowed"]),
                "reads": "" if sublayer["reads"] is None else str(sublayer["reads"]),
            }
        )
    parts = [
        f"# Warm start of {record['source']}".removesuffix(" of "),
        f"`{record['old_pattern']}` became `{record['new_pattern']}`.",
    ]
    for name, (old, new) in record["changed_options"].items():
        parts.append(f"- `--{name.replace('_', '-')}`: {old} became {new}")
    parts.append(markdown_table(rows, left=("sublayer", "was", "kept", "borrowed")))
    if record["left_out"]:
        parts.append(f"The weights of these old sublayers are not used: {', '.join(map(str, record['left_out']))}.")
    if losses := record["losses"]:
        before = losses["before"]
        after = losses["after"]
        parts.append(
            f"Before any further training, the masked-LM loss on {losses['tokens']:,} tokens with a fixed mask is "
            f"{before:.3f} bits before the change and {after:.3f} bits after it ({after - before:+.3f})."
        )
    return "\n\n".join(parts) + "\n"


SUBLAYERS = "encoder.sentence_encoder.sublayers."
RESIZED = ("encoder_ffn_embed_dim", "max_positions")
Plan = Sequence[PlannedSublayer]
Alignment = tuple[Optional[int], ...]

NONE = "-"  # stands for "no old sublayer" in --from-sublayers


@dataclass(frozen=True)
class Trained:
    """A trained encoder.

    Attributes:
        cfg: the encoder's options.
        dictionary: the encoder's dictionary.
        weights: the weights, under their names in :class:`~lazyformer_fairseq.modules.networks.masked_lm.MaskedLM`.
    """

    cfg: MaskedLMOptions
    weights: Weights
    dictionary: Any

    @property
    def plan(self) -> tuple[PlannedSublayer, ...]:
        """The sublayers in the encoder's pattern."""
        return plan(self.cfg.sublayer_pattern, ENCODER)

    def build(self) -> MaskedLM:
        """Build the model in evaluation mode without classification heads, on the GPU if available."""
        model = model_of(self.cfg, self.dictionary)
        model.load_state_dict({name: self.weights[name] for name in model.state_dict()})
        return model.eval().to("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class WarmStart:
    """A new encoder initialized from an old one, before any further training.

    Attributes:
        new: the new encoder.
        record: the origins of all sublayers and the changed options; see docs/huggingface.md.
    """

    new: Trained
    record: dict[str, Any]


def start_from(
    old: Trained,
    changes: Mapping[str, Any],
    from_sublayers: Optional[Sequence[str]] = None,
    seed: int = 1,
) -> WarmStart:
    """Build a new encoder with the weights of an old one.

    Args:
        old: the encoder to start from.
        changes: new values for any of `sublayer_pattern`, `encoder_ffn_embed_dim` and `max_positions`. The hidden size,
            the number of heads, and the choice between pre-norm and post-norm cannot change, because the old weights
            would not fit.
        from_sublayers: for each new sublayer, the index of the old sublayer to initialize it from, or "-" for none. By
            default :func:`align` chooses the old sublayers.
        seed: the seed for newly initialized weights.

    Raises:
        UserError: the pattern cannot be built, the new model has fewer positions or narrower feed-forward sublayers, or
            a new sublayer can neither use old weights nor be added without changing the model's output.
    """
    before = asdict(old.cfg)
    cfg = replace(old.cfg, **changes)
    after = asdict(cfg)

    new_plan = plan(cfg.sublayer_pattern, ENCODER)
    if from_sublayers is None:
        alignment = align(old.plan, new_plan)
    else:
        alignment = parse_alignment(from_sublayers, old.plan, new_plan)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model = model_of(cfg, old.dictionary)
        except ValueError as error:
            raise UserError(f"--sublayer-pattern {cfg.sublayer_pattern}: {error}") from error

    taken = [_take(index, origin, old, model, new_plan[index]) for index, origin in enumerate(alignment)]
    weights = _around(old, cfg)
    for index, part in enumerate(taken):
        weights |= {f"{SUBLAYERS}{index}.{name}": weight for name, weight in part.weights.items()}
    if not cfg.encoder_normalize_before:
        weights |= carry_norms(old.weights, weights, alignment, old.plan, new_plan)
    _keep_ties(weights, model)

    reads = producer_indices(new_plan)
    sublayers = [
        {
            "sublayer": planned.text,
            "from": origin,
            "was": None if origin is None else old.plan[origin].text,
            "reads": reads[index],
            "kept": part.kept,
            "borrowed": part.borrowed,
            "dropped": part.dropped,
            "new": part.new,
        }
        for index, (planned, origin, part) in enumerate(zip(new_plan, alignment, taken, strict=True))
    ]

    changed_options = {name: [before[name], after[name]] for name in RESIZED if before[name] != after[name]}
    record = {
        "source": "",
        "old_pattern": "".join(planned.text for planned in old.plan),
        "new_pattern": "".join(planned.text for planned in new_plan),
        "changed_options": changed_options,
        "sublayers": sublayers,
        "left_out": left_out(old.plan, alignment),
        "losses": None,
    }
    return WarmStart(Trained(cfg, weights, old.dictionary), record)


def _take(index: int, origin: Optional[int], old: Trained, model: MaskedLM, planned: PlannedSublayer) -> Taken:
    """Return a new sublayer's weights.

    A sublayer without an old one to start from is initialized randomly, but its last linear layer is set to zero. It
    therefore adds nothing to the residual stream until it is trained.
    """
    if planned.kind.is_identity:
        return Taken({})
    sublayer = model.encoder.sentence_encoder.sublayers[index]
    assert isinstance(sublayer, ResidualSublayer)
    if origin is not None:
        return take(planned, sublayer, _old(origin, old))
    if (last := _last_map(type(sublayer.inner))) is None:
        raise UserError(
            f"new sublayer {index} ({planned.text}) has no old one to start from, and initializing it from scratch "
            f"would change the model's output: name an old {planned.kind.letter} sublayer in --from-sublayers, or omit "
            "this sublayer"
        )
    experts = int(planned.values.get("experts", 0))
    last_maps = (f"{INNER}{last}", *(f"{INNER}experts.{number}.{last}" for number in range(experts)))
    fresh = {}
    for name, weight in sublayer.state_dict().items():
        if name.startswith(last_maps):
            fresh[name] = torch.zeros_like(weight)
        else:
            fresh[name] = weight.clone()
    return Taken(fresh, new=sorted(fresh))


def _old(index: int, old: Trained) -> Old:
    """Return an old sublayer and the sublayer that it reads from, if any."""
    prefix = f"{SUBLAYERS}{index}."
    weights = {name.removeprefix(prefix): weight for name, weight in old.weights.items() if name.startswith(prefix)}
    producer = producer_indices(old.plan)[index]
    return Old(old.plan[index], weights, None if producer is None else _old(producer, old))


def can_start_fresh(planned: PlannedSublayer) -> bool:
    """Return True if a newly initialized sublayer can be made to add nothing to the residual stream."""
    return _last_map(planned.kind.module(ENCODER)) is not None


def _last_map(module: type) -> Optional[str]:
    last = dict.fromkeys((AttentionSublayer, Convolution, Recurrent), "out_proj.")
    last |= dict.fromkeys((FeedForward, Experts), "fc2.")
    return next((name for base, name in last.items() if issubclass(module, base)), None)


def _around(old: Trained, cfg: MaskedLMOptions) -> dict[str, Tensor]:
    """Return the weights outside the sublayers (embeddings, biases, norms, heads), repeating positions as needed."""
    weights = {name: weight.clone() for name, weight in old.weights.items() if not name.startswith(SUBLAYERS)}
    if POSITION_EMBEDDINGS not in weights:
        return weights
    found = weights[POSITION_EMBEDDINGS].size(0)
    own = cfg.max_positions
    if found > own:
        raise UserError(f"--max-positions {own}: the old model has {found}; use {found} or more")
    repeats = math.ceil(own / found)
    weights[POSITION_EMBEDDINGS] = weights[POSITION_EMBEDDINGS].repeat(repeats, 1)[:own]  # Longformer, section 5
    return weights


def _keep_ties(weights: dict[str, Tensor], model: MaskedLM) -> None:
    """Set weights that the model ties, such as projections shared between layers, to the first of the tied values."""
    first: dict[int, Tensor] = {}
    for name, weight in model.state_dict().items():
        if name.startswith(SUBLAYERS) and weight.numel():
            weights[name] = first.setdefault(weight.data_ptr(), weights[name])


def align(old: Plan, new: Plan) -> Alignment:
    """Return, for each new sublayer, the index of the old one that it is initialized from, or None.

    The alignment keeps the order of both patterns and uses each old sublayer at most once. Among such alignments, it
    has the largest number of pairs. Ties are broken by the largest total :func:`likeness`, then by the smallest sum of
    squared differences in relative depth (from 0 to 1). The alignment is found by dynamic programming.
    """
    rows = _with_weights(old)
    columns = _with_weights(new)
    nothing = (0, 0, 0)  # the number of pairs, their total likeness, and minus their total difference in depth
    best = [[nothing] * (len(columns) + 1) for _ in range(len(rows) + 1)]
    paired: dict[tuple[int, int], bool] = {}
    for i, row in enumerate(rows, 1):
        for j, column in enumerate(columns, 1):
            skipped = max(best[i - 1][j], best[i][j - 1])
            alike = likeness(old[row], new[column])
            old_depth = (2 * i - 1) * len(columns)
            new_depth = (2 * j - 1) * len(rows)
            one_more = nothing
            if alike:
                one_more = (1, alike, -((old_depth - new_depth) ** 2))
            pairs, likenesses, depths = best[i - 1][j - 1]
            together = (pairs + one_more[0], likenesses + one_more[1], depths + one_more[2])
            paired[i, j] = bool(alike) and together >= skipped
            best[i][j] = max(together, skipped)

    found: list[Optional[int]] = [None] * len(new)
    i = len(rows)
    j = len(columns)
    while i and j:
        if paired[i, j]:
            i -= 1
            j -= 1
            found[columns[j]] = rows[i]
        elif best[i - 1][j] >= best[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return tuple(found)


def likeness(old: PlannedSublayer, new: PlannedSublayer) -> int:
    """Return a similarity score for two sublayers, from 0 to 3.

    The score is 3 if their letters and settings are the same, 2 if only the letters are, 1 for two different kinds of
    attention, and 0 otherwise.
    """
    if old.kind is new.kind:
        if old.settings == new.settings:
            return 3
        return 2
    are_attention = all(issubclass(each.kind.module(ENCODER), AttentionSublayer) for each in (old, new))
    return int(are_attention)


def parse_alignment(words: Sequence[str], old: Plan, new: Plan) -> Alignment:
    """Parse the value of ``--from-sublayers`` as an alignment.

    Args:
        words: for each new sublayer, the index of an old one, from 0, or "-".
        old: the old sublayers.
        new: the new sublayers.

    Raises:
        UserError: the number of words differs from the number of new sublayers, a word is not the index of an old
            sublayer, or an old sublayer's weights do not fit the new one.
    """
    if len(words) != len(new):
        raise UserError(
            f"--from-sublayers: must have one entry for each of the new pattern's {len(new)} sublayers, but has "
            f"{len(words)}"
        )
    found: list[Optional[int]] = []
    for place, (word, planned) in enumerate(zip(words, new, strict=True)):
        number = whole_number(word)
        if word != NONE and (number is None or number >= len(old)):
            raise UserError(
                f"--from-sublayers: {word!r} must be a sublayer's index in the old pattern, from 0 to "
                f"{len(old) - 1}, or -"
            )
        if planned.kind.is_identity:
            found.append(None)
            continue
        if number is not None and not likeness(old[number], planned):
            raise UserError(
                f"--from-sublayers: new sublayer {place} ({planned.text}) cannot use the weights of old sublayer "
                f"{number} ({old[number].text}); name a different old one, or use - to initialize the new one from "
                "scratch"
            )
        found.append(number)
    return tuple(found)


def left_out(old: Plan, alignment: Alignment) -> list[int]:
    """Return the indices of old sublayers with weights that no new sublayer uses."""
    return [index for index in _with_weights(old) if index not in alignment]


def _with_weights(plan: Plan) -> list[int]:
    return [index for index, planned in enumerate(plan) if not planned.kind.is_identity]
