"""Reads the checkpoints that fine-tuning starts from, checks them against the prepared data, and describes them."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Optional

import torch

from lazyformer_fairseq.data.text.interface import SETTINGS_FILE, TextTokenizer
from lazyformer_fairseq.data.text.load_tokenizer import load_tokenizer
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.models.checkpoint_match import dictionary_hash
from lazyformer_fairseq.fairseq_plugin.models.config import LazyFormerConfig
from lazyformer_fairseq.fairseq_plugin.reliability.checkpoint_loading import load_safely
from lazyformer_fairseq.fairseq_plugin.reliability.options import with_new_names
from lazyformer_fairseq.storage.hashes import sha256_of

DROPOUT = 0.1  # LazyFormer, Table 5; whatever pre-training had


@dataclass(frozen=True)
class StartModel:
    """A pre-trained model.

    Attributes:
        sha256: of the checkpoint's file.
        updates: of its pre-training, where the checkpoint has them.
        options: of the model, as fairseq-train takes them.
        max_positions: ids of its longest input.
    """

    name: str
    checkpoint: Path
    sha256: str
    updates: Optional[int]
    parameters: int
    options: tuple[str, ...]
    max_positions: int


def load_start_models(checkpoints: Mapping[str, Path], tokenizer_folder: Path) -> list[StartModel]:
    """Reads the checkpoints (name -> file).

    Args:
        tokenizer_folder: of the data.

    Raises:
        UserError: a checkpoint cannot be loaded, is of another kind of model, or has another dictionary or tokenizer
            than the data.
    """
    tokenizer = load_tokenizer(tokenizer_folder)
    return [_load(name, path, tokenizer_folder, tokenizer) for name, path in checkpoints.items()]


def _load(name: str, path: Path, tokenizer_folder: Path, tokenizer: TextTokenizer) -> StartModel:
    state = load_safely(path)
    try:
        given = state["cfg"]["model"]
        given["sublayer_pattern"]  # no other kind of model has one
        # An option newer than the checkpoint takes its default, as in fairseq.
        options = {
            field.name: given.get(field.name, field.default)
            for field in fields(LazyFormerConfig)
            if field.name != "_name"
        }
        weights = state["model"]
        symbols = weights["dictionary_sha256"]
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: not a checkpoint of this package's models ({error!r})") from error
    if not torch.equal(symbols, dictionary_hash(tokenizer.dictionary)):
        raise UserError(
            f"{path}: was trained with another dictionary than {tokenizer_folder}'s; prepare the data with this "
            "checkpoint's tokenizer, in a folder of their own"
        )
    _check_tokenizer_beside(path, tokenizer_folder)
    history = state.get("optimizer_history") or [{}]
    return StartModel(
        name,
        path.absolute(),
        sha256_of(path),
        history[-1].get("num_updates"),
        sum(weight.numel() for weight in weights.values() if weight.is_floating_point()),
        _as_arguments({**with_new_names(options), "dropout": DROPOUT}),
        int(options["max_positions"]),
    )


def _check_tokenizer_beside(path: Path, tokenizer_folder: Path) -> None:
    """Equal dictionaries do not imply equal text settings."""
    beside = path.parent / "tokenizer" / SETTINGS_FILE
    if beside.is_file() and beside.read_bytes() != (tokenizer_folder / SETTINGS_FILE).read_bytes():
        raise UserError(
            f"{path}: the tokenizer beside it has other settings than {tokenizer_folder} (compare their "
            f"{SETTINGS_FILE}); prepare the data with this checkpoint's tokenizer, in a folder of their own"
        )


def _as_arguments(options: dict[str, Any]) -> tuple[str, ...]:
    arguments = ["--arch", "lazyformer"]
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            arguments += [option] if value else []
        else:
            arguments += [option, str(getattr(value, "value", value))]
    return tuple(arguments)
