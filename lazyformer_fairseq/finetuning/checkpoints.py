"""Checkpoints that fine-tuning starts from, and those it leaves."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Optional

import torch
from fairseq import checkpoint_utils
from omegaconf import open_dict

from lazyformer_fairseq.arguments import checkpoint_at
from lazyformer_fairseq.data.text.interface import SETTINGS_FILE, TextTokenizer
from lazyformer_fairseq.data.text.load_tokenizer import load_tokenizer
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.models.checkpoint_match import SavedHead, dictionary_hash, heads_in_checkpoint
from lazyformer_fairseq.fairseq_plugin.models.config import LazyFormerConfig
from lazyformer_fairseq.fairseq_plugin.reliability.checkpoint_loading import load_safely
from lazyformer_fairseq.fairseq_plugin.reliability.options import with_new_names
from lazyformer_fairseq.fairseq_plugin.replacements import loading_safely
from lazyformer_fairseq.storage.hashes import sha256_of

DROPOUT = 0.1  # LazyFormer, Table 5; whatever pre-training had


MODEL_NAME = re.compile(r"[A-Za-z0-9][\w.@+-]*")


def name_checkpoints(texts: Iterable[str]) -> dict[str, Path]:
    """Model -> checkpoint, from ``NAME=PATH`` or ``PATH`` (named after its folder): a file, or its folder.

    Raises a UserError for a name that is taken or impossible, and where there is no such checkpoint.
    """
    models: dict[str, Path] = {}
    for text in texts:
        name, found, given = text.partition("=")
        path = checkpoint_at(Path(given if found else text))
        name = name if found else path.absolute().parent.name
        if not MODEL_NAME.fullmatch(name):
            raise UserError(
                f"--checkpoint {text}: {name!r} cannot name a model's folder; give a name, as in m2x6={path}"
            )
        if name in models:
            raise UserError(
                f"--checkpoint {text}: {models[name]} is called {name} too; give each a name, as in NAME={path}"
            )
        models[name] = path
    return models


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


def load_finetuned(
    checkpoint: Path,
    data: Path,
    head: tuple[str, str],
    fits: Callable[[SavedHead], bool],
    wanted: str,
    settings_of: Callable[[], Mapping[str, Any]],
) -> tuple[torch.nn.Module, Any]:
    """A fine-tuned model, in evaluation mode and on the GPU if there is one, and its task of fairseq.

    Args:
        data: for messages, what the model is loaded for.
        head: the setting that names the head, and the name where it is not set.
        fits: whether a head will do.
        wanted: for messages, the head that is needed; %r in it is the name.
        settings_of: settings of the task that are to be changed.

    Raises:
        UserError: no such checkpoint, no head in it that fits, or it does not fit the settings.
    """
    if not checkpoint.is_file():
        raise UserError(f"{checkpoint}: no such checkpoint; run it again with --keep-checkpoints best")
    state = load_safely(checkpoint)
    settings = state["cfg"]["task"]
    name = settings.get(head[0]) or head[1]
    found = heads_in_checkpoint(state["model"]).get(name)
    if found is None or not fits(found):
        raise UserError(f"{checkpoint}: has {wanted % name}")
    with open_dict(settings):
        settings.update(settings_of())
    try:
        with loading_safely():  # the checkpoint says which of fairseq's models is built
            (model,), _, task = checkpoint_utils.load_model_ensemble_and_task([str(checkpoint)], state=state)
    except UserError as error:
        raise UserError(f"{checkpoint}, on {data}: {error}") from error
    return model.eval().to("cuda" if torch.cuda.is_available() else "cpu"), task
