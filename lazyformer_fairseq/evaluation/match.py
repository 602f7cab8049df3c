"""Checks that a checkpoint's weights and dictionary match a model, and finds the checkpoint's classification heads."""

import hashlib
import itertools
import logging
from collections.abc import Mapping
from typing import NamedTuple, Optional

import torch
from torch import Tensor, nn

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.modules.networks.heads import NEXT_SENTENCE, POOLER, SPAN, TAGS, SpanHead, TokenHead
from lazyformer_fairseq.modules.sublayers.attention import AttentionSublayer

logger = logging.getLogger(__name__)

PREFIX = "classification_heads."
TO_CLASSES = ".out_proj.weight"  # a head's last linear layer
TO_TOKENS = {f".{SpanHead.MAP}.weight": SPAN, f".{TokenHead.MAP}.weight": TAGS}  # the only map of a token-level head
POSITION_EMBEDDINGS = (
    "encoder.sentence_encoder.embed_positions.weight"  # the encoder's weight with one row per position
)
LM_HEAD = "encoder.lm_head."


def dictionary_hash(dictionary) -> Tensor:
    """Return the SHA-256 of a dictionary's symbols in order, as 32 bytes.

    The hash is saved with the weights, because they are only valid for this mapping of symbols to ids. Counts are
    ignored: they only describe a corpus.
    """
    digest = hashlib.sha256("\n".join(dictionary.symbols).encode()).digest()
    return torch.tensor(list(digest), dtype=torch.uint8)


def check_same_weights(loaded: dict[str, Tensor], own: dict[str, Tensor], per_word: str) -> None:
    """Raise a UserError that names the first difference between the checkpoint's and the model's weights or dictionary.

    Without this check, fairseq would only say "please ensure that the architectures match".

    Args:
        loaded: the checkpoint's weights.
        own: the model's weights.
        per_word: the name of a weight with one row per word.
    """
    if per_word in loaded and loaded[per_word].size(0) != own[per_word].size(0):
        raise UserError(
            f"the checkpoint was trained with a dictionary of {loaded[per_word].size(0)} symbols, but this run's "
            f"dictionary has {own[per_word].size(0)}; use the tokenizer and data that the checkpoint was trained with"
        )

    own_hash = own["dictionary_sha256"]
    loaded_hash = loaded.get("dictionary_sha256", own_hash)
    if not torch.equal(loaded_hash.to(own_hash.device), own_hash):
        raise UserError(
            "the checkpoint was trained with a different dictionary of the same size, which has different symbols or a "
            "different order; use the tokenizer and data that the checkpoint was trained with"
        )

    advice = (
        "pass the --arch, --sublayer-pattern and sizes, including --max-positions, that the checkpoint was trained with"
    )
    for name, weight in own.items():
        if name not in loaded:
            raise UserError(f"the checkpoint has no weight {name}; {advice}")
        found = loaded[name]
        shape = tuple(found.shape)
        own_shape = tuple(weight.shape)
        if shape != own_shape:
            raise UserError(f"the checkpoint's {name} has the shape {shape}, but the model's has {own_shape}; {advice}")
        if found.is_floating_point() != weight.is_floating_point():
            raise UserError(
                f"the checkpoint's {name} is {found.dtype}, but the model's is {weight.dtype}; use the "
                "checkpoint from before the conversion"
            )
        stored_bytes = found.untyped_storage().nbytes()
        if stored_bytes < found.numel() * found.element_size():
            raise UserError(f"the checkpoint's {name} claims to be larger than the file; do not use this checkpoint")
        if not found.isfinite().all():
            raise UserError(f"the checkpoint's {name} contains NaN or Inf; use an older checkpoint")

    if lacking := [name for name in loaded if name not in own]:
        raise UserError(f"the checkpoint has a weight {lacking[0]} that this model lacks; {advice}")


def load_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Load a checkpoint's weights into a masked language model, adapting heads and, if allowed, positions.

    Raises:
        UserError: the weights do not fit the model.
    """
    weights = dict(weights)
    positions = (model.cfg.max_positions, model.cfg.copy_positions)
    match_classification_heads(weights, model.classification_heads)
    match_positions(weights, model.state_dict(), POSITION_EMBEDDINGS, *positions)
    copy_projections(weights, model)
    check_same_weights(weights, model.state_dict(), model.per_word)
    model.load_state_dict(weights)


def copy_projections(state_dict: dict[str, Tensor], model: nn.Module) -> None:
    """Fill in missing projections for global tokens with copies of the projections for all tokens, and log this.

    Args:
        state_dict: the checkpoint's weights, which are changed in place.
        model: the model.
    """
    found: dict[str, Tensor] = {}
    for path, sublayer in model.named_modules():
        if isinstance(sublayer, AttentionSublayer):
            found |= sublayer.copied(state_dict, f"{path}.")
    missing = {name: weight.clone() for name, weight in found.items() if name not in state_dict}
    if missing:
        first = next(iter(missing))
        logger.warning(
            "the checkpoint has no projections for global tokens (%s and %d more): they are initialized as copies of "
            "the projections for all tokens (Longformer, section 5)",
            first,
            len(missing) - 1,
        )
        state_dict.update(missing)


def match_positions(
    state_dict: dict[str, Tensor],
    own: dict[str, Tensor],
    name: str,
    positions: int,
    copies: bool,
) -> None:
    """Repeat a checkpoint's position embeddings, in place, to fill the model's positions (Longformer, section 5).

    Args:
        state_dict: the checkpoint's weights.
        own: the model's weights.
        name: the name of the weight with one row per position.
        positions: the model's number of positions.
        copies: whether repetition is allowed.

    Raises:
        UserError: repetition is not allowed, the checkpoint has more positions than the model, or weights besides the
            position embeddings, such as learned attention scores, depend on the number of positions.
    """
    weight = state_dict.get(name)
    if weight is None or weight.size(0) == positions:
        return
    found = weight.size(0)
    differ = f"the checkpoint has {found} positions, but --max-positions is {positions}"
    remedy = f"--max-positions {found}"
    if found > positions:
        raise UserError(f"{differ}; use {remedy} (inputs may be shorter)")
    for each in sorted(own.keys() & state_dict.keys() - {name}):
        sizes = zip(state_dict[each].shape, own[each].shape, strict=False)
        differing = {(size, own_size) for size, own_size in sizes if size != own_size}
        if differing == {(found, positions)}:
            raise UserError(f"{differ}, and {each} depends on this number and cannot be extended; use {remedy}")
    if not copies:
        raise UserError(f"{differ}; pass --copy-positions to repeat the checkpoint's {found} positions, or {remedy}")
    logger.warning("the checkpoint has %d positions; --copy-positions repeats them up to %d", found, positions)
    state_dict[name] = weight.repeat(-(-positions // found), 1)[:positions]


def match_classification_heads(state_dict: dict[str, Tensor], heads: nn.ModuleDict) -> None:
    """Replace the heads in `state_dict` with the model's heads, in place, and log dropped and newly initialized heads.

    A head that is only in the checkpoint, or has a different size there, is dropped. A head that is only in the model
    keeps its initial weights, except that a dense head's first layer is initialized from the checkpoint's pooler, if
    any. In BERT, the pooler is also the layer below the ``next_sentence`` head's classifier.
    """
    own = {f"{PREFIX}{name}": weight for name, weight in heads.state_dict().items()}
    shapes_there = _shapes_by_head(state_dict)
    shapes_here = _shapes_by_head(own)
    unfit = {head for head, shapes in shapes_there.items() if shapes != shapes_here.get(head)}
    fresh = {_head(name) for name in own if name not in state_dict or _head(name) in unfit}

    source = pooler_in_checkpoint(state_dict)
    from_pooler = {}
    if source:
        for head, part in itertools.product(sorted(fresh), ("weight", "bias")):
            weight = state_dict[f"{PREFIX}{source}.dense.{part}"]
            mine = f"{PREFIX}{head}.dense.{part}"
            if mine in own and own[mine].shape == weight.shape:
                from_pooler[mine] = weight.clone()

    dropped = unfit
    if from_pooler:
        dropped = unfit - {source}
    for head in sorted(dropped):
        reason = "does not belong to this task"
        if head in heads:
            reason = "differs from the model's head in the number of outputs or layers"
        logger.warning("the checkpoint's classification head %s is dropped: it %s", head, reason)
    unfit_names = [name for name in state_dict if name.startswith(PREFIX) and _head(name) in unfit]
    for name in unfit_names:
        del state_dict[name]

    for head in sorted(fresh - unfit):
        logger.info("classification head %s is not in the checkpoint and is newly initialized", head)
    for name in sorted(from_pooler):
        logger.info("%s is initialized from the checkpoint's pooler", name)
    for name, weight in (own | from_pooler).items():
        state_dict.setdefault(name, weight)


def _shapes_by_head(weights: dict[str, Tensor]) -> dict[str, dict[str, torch.Size]]:
    found: dict[str, dict[str, torch.Size]] = {}
    for name, weight in weights.items():
        if name.startswith(PREFIX):
            found.setdefault(_head(name), {})[name] = weight.shape
    return found


def _head(name: str) -> str:
    return name.removeprefix(PREFIX).partition(".")[0]


class SavedHead(NamedTuple):
    """A head found in a checkpoint's weights: its number of outputs, and its type, a key of :data:`heads.HEADS`."""

    outputs: int
    type: str


def heads_in_checkpoint(state_dict: dict[str, Tensor]) -> dict[str, SavedHead]:
    """Return the classification heads found in the weights by name, including token-level heads."""
    found = {}
    for name, weight in state_dict.items():
        if name.startswith(PREFIX) and name.endswith((TO_CLASSES, *TO_TOKENS)):
            head_type = "linear"
            if f"{name.removesuffix(TO_CLASSES)}.dense.weight" in state_dict:
                head_type = "dense"
            for ending, on_tokens in TO_TOKENS.items():
                if name.endswith(ending):
                    head_type = on_tokens
            found[_head(name)] = SavedHead(weight.size(0), head_type)
    return found


def has_pooler(state_dict: dict[str, Tensor]) -> bool:
    """Return True if the weights include BERT's pooler, as opposed to a task's head with the same name."""
    name = f"{PREFIX}{POOLER}"
    return f"{name}.dense.weight" in state_dict and f"{name}.out_proj.weight" not in state_dict


def lm_head_never_trained(weights: Mapping[str, Tensor]) -> bool:
    """Return True if an encoder's masked-LM head was never trained, so its predictions are noise.

    The biases of an untrained head are exactly zero. The first update of the head changes them, but updates of other
    heads do not, with or without weight decay. The check therefore works for both checkpoints and exports, old and new.
    """
    biases = (weights.get(f"{LM_HEAD}{name}") for name in ("bias", "dense.bias", "layer_norm.bias"))
    return not any(bias.any() for bias in biases if bias is not None)


def pooler_in_checkpoint(state_dict: dict[str, Tensor]) -> Optional[str]:
    """Return the name of the head whose first layer was pre-trained as BERT's pooler; None if there is no such head."""
    if has_pooler(state_dict):
        return POOLER
    if f"{PREFIX}{NEXT_SENTENCE}.dense.weight" in state_dict:
        return NEXT_SENTENCE
    return None
