"""Checks that a checkpoint's weights and dictionary are those that a model needs."""

import hashlib

import torch
from torch import Tensor

from lazyformer_fairseq.errors import UserError

PER_WORD = "encoder.sentence_encoder.embed_tokens.weight"  # the encoder's weight with a row for each word


def dictionary_hash(dictionary) -> Tensor:
    """SHA-256 of the symbols in order, 32 bytes. It travels with the weights: ids mean nothing under other symbols.

    Counts do not matter: they are statistics of a corpus.
    """
    digest = hashlib.sha256("\n".join(dictionary.symbols).encode()).digest()
    return torch.tensor(list(digest), dtype=torch.uint8)


def check_same_weights(loaded: dict[str, Tensor], own: dict[str, Tensor], per_word: str) -> None:
    """Raises a UserError that names the first difference between a checkpoint's weights and dictionary and the model's.

    Without it fairseq says "please ensure that the architectures match" and nothing more.

    Args:
        loaded: the checkpoint's weights.
        own: the model's.
        per_word: name of a weight with a row for each word.
    """
    if per_word in loaded and loaded[per_word].size(0) != own[per_word].size(0):
        raise UserError(
            f"the checkpoint was trained with a dictionary of {loaded[per_word].size(0)} symbols, this run's has "
            f"{own[per_word].size(0)}; use the tokenizer and data that the checkpoint was trained with"
        )
    ours = own["dictionary_sha256"]
    if not torch.equal(loaded.get("dictionary_sha256", ours).to(ours.device), ours):
        raise UserError(
            "the checkpoint was trained with another dictionary, of the same size but with other symbols or another "
            "order; use the tokenizer and data that the checkpoint was trained with"
        )
    advice = "give the --arch, --sublayer-pattern and sizes that the checkpoint was trained with"
    for name, weight in own.items():
        if name not in loaded:
            raise UserError(f"the checkpoint has no weight {name}; {advice}")
        if loaded[name].shape != weight.shape:
            raise UserError(
                f"the checkpoint's {name} is {tuple(loaded[name].shape)}, the model's {tuple(weight.shape)}; {advice}"
            )
    for name in loaded:
        if name not in own:
            raise UserError(f"the checkpoint has a weight {name} that this model lacks; {advice}")
