"""Loads a checkpoint and its tokenizer as a model that accepts raw text."""

import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Optional, Union, overload

import torch
from torch import Tensor

from lazyformer_fairseq.arguments import checkpoint_at
from lazyformer_fairseq.data.glue import PUBLISHED
from lazyformer_fairseq.data.labelled_files import TaskDescription
from lazyformer_fairseq.data.text.interface import TextTokenizer
from lazyformer_fairseq.data.text.tokenizer import load_tokenizer
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation import checkpoints, match
from lazyformer_fairseq.evaluation.inference import TrainedModel
from lazyformer_fairseq.modules.networks.causal_lm import CausalLM
from lazyformer_fairseq.modules.networks.heads import NEXT_SENTENCE, SPAN, TAGS
from lazyformer_fairseq.modules.networks.masked_lm import MaskedLM
from lazyformer_fairseq.modules.networks.named import network
from lazyformer_fairseq.modules.networks.options import CausalLMOptions, MaskedLMOptions, Options, read_options
from lazyformer_fairseq.patterns.architectures import ARCHITECTURES, CAUSAL_ARCHITECTURES

logger = logging.getLogger(__name__)

Make = Callable[[Any, Any], Any]


@overload
def model_of(options: MaskedLMOptions, dictionary: Any) -> MaskedLM: ...


@overload
def model_of(options: CausalLMOptions, dictionary: Any) -> CausalLM: ...


def model_of(options: Options, dictionary: Any) -> Union[MaskedLM, CausalLM]:
    """Build a randomly initialized model for a dictionary; the dictionary's hash is stored in a buffer."""
    model = network(options, len(dictionary), dictionary.pad())
    model.register_buffer("dictionary_sha256", match.dictionary_hash(dictionary))
    return model


def load(
    folder: Union[str, Path],
    make: Make = model_of,
    read: Callable[[Path], dict[str, Any]] = checkpoints.load,
) -> TrainedModel:
    """Load a model for inference, on the CPU and in evaluation mode, with all heads in the checkpoint.

    Args:
        folder: a checkpoint or a folder of checkpoints. The subfolder ``tokenizer`` next to the checkpoints must
            contain the tokenizer that they were trained with; training writes it there. From a folder, the best
            checkpoint is loaded or, if there is none, the last one.
        make: a function that builds a randomly initialized model from options and a dictionary.
        read: a function that reads a checkpoint.

    Raises:
        UserError: a file is missing, damaged or unsafe, or does not match the other files.
    """
    checkpoint = checkpoint_at(Path(folder))
    tokenizer = load_tokenizer_beside(
        checkpoint
    )  # checked first, because a missing tokenizer is the more likely mistake
    return load_state(read(checkpoint), checkpoint, tokenizer, make)


def load_tokenizer_beside(checkpoint: Path, folder: Optional[Path] = None) -> TextTokenizer:
    """Load the tokenizer from a folder, by default the one next to a checkpoint; raise a UserError if it is missing."""
    folder = folder or checkpoint.parent / "tokenizer"
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; raw text requires the tokenizer that the model was trained with")
    return load_tokenizer(folder)


def is_causal(state: dict) -> bool:
    """Return True if a checkpoint contains a causal language model."""
    return any(str(name).startswith("decoder.embedding.") for name in state.get("model") or ())


def load_state(state: dict, checkpoint: Path, tokenizer: TextTokenizer, make: Make = model_of) -> TrainedModel:
    """Build a model like :func:`load`, from a checkpoint's content and a tokenizer."""
    if is_causal(state):
        raise UserError(f"{checkpoint} is a causal language model; evaluate it with `lazyformer lm evaluate`")
    model = build(state, tokenizer.dictionary, checkpoint, make)
    logger.info("loaded %s", checkpoint)
    return TrainedModel(model, tokenizer, tasks_of_heads(state, checkpoint))


def tasks_of_heads(state: Mapping[str, Any], path: Path) -> dict[str, TaskDescription]:
    """Return each classification head's task, by head name.

    If the checkpoint does not describe the task, it is identified by the head's name.

    Raises:
        UserError: a description is damaged; the message names `path`.
    """
    found = {}
    saved = state.get("task_state")
    accounts = saved.get("heads") if isinstance(saved, dict) else None
    for name, head in match.heads_in_checkpoint(state["model"]).items():
        if head.type == SPAN or name == NEXT_SENTENCE:
            continue
        labels = tuple(f"LABEL_{number}" for number in range(head.outputs)) if head.outputs > 1 else ()
        found[name] = TaskDescription(
            name,
            {},
            (),
            labels,
            standard=None if labels else (0.0, 1.0),
            tags_words=head.type == TAGS,
        )
        rows = [task for task in PUBLISHED.values() if task.head_name == name]
        if isinstance(accounts, dict) and name in accounts:
            rows = [TaskDescription.from_json(accounts[name], path)]
        for task in rows:
            if task.num_classes == head.outputs:
                found[name] = task
                break
    return found


def trained_model(
    cfg: MaskedLMOptions,
    weights: Mapping[str, Tensor],
    tokenizer: TextTokenizer,
    path: Path,
    tasks: Optional[Mapping[str, TaskDescription]] = None,
) -> TrainedModel:
    """Build a model that accepts raw text from options, weights and a tokenizer.

    Args:
        cfg: the options.
        weights: the weights, including the dictionary's hash.
        tokenizer: the model's tokenizer.
        path: the path for error messages.
        tasks: see :class:`TrainedModel`.

    Raises:
        UserError: :func:`build` fails.
    """
    state = {"cfg": {"model": asdict(cfg)}, "model": dict(weights)}
    return TrainedModel(build(state, tokenizer.dictionary, path), tokenizer, tasks)


def build(state: dict, dictionary: Any, path: Path, make: Make = model_of) -> Any:
    """Build the masked or causal language model described by a checkpoint's settings, and load its weights.

    Args:
        state: the checkpoint's content, with the settings in ``state["cfg"]["model"]`` and the weights in
            ``state["model"]``.
        dictionary: the model's dictionary.
        path: the path for error messages.
        make: a function that builds a randomly initialized model from options and a dictionary.

    Raises:
        UserError: settings, weights and dictionary do not match.
    """
    not_ours = f"{path}: not a checkpoint from this package"
    try:
        options = state["cfg"]["model"]
        weights = state["model"]
        _refuse_unknown_names(state["cfg"], path)
        options = {name: value for name, value in options.items() if name != "_name"}
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{not_ours} ({error!r})") from error

    try:
        cfg = read_options(CausalLMOptions if is_causal(state) else MaskedLMOptions, options)
    except UserError as error:
        raise UserError(f"{not_ours}, or a checkpoint from a later version: {error}") from error
    has_tensors = isinstance(weights, dict) and all(isinstance(weight, Tensor) for weight in weights.values())
    if not has_tensors:
        raise UserError(f"{not_ours}: the weights are not tensors")

    try:
        # Compare shapes on the meta device first: a few bytes of settings can require more memory than is available.
        with torch.device("meta"):
            sizes = assemble(make, cfg, dictionary, weights)
        own = {**sizes.state_dict(), "dictionary_sha256": match.dictionary_hash(dictionary)}
        match.check_same_weights(weights, own, sizes.per_word)
        model = assemble(make, cfg, dictionary, weights)
        model.load_state_dict(weights)
    except (ValueError, KeyError, IndexError, RuntimeError) as error:
        raise UserError(f"{path}: {error}") from error
    return model


def _refuse_unknown_names(cfg: Mapping[str, Any], path: Path) -> None:
    """Raise a UserError if the model or task is neither from this package nor registered with a loaded fairseq."""
    models = {"lazyformer", "lazyformer_lm", *ARCHITECTURES, *CAUSAL_ARCHITECTURES}
    for part, registry, ours in (("model", "ARCH_MODEL_REGISTRY", models), ("task", "TASK_REGISTRY", None)):
        known = getattr(sys.modules.get(f"fairseq.{part}s"), registry, ours)
        name = (cfg.get(part) or {}).get("_name")
        if name is not None and known is not None and name not in known:
            raise UserError(
                f"{path}: its {part} {name!r} is unknown; if you wrote it, import the module that registers it"
            )


def assemble(make: Make, cfg: Options, dictionary: Any, weights: dict[str, Tensor]) -> Any:
    """Build a randomly initialized model with the classification heads found in `weights`."""
    model = make(cfg, dictionary)
    for name, head in match.heads_in_checkpoint(weights).items():
        model.register_classification_head(name, head.outputs, head.type)
    if match.has_pooler(weights):
        model.register_pooler()
    return model
