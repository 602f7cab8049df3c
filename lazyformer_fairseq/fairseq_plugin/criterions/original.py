"""The model that another one was made from: its checkpoint, and the record of which sublayer came from which."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import torch
from fairseq.tasks import FairseqTask
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import nn

from lazyformer_fairseq.arguments import checkpoint_at
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.reliability.checkpoints.loading import load_safely
from lazyformer_fairseq.patterns.grammar import PlannedSublayer, plan
from lazyformer_fairseq.patterns.kinds import ENCODER

FORMAT, FORMAT_VERSION = "lazyformer warm start", 1
ENCODERS = "lazyformer"  # fairseq's name of the model class


def load_original(path: str, task: FairseqTask) -> nn.Module:
    """A masked language model in evaluation mode, whose weights do not learn.

    Args:
        path: a checkpoint, or a folder that holds one.
        task: whose dictionary must be the checkpoint's.

    Raises:
        UserError: as `load_safely`, or it is no encoder of
            ours, or has another dictionary.
    """
    file = checkpoint_at(Path(path))
    state = load_safely(file)
    try:
        options, weights = {**state["cfg"]["model"], "_name": ENCODERS}, state["model"]
        if "sublayer_pattern" not in options or "decoder_embed_dim" in options:
            raise UserError("holds no masked language model of this package")
        # Sizes first, without memory: a few bytes of settings can demand more of it than there is.
        with torch.device("meta"):
            sizes = task.build_model(OmegaConf.create(options)).state_dict()
        held, wanted = (sum(each.numel() for each in those.values()) for those in (weights, sizes))
        if wanted > 2 * held:
            raise UserError(f"its settings ask for {wanted:,} weights, it holds {held:,}")
        model = task.build_model(OmegaConf.create(options))
        model.load_state_dict(weights)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, OmegaConfBaseException) as error:
        raise UserError(f"{file}: {error}") from error
    return model.eval().requires_grad_(False)


@dataclass(frozen=True)
class Record:
    """What `lazyformer import` noted beside a model that it made.

    Attributes:
        file: where it stands.
        old_pattern, new_pattern: of the original and of the model.
        sources: for each new sublayer the number of the old one, or None.
        head_orders: for each new sublayer, the old head that each of its heads was; None where none moved.
    """

    file: Path
    old_pattern: str
    new_pattern: str
    sources: tuple[Optional[int], ...]
    head_orders: tuple[Optional[tuple[int, ...]], ...]

    def check(self, new: Sequence[PlannedSublayer], old: Sequence[PlannedSublayer]) -> None:
        """Raises a UserError where it was not written for these two models."""
        for whose, pattern, found in (("model", self.new_pattern, new), ("original", self.old_pattern, old)):
            if [each.text for each in plan(pattern, ENCODER)] != [each.text for each in found]:
                is_pattern = " ".join(each.text for each in found)
                raise UserError(f"{self.file}: speaks of the pattern {pattern}, but the {whose} is {is_pattern}")

    def head_order(self, old: int, read: int) -> Optional[list[int]]:
        """How the heads of old sublayer `old` stand now, where it became one that reads new sublayer `read`.

        None where they stand as they did, or nothing came of it.
        """
        consumers = (number for number, source in enumerate(self.sources) if source == old and number > read)
        order = next((self.head_orders[number] for number in consumers), None)
        return None if order is None else list(order)


def read_record(path: Path) -> Record:
    """Reads warm_start.json. Raises a UserError where it is missing, damaged or of another format."""
    try:
        record = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"--warm-start {path}: cannot be read as JSON ({error})") from None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise UserError(f"--warm-start {path}: not the warm_start.json that `lazyformer import` writes")
    if record.get("format_version") != FORMAT_VERSION:
        version = record.get("format_version")
        raise UserError(f"--warm-start {path}: format version {version!r}, but this program reads {FORMAT_VERSION}")
    try:
        return _as_record(path, record)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"--warm-start {path}: damaged ({error!r}); write it again with `lazyformer import`") from None


def _as_record(path: Path, record: dict[str, Any]) -> Record:
    sublayers = record["sublayers"]
    sources = tuple(None if each["from"] is None else int(each["from"]) for each in sublayers)
    orders = tuple(
        None if each["head_order"] is None else tuple(int(head) for head in each["head_order"]) for each in sublayers
    )
    for pattern in (record["old_pattern"], record["new_pattern"]):
        if not isinstance(pattern, str):
            raise TypeError(pattern)
    return Record(path, record["old_pattern"], record["new_pattern"], sources, orders)
