"""Writes a tokenizer of ours into a folder that AutoTokenizer loads."""

import json
from pathlib import Path
from typing import Any, Optional

import tokenizers
from tokenizers import AddedToken, processors

from lazyformer_fairseq.data.text.interface import TextTokenizer
from lazyformer_fairseq.data.text.library_tokenizer import LibraryTokenizer
from lazyformer_fairseq.data.text.normalisation import FIRST_SYMBOLS, MASK, UNKNOWN
from lazyformer_fairseq.data.text.tokenizer import BOS, EOS, MODEL_FILE, PAD, Tokenizer
from lazyformer_fairseq.huggingface.tokenizer.decoder import decoder
from lazyformer_fairseq.huggingface.tokenizer.normaliser import normaliser
from lazyformer_fairseq.huggingface.tokenizer.pieces import model, normalisers, pre_tokenizer, read_model

START, PADDING, END = (FIRST_SYMBOLS[index] for index in (BOS, PAD, EOS))
FAST_FILE, CONFIG_FILE = "tokenizer.json", "tokenizer_config.json"
# transformers' names of the symbols
ROLES = {
    "bos_token": START,
    "eos_token": END,
    "cls_token": START,
    "sep_token": END,
    "pad_token": PADDING,
    "unk_token": UNKNOWN,
    "mask_token": MASK,
}


def write_tokenizer(
    tokenizer: TextTokenizer, folder: Path, max_length: Optional[int] = None, token_types: bool = False
) -> None:
    """Writes ``tokenizer.json`` and ``tokenizer_config.json``, which AutoTokenizer reads; no code, and none is needed.

    Args:
        tokenizer: gives the same ids as what is written.
        folder: must exist.
        max_length: the longest input, in tokens, that truncation leaves.
        token_types: the model takes token types; ours are 0, those of BERT's own tokenizer 1 for a second text.

    Raises:
        UserError: pieces that Hugging Face's tokenizers do not have, in a SentencePiece model of the user's own.
    """
    if isinstance(tokenizer, LibraryTokenizer):
        tokenizer.write_for_transformers(folder, token_types)
        settings = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    else:
        fast = as_fast_tokenizer(tokenizer)
        (folder / FAST_FILE).write_text(fast.to_str() + "\n", encoding="utf-8")
        settings = _settings(fast, token_types)
    if max_length is not None:
        settings["model_max_length"] = max_length
    (folder / CONFIG_FILE).write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _settings(fast: tokenizers.Tokenizer, token_types: bool) -> dict[str, Any]:
    added = sorted(fast.get_added_tokens_decoder().items())
    plain = {"lstrip": False, "normalized": True, "rstrip": False, "single_word": False}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **ROLES,
        "model_input_names": ["input_ids", *(["token_type_ids"] if token_types else []), "attention_mask"],
        "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": {
            str(index): {"content": token.content, "special": token.special, **plain} for index, token in added
        },
    }


def as_fast_tokenizer(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    """The same tokenizer, as one of the ``tokenizers`` library; UserError as in :func:`write_tokenizer`."""
    proto = read_model(tokenizer.folder / MODEL_FILE)
    fast = tokenizers.Tokenizer(model(proto, tokenizer.symbols))
    fast.normalizer = normaliser(tokenizer.settings, normalisers(proto))
    fast.pre_tokenizer = pre_tokenizer()
    fast.post_processor = processors.TemplateProcessing(
        single=f"{START} $A {END}",
        pair=f"{START} $A {END} {END} $B {END}",
        special_tokens=[(START, BOS), (END, EOS)],
    )
    fast.decoder = decoder(tokenizer.settings)
    # Normalised, so that a text's <MASK> is found as well.
    fast.add_special_tokens([AddedToken(symbol, normalized=True, special=True) for symbol in (*FIRST_SYMBOLS, MASK)])
    fast.add_tokens([AddedToken(symbol, normalized=True) for symbol in tokenizer.settings.special_tokens])
    return fast
