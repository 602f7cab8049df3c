"""Model export to safetensors, a format that contains only tensors and text, so loading a model runs no code.

    OUT/model.safetensors   the weights; the metadata lists the architecture and the tied weights
    OUT/config.json         the model's options
    OUT/tokenizer/          the model's tokenizer

``lazyformer export`` writes this folder, ``lazyformer_fairseq.load(OUT)`` loads it, and ``--finetune-from-model
OUT/model.safetensors`` starts training from it.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Union

from safetensors.torch import save_model

from lazyformer_fairseq.data.text.interface import TextTokenizer
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation.checkpoints import ARCHITECTURE, CONFIG_FILE, FORMAT, FORMAT_VERSION, WEIGHTS_FILE
from lazyformer_fairseq.evaluation.inference import TrainedModel
from lazyformer_fairseq.evaluation.loading import load, trained_model
from lazyformer_fairseq.evaluation.match import dictionary_hash
from lazyformer_fairseq.modules.networks.masked_lm import MaskedLM
from lazyformer_fairseq.modules.networks.options import MaskedLMOptions, plain_options
from lazyformer_fairseq.storage.atomic import atomic_folder


def export(folder: Union[str, Path], out: Union[str, Path]) -> None:
    """Write a checkpoint's model and tokenizer to the folder `out`, completely or not at all.

    Args:
        folder: a checkpoint folder or a checkpoint; see :func:`lazyformer_fairseq.evaluation.loading.load`.
        out: a folder that does not exist yet or is empty.

    Raises:
        UserError: :func:`~lazyformer_fairseq.evaluation.loading.load` fails, or `out` is not empty.
    """
    loaded = load(folder)
    with atomic_folder(Path(out)) as unfinished:
        write_model(loaded, unfinished)


def save(model: MaskedLM, tokenizer: TextTokenizer, folder: Union[str, Path]) -> None:
    """Write a model from any torch training loop in the format of :func:`export`, completely or not at all.

    Args:
        model: a model built by ``lazyformer_fairseq.build``, with the same vocabulary size as the tokenizer.
        tokenizer: the model's tokenizer.
        folder: a folder that does not exist yet or is empty.

    Raises:
        UserError: the tokenizer does not match the model, the model is not a masked language model from this package,
            or the folder is not empty.
    """
    if not isinstance(model, MaskedLM):
        raise UserError(
            f"save: the model must be a masked language model from this package, not a {type(model).__name__}"
        )
    weights = {name: weight.detach().cpu() for name, weight in model.state_dict().items()}
    weights["dictionary_sha256"] = dictionary_hash(tokenizer.dictionary)
    loaded = trained_model(plain_options(MaskedLMOptions, model.cfg), weights, tokenizer, Path(folder))
    with atomic_folder(Path(folder)) as unfinished:
        write_model(loaded, unfinished)


def write_model(loaded: TrainedModel, folder: Path) -> None:
    """Write a model and its tokenizer into an existing folder, file by file."""
    options = asdict(plain_options(MaskedLMOptions, loaded.model.cfg))
    config = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "architecture": ARCHITECTURE,
        "model": options,
        "heads": {name: task.as_json() for name, task in loaded.tasks.items()},
    }
    metadata = {"format": "pt", "architecture": ARCHITECTURE, "sublayer_pattern": options["sublayer_pattern"]}
    save_model(loaded.model, str(folder / WEIGHTS_FILE), metadata)
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    loaded.tokenizer.save(folder / "tokenizer")
