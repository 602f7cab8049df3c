"""Weight hashes in the config, which detect weights that differ from the saved ones.

If a weight is missing from a file, transformers only logs a message and initializes the weight randomly. Here, a
missing weight is an error.
"""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, Optional

import torch
from torch import Tensor, nn
from transformers.utils import logging

BASE = "lazyformer"  # the part without heads; each head is a separately named part
HEADS = ("lm_head", "classifier", "token_classifier", "qa_outputs")
# A model may be loaded in any of these precisions, so the weights are hashed in each of them.
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MOST_NAMES = 3  # maximum number of names in a message

logger = logging.get_logger(__name__)


def other_heads(head: str = "") -> list[str]:
    """Return regular expressions for the weight names that a model with this head ignores."""
    return [rf"^{other}\." for other in HEADS if other != head]


def group_by_part(names: Iterable[str]) -> dict[str, list[str]]:
    """Group a model's weight names by part."""
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
    """Return the SHA-256 of the names, shapes and values of a part's weights.

    The hash of the base is the same in models with and without a head.

    Args:
        weights: A model's weights by name.
        names: The names of the part's weights.
        precision: The precision in which floating-point weights are hashed.
    """
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
    """Return weight hashes by part and precision; None if a weight is not fully available."""
    if not all(is_whole(weight) for weight in weights.values()):
        return None
    found = {}
    for part, names in group_by_part(weights).items():
        found[part] = {name: hash_part(weights, names, precision) for name, precision in PRECISIONS.items()}
    return found


def is_whole(weight: Tensor) -> bool:
    """Return whether a tensor is fully available, that is, not on the meta device, sharded or quantized."""
    return type(weight) in (Tensor, nn.Parameter, nn.Buffer) and not weight.is_meta


def check_weights(model: nn.Module, loading: Mapping[str, Any], source: str) -> None:
    """Compare a newly loaded model's weights with the hashes in its config.

    A part without a hash, such as a new classification head, may have new weights. The same applies to a part that the
    caller has resized with ``ignore_mismatched_sizes``.

    Args:
        model: The model.
        loading: transformers' loading info, which lists missing and mismatched keys.
        source: The folder, for messages.

    Raises:
        ValueError: A weight is missing, is no longer tied, or differs from its saved value.
    """
    known = model.config.weights_sha256 or {}
    for part, names in group_by_part(loading["missing_keys"]).items():
        if part == BASE or part in known:
            listed = ", ".join(sorted(names)[:MOST_NAMES])
            if len(names) > MOST_NAMES:
                listed += f" and {len(names) - MOST_NAMES} more"
            raise ValueError(
                f"{source}: the weights file lacks {listed}, which would be randomly initialized; copy the whole "
                "folder again, or export the checkpoint again"
            )

    decoder = model.get_output_embeddings()
    is_tied = decoder is not None and model.config.tie_word_embeddings and not decoder.weight.is_meta
    if is_tied and decoder.weight is not model.get_input_embeddings().weight:
        raise ValueError(
            f"{source}: the file has a separate decoder, lm_head.decoder.weight, but config.json ties it to the token "
            'embedding; if the decoder should be separate, set "tie_word_embeddings": false in config.json'
        )

    changed = group_by_part(key if isinstance(key, str) else key[0] for key in loading["mismatched_keys"])
    weights = model.state_dict()
    for part, names in group_by_part(weights).items():
        if part in changed:
            logger.warning(
                "%s: the sizes of %s have changed, so the weights of this part cannot be checked", source, part
            )
        elif part in known or part == BASE:
            _check_part(known.get(part), weights, names, source)


def _check_part(
    hashes: Optional[Mapping[str, str]],
    weights: Mapping[str, Tensor],
    names: list[str],
    source: str,
) -> None:
    if not hashes:
        logger.warning(
            "%s: cannot verify that the weights match the saved ones, because the config has no weights_sha256", source
        )
        return
    found = {weights[name].dtype for name in names if weights[name].is_floating_point()}
    if found == {torch.float64}:  # converting float32 to float64 and back is exact
        found = {torch.float32}
    name = next((name for name, precision in PRECISIONS.items() if found == {precision}), "")
    if name not in hashes or not all(is_whole(weights[each]) for each in names):
        logger.warning(
            "%s: cannot verify that the weights match the saved ones, because some are unavailable, or have mixed or "
            "unexpected precisions",
            source,
        )
    elif hash_part(weights, names, PRECISIONS[name]) != hashes[name]:
        raise ValueError(
            f"{source}: the weights do not match the hashes in config.json (weights_sha256); copy the whole folder "
            "again. If you changed the weights on purpose, save them with save_pretrained, or remove weights_sha256 "
            "from config.json"
        )
