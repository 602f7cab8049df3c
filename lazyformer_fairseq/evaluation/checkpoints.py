"""Reads this package's checkpoints, whether from fairseq-train or from exports, as plain containers and tensors."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.modules.networks.options import MaskedLMOptions, read_options
from lazyformer_fairseq.storage import checkpoint_file
from lazyformer_fairseq.storage.json_files import read_json, refuse_other_version

WEIGHTS_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
FORMAT = "lazyformer model"
FORMAT_VERSION = 1
ARCHITECTURE = "lazyformer"  # fairseq's name for the model class


def load(path: Path) -> dict[str, Any]:
    """Read and check an entire checkpoint without running any code that it contains.

    Returns:
        The checkpoint's content: ``model`` contains the weights, and ``cfg`` contains the options, including the
        model's and the task's.

    Raises:
        UserError: the checkpoint is missing or damaged, contains disallowed objects, or stores its settings in an older
            fairseq format, which only fairseq itself can read.
    """
    if str(path).endswith(checkpoint_file.SAFETENSORS):
        state = read_exported(path)
    else:
        state = checkpoint_file.load(path)
    has_parts = isinstance(state, dict) and all(isinstance(state.get(part), dict) for part in ("cfg", "model"))
    if not has_parts:
        raise UserError(f"{path}: not a checkpoint from this package, because settings or weights are missing")
    return state


def read_exported(path: Path) -> dict[str, Any]:
    """Read a model that :func:`evaluation.export.export` wrote, as if it were a checkpoint without optimizer state.

    Args:
        path: the weights file; config.json must be in the same folder.

    Raises:
        UserError: a file is missing, is damaged or has an unsupported format or version, or the two files do not belong
            together.
    """
    options = read_config(path.with_name(CONFIG_FILE))
    weights, metadata = read_weights(path)
    for name, ours in (("architecture", ARCHITECTURE), ("sublayer_pattern", options.sublayer_pattern)):
        if metadata.get(name) != ours:
            raise UserError(
                f"{path} has the {name} {metadata.get(name)!r}, but {CONFIG_FILE} says {ours!r}; copy both files from "
                "the same folder"
            )
    return {
        "model": weights,
        "cfg": {"model": asdict(options)},
        "task_state": {"heads": read_json(path.with_name(CONFIG_FILE)).get("heads")},
        "optimizer_history": [{"num_updates": 0}],
        "extra_state": {"train_iterator": {"epoch": 1, "iterations_in_epoch": 0, "version": 2}},
    }


def read_weights(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the weights in a safetensors file, and the file's metadata; tied weights appear under all of their names.

    Raises:
        UserError: the file is missing or is not a safetensors file.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is not a dict)
    except (SafetensorError, OSError, RuntimeError, ValueError, TypeError, MemoryError) as error:
        raise UserError(f"{path}: truncated, damaged or not a safetensors file ({error})") from None
    tied = {name: kept for name, kept in metadata.items() if name not in weights and kept in weights}
    weights |= {name: weights[kept] for name, kept in tied.items()}
    return weights, metadata


def read_config(path: Path) -> MaskedLMOptions:
    """Return an exported model's type-checked options; raise a UserError if the file is not a valid config."""
    config = read_json(path, "copy the whole folder again")
    if config.get("format") != FORMAT:
        raise UserError(f"{path} is not the config of an exported model; export the model with `lazyformer export`")
    refuse_other_version(path, config, FORMAT_VERSION)
    options = config.get("model")
    if not isinstance(options, dict) or config.get("architecture") != ARCHITECTURE:
        raise UserError(f"{path} must contain the architecture {ARCHITECTURE} and the model's options")
    try:
        return read_options(MaskedLMOptions, options)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
