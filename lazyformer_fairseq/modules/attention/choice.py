"""Which back end computes an attention: the one that was asked for, or, for ``auto``, the fastest that was measured."""

import functools
import importlib.resources
import json
import logging
import math
import os
from typing import Any, NamedTuple

import torch

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.modules.attention import BACK_ENDS
from lazyformer_fairseq.modules.attention.fused import NOT_IN_TRITON, has_triton

logger = logging.getLogger(__name__)

AUTO = "auto"
BACKENDS = tuple(BACK_ENDS)
MEASURED = "measured.json"  # beside this file; `lazyformer bench backends` writes it
# Of a device's memory, what the distributions of all blocks may take under ``auto``.
SHARE_OF_MEMORY = 0.4
LARGEST_FUSED_HEAD = 128
LEARNED = frozenset({"bias", "positions"})  # features of scores that have gradients


class Situation(NamedTuple):
    """What decides in a forward pass.

    Attributes:
        device: type of the device.
        precision: of the activations.
        batch: B.
        heads: N.
        time: T, queries.
        keys: K.
        head_size: D.
        is_training: whether there will be gradients.
        features: of the scores, see :attr:`~lazyformer_fairseq.modules.attention.scores.Scores.features`.
        has_dropout: whether the distribution goes through dropout.
        blocks: sublayers of the network that make a distribution.
    """

    device: str
    precision: torch.dtype
    batch: int
    heads: int
    time: int
    keys: int
    head_size: int
    is_training: bool
    features: frozenset[str]
    has_dropout: bool
    blocks: int


def check_backend(name: str, attention_dropout: float) -> None:
    """Raises UserError for a name that is none, and for a back end without the dropout that is asked for."""
    if name not in (AUTO, *BACKENDS):
        raise UserError(f"--lazy-backend {name}: choose from {', '.join((AUTO, *BACKENDS))}")
    if name == "fused" and attention_dropout:
        raise UserError(
            f"--lazy-backend fused never writes the distribution that --attention-dropout {attention_dropout} would "
            "thin out: give --attention-dropout 0, or another back end"
        )


def choose(name: str, situation: Situation, readers: int) -> str:
    """The back end for an ``s`` with so many readers."""
    return choose_automatically(situation, readers) if name == AUTO else name


@functools.lru_cache(maxsize=1024)
def choose_automatically(situation: Situation, readers: int) -> str:
    """Chooses, and logs what and why, once for each situation."""
    name, why = _fastest(situation, readers)
    logger.info(
        "lazy back end: %s for %s at %d tokens on %s (%s)",
        name, f"blocks of {readers + 1}" if readers else "single layers", situation.time, situation.device, why,
    )  # fmt: skip
    return name


def _fastest(situation: Situation, readers: int) -> tuple[str, str]:
    """The back end and a reason."""
    if situation.has_dropout:
        learns = situation.is_training and not situation.features.isdisjoint(LEARNED)
        if readers and (situation.device == "cpu" or learns):
            return "eager", "attention dropout, which no fused kernel has"
        return "recompute", "attention dropout"
    possible = [name for name in BACKENDS if _is_possible(name, situation)]
    has_positions = "positions" in situation.features
    like_this = (situation.device, situation.is_training, "bias" in situation.features)
    rows = [
        row
        for row in (() if has_positions else measured_rows())
        if (row["device"], row["training"], row["biased"]) == like_this
        and not row["milliseconds"].keys().isdisjoint(possible)
    ]
    if not rows:  # then what has been used for long
        writes = bool(readers) if has_positions else "bias" in situation.features and situation.is_training
        trusted = ["eager", "recompute"] if writes else ["recompute"]
        name = next(name for name in trusted if name in possible)
        return name, f"`lazyformer bench backends` has measured none on {situation.device}"
    nearest = min(rows, key=lambda row: _distance(row, situation.time, readers + 1))
    times = {name: taken for name, taken in nearest["milliseconds"].items() if name in possible}
    name = min(times, key=times.get)
    return name, f"measured with blocks of {nearest['layers']} at {nearest['time']} tokens"


def _distance(row: dict[str, Any], time: int, layers: int) -> float:
    return abs(math.log2(row["time"] / time)) + abs(math.log2(row["layers"] / layers))


def _is_possible(name: str, situation: Situation) -> bool:
    """Whether a back end can compute this, in the memory there is."""
    if name == "fused" and situation.device == "cuda":
        known = situation.features.isdisjoint(NOT_IN_TRITON)
        return known and situation.head_size <= LARGEST_FUSED_HEAD and has_triton()
    if not BACK_ENDS[name].keeps_distribution:
        return True
    size = torch.empty((), dtype=situation.precision).element_size()
    distributions = situation.batch * situation.heads * situation.time * situation.keys * size
    kept = situation.blocks if situation.is_training else 1
    return distributions * kept <= SHARE_OF_MEMORY * _memory(situation.device)


def _memory(device: str) -> int:
    """Of the device, bytes, used or free: a choice must not depend on what else runs at the moment."""
    if device == "cuda":
        return torch.cuda.get_device_properties().total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@functools.cache
def measured_rows() -> tuple[dict[str, Any], ...]:
    """What ``lazyformer bench backends`` has measured, see :data:`MEASURED`; nothing where it has not run."""
    file = importlib.resources.files(__package__) / MEASURED
    return tuple(json.loads(file.read_text())["rows"]) if file.is_file() else ()
