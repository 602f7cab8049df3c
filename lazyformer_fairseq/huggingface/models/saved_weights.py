"""Hashes of weights in the config: weights other than those that were saved never load in silence.

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
# Whoever loads chooses the precision, so there is a hash of the weights in each.
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MOST_NAMES = 3  # in a message

logger = logging.get_logger(__name__)


def other_heads(head: str = "") -> list[str]:
    """Return patterns for names of weights that a model with this head leaves alone."""
    return [rf"^{other}\." for other in HEADS if other != head]


def group_by_part(names: Iterable[str]) -> dict[str, list[str]]:
    """Return names of a model's weights by the part that they belong to."""
    found: dict[str, list[str]] = {}
    for name in names:
        first = name.partition(".")[0]
        if first in HEADS:
            part = first
        else:
            part = BASE
        found.setdefault(part, []).append(name)
    return found


def hash_part(weights: Mapping[str, Tensor], names: Iterable[str], precision: torch.dtype) -> str:
    """Return the SHA-256 of names, shapes and numbers; of the base it is the same with and without a head."""
    digest = hashlib.sha256()
    full_names = {name.removeprefix(f"{BASE}."): name for name in names}
    for name in sorted(full_names):
        weight = weights[full_names[name]].detach().cpu()
        if weight.is_floating_point():
            weight = weight.to(precision)
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}\n".encode())
        digest.update(weight.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def hash_weights(weights: Mapping[str, Tensor]) -> Optional[dict[str, dict[str, str]]]:
    """Return hashes by part and by precision; None where a weight is not here in full."""
    if not all(is_whole(weight) for weight in weights.values()):
        return None
    found = {}
    for part, names in group_by_part(weights).items():
        found[part] = {name: hash_part(weights, names, precision) for name, precision in PRECISIONS.items()}
    return found


def is_whole(weight: Tensor) -> bool:
    """Return whether a tensor has all its numbers: not on the meta device, not a shard, not quantized."""
    return type(weight) in (Tensor, nn.Parameter, nn.Buffer) and not weight.is_meta


def check_weights(model: nn.Module, loading: Mapping[str, Any], source: str) -> None:
    """Compare a model that was just loaded with the hashes in its config.

    A part without a hash, such as a new classification head, may have fresh weights. So may one whose sizes the caller
    has changed, by ``ignore_mismatched_sizes``.

    Args:
        model: the model.
        loading: what transformers says of how it loaded.
        source: the folder, for messages.

    Raises:
        ValueError: a weight is missing or untied, or has other numbers than those that were saved.
    """
    known = model.config.weights_sha256 or {}
    for part, names in group_by_part(loading["missing_keys"]).items():
        if part == BASE or part in known:
            listed = ", ".join(sorted(names)[:MOST_NAMES])
            if len(names) > MOST_NAMES:
                listed += f" and {len(names) - MOST_NAMES} more"
            raise ValueError(
                f"{source}: its file of weights lacks {listed}, which would have random numbers: copy the whole folder "
                "again, or export the checkpoint again"
            )

    decoder = model.get_output_embeddings()
    is_tied = decoder is not None and model.config.tie_word_embeddings and not decoder.weight.is_meta
    if is_tied and decoder.weight is not model.get_input_embeddings().weight:
        raise ValueError(
            f"{source}: the file has a decoder of its own, lm_head.decoder.weight, but config.json ties it to the "
            'token embedding: if that is meant, set "tie_word_embeddings": false there'
        )

    changed = group_by_part(key if isinstance(key, str) else key[0] for key in loading["mismatched_keys"])
    weights = model.state_dict()
    for part, names in group_by_part(weights).items():
        if part in changed:
            logger.warning("%s: sizes of %s have changed, so nobody knows whether its weights are right", source, part)
        elif part in known or part == BASE:
            _check_part(known.get(part), weights, names, source)


def _check_part(
    hashes: Optional[Mapping[str, str]],
    weights: Mapping[str, Tensor],
    names: list[str],
    source: str,
) -> None:
    if not hashes:
        logger.warning("%s: cannot tell whether the weights are those that were saved: no weights_sha256", source)
        return
    found = {weights[name].dtype for name in names if weights[name].is_floating_point()}
    if found == {torch.float64}:  # exact both ways
        found = {torch.float32}
    name = next((name for name, precision in PRECISIONS.items() if found == {precision}), "")
    if name not in hashes or not all(is_whole(weights[each]) for each in names):
        logger.warning(
            "%s: cannot tell whether the weights are those that were saved: they are not all here, or in mixed or "
            "other precision",
            source,
        )
    elif hash_part(weights, names, PRECISIONS[name]) != hashes[name]:
        raise ValueError(
            f"{source}: the weights are not those that config.json was saved with (weights_sha256): copy the whole "
            "folder again. If the weights were changed on purpose, save them by save_pretrained, or remove "
            "weights_sha256"
        )
