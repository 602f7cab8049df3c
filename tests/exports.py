"""Tiny models of ours, exported, and the same in transformers."""

import functools
import importlib
import sys
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from helpers import dictionary_of
from torch import Tensor, nn

import lazyformer_fairseq
from lazyformer_fairseq import huggingface
from lazyformer_fairseq.evaluation.loading import model_of, tasks_of_heads
from lazyformer_fairseq.huggingface.code import write_code
from lazyformer_fairseq.huggingface.export import choose_head
from lazyformer_fairseq.huggingface.forms import Source, write_custom
from lazyformer_fairseq.modules.networks.masked_lm import MaskedLM
from lazyformer_fairseq.modules.networks.options import MaskedLMOptions
from lazyformer_fairseq.patterns.architectures import ARCHITECTURES

WORDS, POSITIONS = 40, 16
_numbers = count()


def tiny_model(head: str = "", labels: int = 2, arch: str = "lazyformer_m2x6_s_tiny", **options: Any) -> MaskedLM:
    """With random weights everywhere, biases and norms too; `head` is a type, a name of pre-training, "" for none."""
    torch.manual_seed(1)
    row = ARCHITECTURES[arch].options()
    options = MaskedLMOptions(**{**row, "max_positions": POSITIONS, "attention_backend": "eager", **options})
    model = model_of(options, dictionary_of(WORDS))
    if head == "pooler":
        model.register_pooler()
    elif head == "next_sentence":
        model.register_next_sentence_head()
    elif head:
        model.register_classification_head("cola", labels, head)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.2)
    return model.eval()


def source_of(model: MaskedLM) -> Source:
    """As reading its checkpoint would give it."""
    tokenizer = SimpleNamespace(dictionary=dictionary_of(WORDS), mask_index=WORDS - 1)
    weights, path = model.state_dict(), Path("tiny.pt")
    return Source(model, tokenizer, choose_head(weights, None, path, tasks_of_heads({"model": weights}, path)))


def export_custom(model: MaskedLM, folder: Path) -> Path:
    """Config, weights and code, without a tokenizer."""
    folder.mkdir(exist_ok=True)
    write_custom(source_of(model), folder)
    return folder


def code_in(folder: Path) -> ModuleType:
    """Return the classes by the code that was exported, loaded anew."""
    name = f"exported_{next(_numbers)}"
    package = sys.modules[name] = ModuleType(name)
    package.__path__ = [str(folder)]
    return importlib.import_module(f"{name}.modeling_lazyformer")


@functools.cache
def code_of(pattern: str) -> ModuleType:
    """Return the classes by the exported code of a pattern."""
    with TemporaryDirectory() as folder:
        write_code(pattern, Path(folder))
        return code_in(Path(folder))


SIZES = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": WORDS}
OF_ENCODERS = {"max_position_embeddings": 12, "type_vocab_size": 2, "num_labels": 3}


def fresh_model(name: str, pattern: str = "(sflf)x2") -> nn.Module:
    """Build a model of transformers with our networks and fresh weights."""
    torch.manual_seed(1)
    if name == "LazyFormerForCausalLM":
        config = lazyformer_fairseq.LazyFormerCausalConfig(sublayer_pattern=pattern, **SIZES)
        return lazyformer_fairseq.LazyFormerForCausalLM(config)
    config = lazyformer_fairseq.LazyFormerConfig(sublayer_pattern=pattern, **SIZES, **OF_ENCODERS)
    return getattr(huggingface, name)(config)


def some_ids(left: int = 0, right: int = 0, time: int = 11) -> Tensor:
    """(3, T); the second row is padded."""
    ids = torch.randint(4, WORDS, (3, time), generator=torch.Generator().manual_seed(2))
    ids[:, 0] = 0
    if left or right:
        ids[1, :left], ids[1, left], ids[1, time - right :] = 1, 0, 1
    return ids
