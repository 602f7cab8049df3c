"""Tiny models with random weights in folders as the Hub has them, made by transformers itself, without a download."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
DISTIL_SIZES = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48}
LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORDS = [*"the cat sat on mat dog ran big red house . ,".split(), *LETTERS, *(f"##{letter}" for letter in LETTERS)]
ROWS = 80  # of the word embedding: more than the tokenizer has
MODERN_ROWS = 320
BYTE_PIECES = ["<s>", "<pad>", "</s>", "<unk>", *LETTERS, "Ġ", ".", "th", "the", "Ġthe", "Ġc", "at", "<mask>"]
MERGES = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("Ġ", "c"), ("a", "t")]
WORD_PIECES = ["[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]


def save_tiny(folder: Path, class_name: str = "BertForMaskedLM", seed: int = 1, **options: Any) -> torch.nn.Module:
    """Saves a model of a class of transformers with its tokenizer; returns it, in evaluation mode.

    Weights are drawn wide enough for differences to show, biases and LayerNorms too.
    """
    import transformers  # takes seconds

    model_class = getattr(transformers, class_name)
    is_distil, is_roberta, is_modern = (class_name.startswith(name) for name in ("Distil", "Roberta", "Modern"))
    sizes: dict[str, Any] = {**(DISTIL_SIZES if is_distil else SIZES), "vocab_size": ROWS}
    sizes |= {"pad_token_id": 1 if is_roberta else 0, "max_position_embeddings": 18 if is_roberta else 16}
    if is_modern:
        sizes |= {"vocab_size": MODERN_ROWS, "local_attention": 6, "num_hidden_layers": 4, "intermediate_size": 24}
        sizes |= {f"{name}_token_id": 290 + place for place, name in enumerate(("cls", "sep", "pad"), 1)}
        sizes |= {"bos_token_id": 291, "eos_token_id": 292}
    config = model_class.config_class(**{**sizes, **options})
    torch.manual_seed(seed)
    model = model_class(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(
                torch.randn_like(weight) * (0.2 if is_modern else 0.3)
                + ("norm" in name.lower() and name.endswith("weight"))
            )
    model.save_pretrained(folder)
    if is_modern:
        write_modern(folder)
    elif is_roberta:
        write_byte_level(folder, {symbol: number for number, symbol in enumerate(BYTE_PIECES)}, MERGES)
    else:
        write_word_pieces(folder, {piece: number for number, piece in enumerate(WORD_PIECES)})
    return model


def write_word_pieces(folder: Path, vocabulary: dict[str, int]) -> None:
    """Write tokenizer.json of a BERT."""
    of_words = {"unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
    usual = {"clean_text": True, "handle_chinese_chars": True, "strip_accents": None, "lowercase": True}
    values = {
        "added_tokens": [],
        "normalizer": {"type": "BertNormalizer", **usual},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "model": {"type": "WordPiece", "vocab": vocabulary, **of_words},
    }
    (folder / "tokenizer.json").write_text(json.dumps(values))


def write_byte_level(folder: Path, vocabulary: dict[str, int], merges: Sequence[tuple[str, str]]) -> None:
    """Write tokenizer.json of a RoBERTa."""
    values = {
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": list(merges)},
    }
    (folder / "tokenizer.json").write_text(json.dumps(values))


def write_modern(folder: Path) -> None:
    """ModernBERT's tokenizer, small: byte-level BPE, its special symbols behind it, and before these runs of spaces."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    library = Tokenizer(models.BPE())
    library.normalizer, library.decoder = normalizers.NFC(), decoders.ByteLevel()
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet, show_progress=False)
    library.train_from_iterator(["the cat sat on the mat", "the red house, a big dog ran."] * 9, trainer)
    assert library.get_vocab_size() == 280
    library.add_tokens([AddedToken(" " * count, normalized=True) for count in range(11, 1, -1)])
    symbols = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"]
    library.add_special_tokens([AddedToken(symbol, lstrip=symbol == "[MASK]") for symbol in symbols])
    library.add_tokens([AddedToken("[unused0]")])
    around = [("[CLS]", 291), ("[SEP]", 292)]
    library.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", "[CLS] $A [SEP] $B [SEP]", around)
    library.save(str(folder / "tokenizer.json"))
    roles = {f"{symbol[1:-1].lower()}_token": symbol for symbol in symbols}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **roles}))
