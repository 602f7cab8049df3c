"""Tiny models with random weights in folders as the Hub has them, made by transformers itself, without a download."""

import json
from pathlib import Path
from typing import Any

import torch

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
DISTIL_SIZES = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48}
LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORDS = [*"the cat sat on mat dog ran big red house . ,".split(), *LETTERS, *(f"##{letter}" for letter in LETTERS)]
ROWS = 80  # of the word embedding: more than the tokenizer has
WORD_PIECES = ["[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]


def save_tiny(folder: Path, kind: str = "BertForMaskedLM", seed: int = 1, **options: Any) -> torch.nn.Module:
    """Saves a model of a class of transformers with its tokenizer; returns it, in evaluation mode.

    Weights are drawn wide enough for differences to show, biases and LayerNorms too.
    """
    import transformers  # takes seconds

    model_class = getattr(transformers, kind)
    is_distil, is_roberta = kind.startswith("Distil"), kind.startswith("Roberta")
    sizes: dict[str, Any] = {**(DISTIL_SIZES if is_distil else SIZES), "vocab_size": ROWS}
    sizes |= {"pad_token_id": 1 if is_roberta else 0, "max_position_embeddings": 18 if is_roberta else 16}
    config = model_class.config_class(**{**sizes, **options})
    torch.manual_seed(seed)
    model = model_class(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.randn_like(weight) * 0.3 + ("norm" in name.lower() and name.endswith("weight")))
    model.save_pretrained(folder)
    (write_byte_level if is_roberta else write_word_pieces)(folder)
    return model


def write_word_pieces(folder: Path) -> None:
    """BERT's tokenizer as the oldest folders have it."""
    (folder / "vocab.txt").write_text("".join(f"{piece}\n" for piece in WORD_PIECES))
    (folder / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": True}))


def write_byte_level(folder: Path) -> None:
    """RoBERTa's tokenizer, of few letters, as its oldest folders have it."""
    symbols = ["<s>", "<pad>", "</s>", "<unk>", *LETTERS, "Ġ", ".", "th", "the", "Ġthe", "Ġc", "at", "<mask>"]
    merges = ["t h", "th e", "Ġ the", "Ġ c", "a t"]
    (folder / "vocab.json").write_text(json.dumps({symbol: number for number, symbol in enumerate(symbols)}))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{merge}\n" for merge in merges))
