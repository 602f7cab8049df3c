"""A folder of a model of ours that transformers saved (LazyFormerForMaskedLM and its like), as a checkpoint's parts."""

from pathlib import Path
from typing import Optional

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
from lazyformer_fairseq.modules.networks.heads import POOLER
from lazyformer_fairseq.modules.networks.options import MaskedLMOptions

MODEL_TYPES = ("lazyformer", "lazyformer_lm")
# What names of weights begin with, theirs and ours; {} is the head's name.
NAMES = {
    "lazyformer.pooler.": f"{PREFIX}{POOLER}.",
    "lazyformer.encoder.": families.ENCODER,
    "lm_head.decoder.": families.HEAD,
    "lm_head.": families.HEAD,
    "classifier.": f"{PREFIX}{{}}.",
    "qa_outputs.": f"{PREFIX}{{}}.span_proj.",
    "token_classifier.": "",
}


def is_own(folder: Path) -> bool:
    """Whether its config.json is of one of our models in transformers."""
    path = folder / families.CONFIG_FILE
    return path.is_file() and families.read_json_object(path).get("model_type") in MODEL_TYPES


def read_own(
    folder: Path,
    tokenizer_folder: Optional[Path],
    head_name: Optional[str],
) -> tuple[MaskedLMOptions, dict[str, Tensor], TextTokenizer, list[str]]:
    """Options, weights in single precision, to the bit those of the folder, tokenizer, and notes. No code of it runs.

    Args:
        tokenizer_folder: with which it was trained, as beside the data; by default the one that an export writes.
        head_name: of a head for classes ("classifier" by default) or spans ("squad").

    Raises:
        UserError: the folder is damaged, is a causal model's, or its tokenizer is missing or another one.
    """
    config = families.read_json_object(folder / families.CONFIG_FILE)
    name = str((config.get("architectures") or ["LazyFormerForMaskedLM"])[0])
    if config["model_type"] != MODEL_TYPES[0] or not name.startswith("LazyFormer"):
        raise UserError(f"{folder}: is a {name}; models of masked text alone are imported")
    if tokenizer_folder is None and not (folder / "tokenizer").is_dir():
        raise UserError(f"{folder}: has no folder tokenizer; give --tokenizer, such as data/tokenizer beside the data")
    tokenizer = load_tokenizer(tokenizer_folder or folder / "tokenizer")
    dictionary = tokenizer.dictionary
    there = families.Weights(folder).shapes
    names = [name, *(["LazyFormerForMaskedLM"] if any(each.startswith("lm_head.") for each in there) else [])]
    how = {"local_files_only": True, "use_safetensors": True, "dtype": torch.float32}
    try:
        models = [getattr(huggingface, each).from_pretrained(folder, **how) for each in dict.fromkeys(names)]
        options = options_of(models[0].config, MaskedLMOptions)
    except (ValueError, OSError, RuntimeError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise UserError(f"{folder}: {error}") from error
    words = models[0].config.vocab_size
    pad = models[0].config.pad_token_id
    if (words, pad) != (len(dictionary), dictionary.pad()):
        raise UserError(
            f"{folder}: has {words} words and pads with id {pad}, the tokenizer {len(dictionary)} and "
            f"{dictionary.pad()}; give the one it was trained with by --tokenizer"
        )
    weights = {}
    notes = []
    for model in models:
        weights |= _renamed(model, head_name, notes)
    if f"{families.HEAD}weight" not in weights:
        notes.append("it has no masked-LM head, so that this one starts fresh: pre-train it before fill_mask")
        with torch.device("meta"):
            sizes = loading.model_of(options, dictionary).state_dict()
        weights |= families.fresh_head({name: weight.shape for name, weight in sizes.items()})
        weights[f"{families.HEAD}weight"] = weights[families.WORDS]
    weights["dictionary_sha256"] = dictionary_hash(dictionary)
    return options, weights, tokenizer, notes


def _renamed(model: torch.nn.Module, head_name: Optional[str], notes: list[str]) -> dict[str, Tensor]:
    """Weights by our names; adds to the notes what becomes of its head."""
    found = {}
    chosen = head_name or ("squad" if hasattr(model, "qa_outputs") else "classifier")
    for name, weight in model.state_dict().items():
        if hasattr(model, "lazyformer"):
            full = name
        else:
            full = f"lazyformer.{name}"
        theirs, ours = next(row for row in NAMES.items() if full.startswith(row[0]))
        if ours:
            found[ours.format(chosen) + full.removeprefix(theirs)] = weight
    if hasattr(model, "token_classifier"):
        notes.append("left out: its head for classes of tokens")
    if any(name.startswith(f"{PREFIX}{chosen}.") for name in found):
        notes.append(f"its head is {chosen!r}")
    return found
