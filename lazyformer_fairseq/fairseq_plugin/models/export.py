"""A model as safetensors: a format that holds tensors and text alone, so that whoever loads it runs nothing.

    OUT/model.safetensors   the weights; its metadata names the architecture, and which weights are tied
    OUT/config.json         the model's options
    OUT/tokenizer/          its tokenizer

``lazyformer export`` writes it, ``LazyFormerModel.from_pretrained(OUT)`` loads it, and
``--finetune-from-model OUT/model.safetensors`` starts from it.
"""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any, Optional, Union

from omegaconf import OmegaConf
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_model
from torch import Tensor

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.models.config import MaskedLMConfig
from lazyformer_fairseq.fairseq_plugin.models.hub import LazyFormerHub
from lazyformer_fairseq.fairseq_plugin.models.lazyformer import LazyFormerModel
from lazyformer_fairseq.fairseq_plugin.reliability.checkpoints import SAFETENSORS, loading_checked
from lazyformer_fairseq.modules.networks.options import OLD_NAMES, with_new_names
from lazyformer_fairseq.storage.atomic import atomic_folder
from lazyformer_fairseq.storage.json_files import read_json, refuse_other_version

WEIGHTS_FILE, CONFIG_FILE = "model.safetensors", "config.json"
FORMAT, FORMAT_VERSION = "lazyformer model", 1
ARCHITECTURE = "lazyformer"  # fairseq's name of the model class
OPTIONS = tuple(each.name for each in fields(MaskedLMConfig) if each.name[0] != "_" and each.name not in OLD_NAMES)


def loading_checkpoints(load_checkpoint_to_cpu, path, *args, **kwargs):
    """For fairseq's ``load_checkpoint_to_cpu``: also reads safetensors in place of a checkpoint."""
    if str(path).endswith(SAFETENSORS):
        return read_as_checkpoint(path)
    return loading_checked(load_checkpoint_to_cpu, path, *args, **kwargs)


def read_as_checkpoint(path: Union[str, Path]) -> dict[str, Any]:
    """Reads what :func:`models.export.export` wrote, in the form of a fairseq checkpoint without an optimizer.

    Args:
        path: of the weights; config.json stands beside them.

    Raises:
        UserError: a file is missing, damaged, of another format or version, or the two do not belong together.
    """
    path = Path(path)
    options = read_config(path.with_name(CONFIG_FILE))
    weights, metadata = read_weights(path)
    for name, ours in (("architecture", ARCHITECTURE), ("sublayer_pattern", options["sublayer_pattern"])):
        if metadata.get(name) != ours:
            raise UserError(
                f"{path}: its {name} is {metadata.get(name)!r}, {CONFIG_FILE} speaks of {ours!r}; copy both files from "
                "the same folder"
            )
    return {
        "model": weights,
        "cfg": OmegaConf.create({"model": options}),
        "task_state": {"heads": read_json(path.with_name(CONFIG_FILE)).get("heads")},
        "optimizer_history": [{"num_updates": 0}],
        "extra_state": {"train_iterator": {"epoch": 1, "iterations_in_epoch": 0, "version": 2}},
    }


def read_weights(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Weights, each tied one under all its names, and metadata. Raises a UserError where it is not such a file."""
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
    except (SafetensorError, OSError, RuntimeError, ValueError, TypeError, MemoryError) as error:
        raise UserError(f"{path}: truncated, damaged or no safetensors file ({error})") from None
    weights |= {name: weights[kept] for name, kept in metadata.items() if name not in weights and kept in weights}
    return weights, metadata


def read_config(path: Path) -> dict[str, Any]:
    """The model's options, each of the right type. Raises a UserError where the file is not such a config."""
    config = read_json(path, "copy the whole folder again")
    if config.get("format") != FORMAT:
        raise UserError(f"{path}: not the config of an exported model; write it with `lazyformer export`")
    refuse_other_version(path, config, FORMAT_VERSION)
    options = config.get("model")
    if not isinstance(options, dict) or config.get("architecture") != ARCHITECTURE:
        raise UserError(f"{path}: must have the architecture {ARCHITECTURE} and the options of its model")
    options = with_new_names(options)
    if unknown := sorted(options.keys() - set(OPTIONS)):
        raise UserError(f"{path}: unknown option {', '.join(unknown)}; this version knows {', '.join(OPTIONS)}")
    options = {name: getattr(MaskedLMConfig, name) for name in OPTIONS} | options
    for name, value in options.items():
        kind = type(getattr(MaskedLMConfig, name))
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise UserError(f"{path}: option {name} is {value!r}, must be {kind.__name__}")
    return options


def export(folder: Union[str, Path], out: Union[str, Path], checkpoint_file: Optional[str] = None) -> None:
    """Writes a checkpoint's model and tokenizer to the folder `out`, whole or not at all.

    Args:
        folder: of checkpoints; see :func:`lazyformer_fairseq.fairseq_plugin.models.hub.load`.
        out: must not exist yet, or be empty.

    Raises:
        UserError: what :func:`~lazyformer_fairseq.fairseq_plugin.models.hub.load` raises, or `out` exists.
    """
    loaded = LazyFormerModel.from_pretrained(folder, checkpoint_file)
    with atomic_folder(Path(out)) as unfinished:
        write_model(loaded, unfinished)


def write_model(loaded: LazyFormerHub, folder: Path) -> None:
    """Writes a model and its tokenizer into a folder that is there already, file by file."""
    options = with_new_names(OmegaConf.to_container(OmegaConf.structured(loaded.model.cfg), enum_to_str=True))
    config = {"format": FORMAT, "format_version": FORMAT_VERSION, "architecture": ARCHITECTURE}
    config["model"] = {name: options[name] for name in OPTIONS}
    config["heads"] = {name: task.as_json() for name, task in loaded.tasks.items()}
    metadata = {"format": "pt", "architecture": ARCHITECTURE, "sublayer_pattern": options["sublayer_pattern"]}
    save_model(loaded.model, str(folder / WEIGHTS_FILE), metadata)
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    loaded.tokenizer.save(folder / "tokenizer")
