"""What ``lazyformer import`` does: reads a model of whatever kind, and writes it as a checkpoint of ours."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Optional

import torch
from omegaconf import OmegaConf
from torch import Tensor

from lazyformer_fairseq.arguments import CHECKPOINTS, checkpoint_at
from lazyformer_fairseq.data.text.interface import TextTokenizer
from lazyformer_fairseq.data.text.library_tokenizer import adopt_tokenizer
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.extras import refuse_without_extra
from lazyformer_fairseq.fairseq_plugin.models import hub, safetensors_files
from lazyformer_fairseq.fairseq_plugin.models.checkpoint_match import dictionary_hash
from lazyformer_fairseq.fairseq_plugin.models.config import LazyFormerConfig
from lazyformer_fairseq.fairseq_plugin.models.export import write_model
from lazyformer_fairseq.fairseq_plugin.models.lazyformer import LazyFormerModel
from lazyformer_fairseq.huggingface.hub_folder import CONFIG_FILE, Weights, describe, read_json_object
from lazyformer_fairseq.huggingface.hub_weights import AUTO, Conversion
from lazyformer_fairseq.modules.networks.heads import NEXT_SENTENCE, POOLER, SPAN
from lazyformer_fairseq.storage.atomic import atomic_folder
from lazyformer_fairseq.warm_start.options import WarmOptions
from lazyformer_fairseq.warm_start.record import write_record
from lazyformer_fairseq.warm_start.start import Trained


def import_to(
    path: Path,
    out: Path,
    token_types: str = AUTO,
    head_name: Optional[str] = None,
    checkpoint_file: Optional[str] = None,
    warm: Optional[WarmOptions] = None,
) -> list[str]:
    """Writes the model at `path` to the folder `out`, whole or not at all. Returns what a user should know of it.

    Args:
        path, token_types, head_name, checkpoint_file: see :func:`~lazyformer_fairseq.huggingface.importing
            .read_source`.
        out: must not exist yet, or be empty.
        warm: what changes of the model; then ``warm_start.json`` and ``warm_start.md`` say what became what.

    Raises:
        UserError: what :func:`read_source` and :meth:`WarmOptions.start` raise, or `out` exists.
    """
    if path.exists() and not is_ours(path):
        refuse_without_extra("huggingface", "lazyformer import")
    with TemporaryDirectory(prefix="lazyformer") as scratch:
        source = read_source(path, Path(scratch), token_types, head_name, checkpoint_file)
        record = None
        if warm is not None:
            old = Trained(source.cfg, source.weights, source.tokenizer.dictionary)
            start = warm.start(old, source.tokenizer, path.absolute().name)
            source = replace(source, cfg=start.new.cfg, weights=dict(start.new.weights))
            record = start.record
        loaded = hub.as_hub(LazyFormerModel, source.cfg, source.weights, source.tokenizer, path)
        with atomic_folder(out) as unfinished:
            write_model(loaded, unfinished)
            if record is not None:
                write_record(unfinished, record)
    return source.notes


@dataclass(frozen=True)
class Source:
    """A model.

    Attributes:
        cfg: its options.
        weights: by name, as in a checkpoint of ours.
        tokenizer: its own.
        notes: what a user should know of it, a sentence each.
    """

    cfg: LazyFormerConfig
    weights: dict[str, Tensor]
    tokenizer: TextTokenizer
    notes: list[str] = field(default_factory=list)


def read_source(
    path: Path,
    scratch: Path,
    token_types: str = AUTO,
    head_name: Optional[str] = None,
    checkpoint_file: Optional[str] = None,
) -> Source:
    """Reads a folder as the Hub has it, or a checkpoint of ours, or a folder of such. Runs nothing that they hold.

    Args:
        scratch: an empty folder; the tokenizer of a model from the Hub is written there.
        token_types: see :class:`~lazyformer_fairseq.huggingface.hub_weights.Conversion`.
        head_name: for the classification or span head of a model from the Hub; see :class:`Conversion`.
        checkpoint_file: of a folder of checkpoints of ours: its name there.

    Raises:
        UserError: it is missing or damaged, or no model of ours computes what it computes.
    """
    if not path.exists():
        raise UserError(
            f"{path}: no such file or folder; if it is a model's name on the Hub, download it first: "
            f"hf download {path} --local-dir {path.name}"
        )
    if is_ours(path):
        return _read_ours(path, checkpoint_file)
    if not path.is_dir():
        raise UserError(f"{path}: is a file, and no checkpoint of this package; give the folder with {CONFIG_FILE}")
    if checkpoint_file is not None:
        raise UserError(f"--checkpoint-file {checkpoint_file}: is for folders of this package's checkpoints")
    return _read_hub(path, scratch / "tokenizer", token_types, head_name)


def is_ours(path: Path) -> bool:
    """Whether it is a checkpoint of this package, or a folder of such, by the looks of it."""
    if path.is_file():
        return path.suffix == ".pt" or path.name == safetensors_files.WEIGHTS_FILE
    config = path / CONFIG_FILE
    if config.is_file():
        return read_json_object(config).get("format") == safetensors_files.FORMAT
    return any((path / name).is_file() for name in CHECKPOINTS)


def _read_ours(path: Path, checkpoint_file: Optional[str]) -> Source:
    loaded = LazyFormerModel.from_pretrained(checkpoint_at(path, checkpoint_file))
    return Source(loaded.model.cfg, loaded.model.state_dict(), loaded.tokenizer)


def _read_hub(folder: Path, tokenizer_folder: Path, token_types: str, head_name: Optional[str]) -> Source:
    kept = (POOLER, NEXT_SENTENCE)
    if head_name is not None and (not head_name.isidentifier() or head_name in kept):
        raise UserError(f"--head-name {head_name!r}: must be letters, digits and _, and not {' or '.join(kept)}")
    described = describe(folder)
    conversion = Conversion(described, Weights(folder), token_types, head_name)
    tokenizer = adopt_tokenizer(folder, tokenizer_folder, described.vocab_size)
    dictionary = tokenizer.dictionary
    if described.family.counts_from_padding and dictionary.pad() != described.padding:
        raise UserError(
            f"{folder}: its tokenizer pads with id {dictionary.pad()}, {CONFIG_FILE} says {described.padding} "
            "(pad_token_id), from which its positions count"
        )
    options: dict[str, Any] = {
        **described.options,
        "sublayer_pattern": f"(sf)x{described.layers}",
        "max_positions": described.positions - described.first_position,
        "token_types": conversion.token_types,
    }
    cfg = OmegaConf.merge(OmegaConf.structured(LazyFormerConfig), options)
    try:
        with torch.device("meta"):  # sizes first, without memory
            model = LazyFormerModel(cfg, dictionary)
            if conversion.classes:
                model.register_classification_head(conversion.head_name, conversion.classes)
            if conversion.has_spans:
                model.register_classification_head(conversion.head_name, 2, SPAN)
            if conversion.has_next_sentence:
                model.register_next_sentence_head()
            if conversion.has_pooler:
                model.register_pooler()
    except (ValueError, RuntimeError, TypeError, OverflowError) as error:
        raise UserError(f"{folder / CONFIG_FILE}: describes no model that can be built ({error})") from None
    weights = conversion.convert({name: weight.shape for name, weight in model.state_dict().items()})
    weights["dictionary_sha256"] = dictionary_hash(dictionary)
    return Source(cfg, weights, tokenizer, conversion.notes())
