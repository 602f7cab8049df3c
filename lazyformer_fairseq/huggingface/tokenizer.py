"""A tokenizer in a folder that AutoTokenizer loads: ours, one that came with another model, a causal model's."""

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
    tokenizer: TextTokenizer,
    folder: Path,
    max_length: Optional[int] = None,
    token_types: bool = False,
) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``, which AutoTokenizer reads; no code, and none is needed.

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
        fast = tokenizer.fast
        (folder / FAST_FILE).write_text(fast.to_str() + "\n", encoding="utf-8")
        added = sorted(fast.get_added_tokens_decoder().items())
        plain = {"lstrip": False, "normalized": True, "rstrip": False, "single_word": False}
        inputs = ["input_ids", "attention_mask"]
        if token_types:
            inputs.insert(1, "token_type_ids")
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **ROLES,
            "model_input_names": inputs,
            "clean_up_tokenization_spaces": False,
            "added_tokens_decoder": {
                str(index): {"content": token.content, "special": token.special, **plain} for index, token in added
            },
        }
    if max_length is not None:
        settings["model_max_length"] = max_length
    (folder / CONFIG_FILE).write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# Of a language model a text begins after the end of another, as lines of its data do.
CAUSAL_ROLES = {"bos_token": END, "eos_token": END, "pad_token": PADDING, "unk_token": UNKNOWN}
JOINS = "\U0010ff03"  # no word begins with it


def write_causal_tokenizer(dictionary: Dictionary, folder: Path) -> bool:
    """Write the tokenizer of a causal language model, whose dictionary says how its data were cut.

    Symbols are words between spaces, where the end of a line is ``</s>`` (WikiText); letters, where ``_`` is a space
    (text8); or the numbers of bytes (enwik8). ``</s>`` comes first, as before the prompt of ``lazyformer lm sample``.

    Args:
        dictionary: of the data.
        folder: must exist.

    Returns:
        Whether there is one: the colours of images are no text.
    """
    symbols = dictionary.symbols[dictionary.nspecial :]
    if all(symbol.startswith("#") for symbol in symbols):
        return False
    ids = {symbol: index for index, symbol in enumerate(dictionary.symbols)}
    special = dictionary.symbols[: dictionary.nspecial]
    one_by_one = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    if all(re.fullmatch("[0-9]{1,3}", symbol) for symbol in symbols):
        as_byte = bytes_to_unicode()
        ids = {symbol: ids[symbol] for symbol in special} | {as_byte[int(each)]: ids[each] for each in symbols}
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
        line_ends = decoders.Replace(Regex(f" ?{END} ?"), "\n")
        decoder_of_symbols = decoders.Sequence([decoders.WordPiece(JOINS, cleanup=False), decoders.Fuse(), line_ends])
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
    (folder / CONFIG_FILE).write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return True
