"""Hashes of weights in the config, so that weights that are not those that were saved never load in silence.

transformers gives a weight that it does not find in a file random numbers, and says so in a log. Here it is an error.
"""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, Optional

import torch
from torch import Tensor, nn
from transformers.utils import logging

BASE = "lazyformer"  # the part without heads; a head is a part by its own name
HEADS = ("lm_head", "classifier", "token_classifier", "qa_outputs")


def other_heads(own: str = "") -> list[str]:
    """Patterns for names of weights that a model with the head `own` leaves alone."""
    return [rf"^{head}\." for head in HEADS if head != own]


# Whoever loads chooses the precision: each has a hash of the weights as they then are.
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

logger = logging.get_logger(__name__)


def by_part(names: Iterable[str]) -> dict[str, list[str]]:
    """Names of a model's weights, by the part that they belong to."""
    found: dict[str, list[str]] = {}
    for name in names:
        first = name.partition(".")[0]
        found.setdefault(first if first in HEADS else BASE, []).append(name)
    return found


def hash_part(weights: Mapping[str, Tensor], names: Iterable[str], precision: torch.dtype) -> str:
    """SHA-256 of names, shapes and numbers; of the base with or without a head around it, the same."""
    digest = hashlib.sha256()
    for name, weight in sorted((name.removeprefix(f"{BASE}."), weights[name]) for name in names):
        weight = weight.detach().to("cpu")
        weight = weight.to(precision) if weight.is_floating_point() else weight
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}\n".encode())
        digest.update(weight.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def hash_weights(weights: Mapping[str, Tensor]) -> Optional[dict[str, dict[str, str]]]:
    """By part and by precision, as the config has it; None where a weight is not here in full."""
    if not all(is_plain(weight) for weight in weights.values()):
        return None
    return {
        part: {name: hash_part(weights, names, precision) for name, precision in PRECISIONS.items()}
        for part, names in by_part(weights).items()
    }


def is_plain(weight: Tensor) -> bool:
    """Whether it is a tensor with all its numbers: not on the meta device, not a shard, not quantized."""
    return type(weight) in (Tensor, nn.Parameter, nn.Buffer) and not weight.is_meta


def check_weights(model: nn.Module, loading: Mapping[str, Any], source: str) -> None:
    """Compares a model that was just loaded with the hashes in its config.

    A part that the config has no hash of, such as a new classification head, may have fresh weights. So may one whose
    sizes the caller has changed, by ``ignore_mismatched_sizes``.

    Args:
        loading: what transformers says of how it loaded.
        source: the folder, for messages.

    Raises:
        ValueError: a weight is missing or untied, or has other numbers than those that were saved.
    """
    known = model.config.weights_sha256 or {}
    missing = by_part(loading["missing_keys"])
    changed = by_part(key if isinstance(key, str) else key[0] for key in loading["mismatched_keys"])
    for part, names in missing.items():
        if part == BASE or part in known:
            raise ValueError(
                f"{source}: its file of weights lacks {', '.join(sorted(names)[:3])}"
                f"{f' and {len(names) - 3} more' if len(names) > 3 else ''}, which would have random numbers: copy the "
                "whole folder again, or export the checkpoint again"
            )
    _check_tied(model, source)
    weights = model.state_dict()
    for part, names in by_part(weights).items():
        if part in changed:
            logger.warning("%s: sizes of %s have changed, so nobody knows whether its weights are right", source, part)
        elif part in known or part == BASE:
            _check_part(known.get(part), weights, names, source)


def _check_part(
    hashes: Optional[Mapping[str, str]], weights: Mapping[str, Tensor], names: list[str], source: str
) -> None:
    found = {weights[name].dtype for name in names if weights[name].is_floating_point()}
    precision = next(iter(found)) if len(found) == 1 else None
    precision = torch.float32 if precision is torch.float64 else precision  # exact both ways
    name = next((name for name, each in PRECISIONS.items() if each is precision), "")
    if name not in (hashes or {}) or not all(is_plain(weights[each]) for each in names):
        why = "they are not all here, or in mixed or other precision" if hashes else "config.json has no weights_sha256"
        logger.warning("%s: cannot tell whether the weights are those that were saved: %s", source, why)
    elif hash_part(weights, names, precision) != hashes[name]:
        raise ValueError(
            f"{source}: the weights are not those that config.json was saved with (weights_sha256): copy the whole "
            "folder again. Who changes weights on purpose saves them by save_pretrained, or removes weights_sha256"
        )


def _check_tied(model: nn.Module, source: str) -> None:
    """The masked-LM decoder is the token embedding."""
    decoder = model.get_output_embeddings()
    if decoder is None or not model.config.tie_word_embeddings or decoder.weight.is_meta:
        return
    if decoder.weight is not model.get_input_embeddings().weight:
        raise ValueError(
            f"{source}: the file has a decoder of its own, lm_head.decoder.weight, but config.json ties it to the "
            'token embedding: if that is meant, set "tie_word_embeddings": false there'
        )
