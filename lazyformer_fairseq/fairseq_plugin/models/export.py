"""Writes what ``safetensors_files`` reads: the command ``lazyformer export``."""

import json
from pathlib import Path
from typing import Optional, Union

from omegaconf import OmegaConf
from safetensors.torch import save_model

from lazyformer_fairseq.fairseq_plugin.models.hub import LazyFormerHub
from lazyformer_fairseq.fairseq_plugin.models.lazyformer import LazyFormerModel
from lazyformer_fairseq.fairseq_plugin.models.safetensors_files import (
    ARCHITECTURE,
    CONFIG_FILE,
    FORMAT,
    FORMAT_VERSION,
    OPTIONS,
    WEIGHTS_FILE,
)
from lazyformer_fairseq.fairseq_plugin.reliability.options import with_new_names
from lazyformer_fairseq.storage.atomic import atomic_folder


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
    config = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "architecture": ARCHITECTURE,
        "model": {name: options[name] for name in OPTIONS},
    }
    metadata = {"format": "pt", "architecture": ARCHITECTURE, "sublayer_pattern": options["sublayer_pattern"]}
    save_model(loaded.model, str(folder / WEIGHTS_FILE), metadata)
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    loaded.tokenizer.save(folder / "tokenizer")
