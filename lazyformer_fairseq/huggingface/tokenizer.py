"""Exports our own tokenizers, imported tokenizers and causal models' tokenizers to folders that AutoTokenizer loads."""

import json
import re
from pathlib import Path
from typing import Optional

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from transformers.convert_slow_tokenizer import bytes_to_unicode

from lazyformer_fairseq.data.text.dictionary_file import Dictionary
from lazyformer_fairseq.data.text.interface import TextTokenizer
from lazyformer_fairseq.data.text.library_tokenizer import LibraryTokenizer
from lazyformer_fairseq.data.text.normalisation import BOS, EOS, FIRST_SYMBOLS, MASK, PAD, UNKNOWN

START, PADDING, END = (FIRST_SYMBOLS[index] for index in (BOS, PAD, EOS))
FAST_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
# Our special symbols, by their names in transformers.
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
    tokenizer: TextTokenizer,
    folder: Path,
    max_length: Optional[int] = None,
    token_types: bool = False,
) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``, which AutoTokenizer reads without custom code.

    Args:
        tokenizer: The tokenizer; the written one produces the same ids.
        folder: An existing folder.
        max_length: The number of tokens to which inputs are truncated; None for no limit.
        token_types: Whether the model has token types. Our tokenizers set them all to 0, whereas an imported BERT
            tokenizer sets a second text's token types to 1.

    Raises:
        UserError: A user's SentencePiece model has tokens that Hugging Face's tokenizers do not support.
    """
    if isinstance(tokenizer, LibraryTokenizer):
        tokenizer.write_for_transformers(folder, token_types)
        settings = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    else:
        fast = tokenizer.fast
        (folder / FAST_FILE).write_text(fast.to_str() + "\n", encoding="utf-8")
        plain = {"lstrip": False, "normalized": True, "rstrip": False, "single_word": False}
        added = {}
        for index, token in sorted(fast.get_added_tokens_decoder().items()):
            added[str(index)] = {"content": token.content, "special": token.special, **plain}
        inputs = ["input_ids", "attention_mask"]
        if token_types:
            inputs.insert(1, "token_type_ids")
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **ROLES,
            "model_input_names": inputs,
            "clean_up_tokenization_spaces": False,
            "added_tokens_decoder": added,
        }
    if max_length is not None:
        settings["model_max_length"] = max_length
    text = json.dumps(settings, indent=2, ensure_ascii=False)
    (folder / CONFIG_FILE).write_text(f"{text}\n", encoding="utf-8")


# A causal model's text begins after the end of another text, like every line of its training data.
CAUSAL_ROLES = {"bos_token": END, "eos_token": END, "pad_token": PADDING, "unk_token": UNKNOWN}
JOINS = "\U0010ff03"  # a prefix that no word has, which keeps the decoder from joining words


def write_causal_tokenizer(dictionary: Dictionary, folder: Path) -> bool:
    """Write a causal language model's tokenizer.

    The dictionary reveals how the training data was split. Its symbols are either words (as in WikiText, where spaces
    separate words and ``</s>`` ends a line), letters (as in text8, where ``_`` stands for a space) or byte values (as
    in enwik8). A text begins with ``</s>``, like the prompt in ``lazyformer lm sample``.

    Args:
        dictionary: The training data's dictionary.
        folder: An existing folder.

    Returns:
        Whether a tokenizer was written. Image models, which predict colors, have none.
    """
    symbols = dictionary.symbols[dictionary.nspecial :]
    if all(symbol.startswith("#") for symbol in symbols):
        return False
    ids = {symbol: index for index, symbol in enumerate(dictionary.symbols)}
    special = dictionary.symbols[: dictionary.nspecial]
    one_by_one = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    if all(re.fullmatch("[0-9]{1,3}", symbol) for symbol in symbols):
        as_byte = bytes_to_unicode()
        of_special = {symbol: ids[symbol] for symbol in special}
        of_bytes = {as_byte[int(symbol)]: ids[symbol] for symbol in symbols}
        ids = of_special | of_bytes
        steps = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), one_by_one]
        normaliser = None
        decoder_of_symbols = decoders.ByteLevel()
    elif all(len(symbol) == 1 for symbol in symbols):
        steps = [one_by_one]
        normaliser = normalizers.Replace(" ", "_")
        decoder_of_symbols = decoders.Sequence([decoders.Fuse(), decoders.Replace("_", " ")])
    else:
        steps = [pre_tokenizers.WhitespaceSplit()]
        normaliser = normalizers.Replace("\n", f" {END} ")
        join_words = decoders.WordPiece(JOINS, cleanup=False)
        restore_line_ends = decoders.Replace(Regex(f" ?{END} ?"), "\n")
        decoder_of_symbols = decoders.Sequence([join_words, decoders.Fuse(), restore_line_ends])
    fast = tokenizers.Tokenizer(models.WordLevel(ids, UNKNOWN))
    fast.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if normaliser is not None:
        fast.normalizer = normaliser
    fast.decoder = decoder_of_symbols
    fast.post_processor = processors.TemplateProcessing(single=f"{END} $A", special_tokens=[(END, EOS)])
    fast.add_special_tokens([AddedToken(symbol, normalized=True, special=True) for symbol in special])
    (folder / FAST_FILE).write_text(fast.to_str() + "\n", encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **CAUSAL_ROLES,
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
    }
    text = json.dumps(settings, indent=2, ensure_ascii=False)
    (folder / CONFIG_FILE).write_text(f"{text}\n", encoding="utf-8")
    return True
