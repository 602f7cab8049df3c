"""Imports our own models, such as LazyFormerForMaskedLM, from folders saved by transformers."""

from pathlib import Path
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from lazyformer_fairseq import huggingface
from lazyformer_fairseq.data.text.interface import TextTokenizer
from lazyformer_fairseq.data.text.tokenizer import load_tokenizer
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation import loading
from lazyformer_fairseq.evaluation.match import PREFIX, dictionary_hash
from lazyformer_fairseq.huggingface import families
from lazyformer_fairseq.huggingface.settings import options_of
from lazyformer_fairseq.modules.networks.heads import POOLER, TokenHead
from lazyformer_fairseq.modules.networks.options import MaskedLMOptions

MODEL_TYPES = ("lazyformer", "lazyformer_lm")
NO_HEAD = "the model has no masked-LM head, so a new one was added; pre-train the model before you use fill_mask"
# Prefixes of our weight names, by the prefixes in transformers; {} is the head's name.
NAMES = {
    "lazyformer.pooler.": f"{PREFIX}{POOLER}.",
    "lazyformer.encoder.": families.ENCODER,
    "lm_head.decoder.": families.HEAD,
    "lm_head.": families.HEAD,
    "classifier.": f"{PREFIX}{{}}.",
    "qa_outputs.": f"{PREFIX}{{}}.span_proj.",
    "token_classifier.": f"{PREFIX}{{}}.{TokenHead.MAP}.",
}


class ReadModel(NamedTuple):
    """A model read from a folder in transformers' format.

    Attributes:
        options: Our model's options.
        weights: The weights in float32, by our names.
        tokenizer: The tokenizer.
        notes: Notes for the user, one sentence each.
    """

    options: MaskedLMOptions
    weights: dict[str, Tensor]
    tokenizer: TextTokenizer
    notes: list[str]


def is_saved_lazyformer(folder: Path) -> bool:
    """Return whether a folder's config.json describes one of our models in transformers."""
    path = folder / families.CONFIG_FILE
    return path.is_file() and families.read_json_object(path).get("model_type") in MODEL_TYPES


def read_saved_lazyformer(folder: Path, tokenizer_folder: Optional[Path], head_name: Optional[str]) -> ReadModel:
    """Read a folder. The weights stay bitwise identical, and no code in the folder is run.

    Args:
        folder: The folder.
        tokenizer_folder: The folder of the tokenizer that the model was trained with, such as the one beside the data.
            None uses the tokenizer that an export contains.
        head_name: The name for the head. None for the default, which is "squad" for spans and "classifier" for classes
            and tags.

    Raises:
        UserError: The folder is damaged or contains a causal model, or the tokenizer is missing or does not match.
    """
    config = families.read_json_object(folder / families.CONFIG_FILE)
    name = str((config.get("architectures") or ["LazyFormerForMaskedLM"])[0])
    if config["model_type"] != MODEL_TYPES[0] or not name.startswith("LazyFormer"):
        raise UserError(f"{folder} contains a {name}; only masked language models can be imported")
    if tokenizer_folder is None:
        tokenizer_folder = folder / "tokenizer"
        if not tokenizer_folder.is_dir():
            raise UserError(
                f"{folder} has no tokenizer folder; with --tokenizer, pass the tokenizer folder beside the model's "
                "training data, such as data/tokenizer"
            )
    tokenizer = load_tokenizer(tokenizer_folder)
    dictionary = tokenizer.dictionary

    classes = [name]
    if any(weight.startswith("lm_head.") for weight in families.read_weights(folder)):
        classes.append("LazyFormerForMaskedLM")
    how = {"local_files_only": True, "use_safetensors": True, "dtype": torch.float32}
    try:
        models = []
        for each in dict.fromkeys(classes):
            model_class = getattr(huggingface, each)
            models.append(model_class.from_pretrained(folder, **how))
        options = options_of(models[0].config, MaskedLMOptions)
    except (ValueError, OSError, RuntimeError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise UserError(f"{folder}: {error}") from error
    words = models[0].config.vocab_size
    pad = models[0].config.pad_token_id
    if (words, pad) != (len(dictionary), dictionary.pad()):
        raise UserError(
            f"{folder}: the model has {words} tokens and pads with id {pad}, whereas the tokenizer has "
            f"{len(dictionary)} tokens and pads with id {dictionary.pad()}; use --tokenizer to pass the tokenizer that "
            "the model was trained with"
        )

    weights: dict[str, Tensor] = {}
    notes: list[str] = []
    for model in models:
        weights |= _rename(model, head_name, notes)
    if f"{families.HEAD}weight" not in weights:
        notes.append(NO_HEAD)
        with torch.device("meta"):
            sizes = loading.model_of(options, dictionary).state_dict()
        weights |= families.fresh_head({name: weight.shape for name, weight in sizes.items()})
        weights[f"{families.HEAD}weight"] = weights[families.WORDS]
    weights["dictionary_sha256"] = dictionary_hash(dictionary)
    return ReadModel(options, weights, tokenizer, notes)


def _rename(model: torch.nn.Module, head_name: Optional[str], notes: list[str]) -> dict[str, Tensor]:
    """Return the weights by our names, and append a note on the head's name to `notes`."""
    head = "classifier"
    if hasattr(model, "qa_outputs"):
        head = "squad"
    head = head_name or head
    found = {}
    for name, weight in model.state_dict().items():
        full = name
        if not hasattr(model, "lazyformer"):
            full = f"lazyformer.{name}"
        saved_prefix, our_prefix = next(row for row in NAMES.items() if full.startswith(row[0]))
        found[our_prefix.format(head) + full.removeprefix(saved_prefix)] = weight
    if any(name.startswith(f"{PREFIX}{head}.") for name in found):
        notes.append(f"the model's head is imported as {head!r}")
    return found
