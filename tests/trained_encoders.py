"""Encoders with random weights, as if trained, in place of ones that take hours."""

from dataclasses import replace
from pathlib import Path
from typing import Optional

import torch
from helpers import dictionary_of
from torch import Tensor, nn

from lazyformer_fairseq.data.text.dictionary_file import Dictionary
from lazyformer_fairseq.data.text.tokenizer import Tokenizer
from lazyformer_fairseq.evaluation.export import write_model
from lazyformer_fairseq.evaluation.inference import TrainedModel
from lazyformer_fairseq.evaluation.loading import model_of
from lazyformer_fairseq.modules.networks.options import MaskedLMOptions
from lazyformer_fairseq.training.warm_start.start import SUBLAYERS, Trained, WarmStart

WORDS, WIDTH, HEADS, POSITIONS = 43, 16, 4, 12


def trained(pattern: str, seed: int = 1, dictionary: Optional[Dictionary] = None, **options) -> Trained:
    """Weights far from those of an initialisation, so that every part of them shows in the output."""
    sizes = {"encoder_embed_dim": WIDTH, "encoder_ffn_embed_dim": 24, "encoder_attention_heads": HEADS}
    cfg = MaskedLMOptions(
        **{"sublayer_pattern": pattern, "max_positions": POSITIONS, "relative_position_buckets": 8, **sizes, **options}
    )
    torch.manual_seed(seed)
    dictionary = dictionary or dictionary_of(WORDS)
    model = model_of(cfg, dictionary)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return Trained(cfg, model.state_dict(), dictionary)


def changed(old: Trained, **weights: Tensor) -> Trained:
    """The same with other weights: ``changed(old, **{"2.inner.fc1.bias": ...})``, by place."""
    own = {f"{SUBLAYERS}{name}": weight for name, weight in weights.items()}
    return replace(old, weights={**old.weights, **own})


def tokens(batch: int = 3, time: int = POSITIONS, seed: int = 2) -> Tensor:
    return torch.randint(4, WORDS, (batch, time), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(of: Trained | WarmStart, tokens_BT: Tensor) -> Tensor:
    """(B, T, V), in double precision."""
    model = (of.new if isinstance(of, WarmStart) else of).build().double()
    return model(tokens_BT)[0]


def largest_difference(one: Trained | WarmStart, other: Trained | WarmStart, tokens_BT: Tensor) -> float:
    return float((logits(one, tokens_BT) - logits(other, tokens_BT)).abs().max())


def write_encoder(folder: Path, data_folder: Path, pattern: str, *head: object, **options) -> Path:
    """A folder as `lazyformer export` writes it, with the tokenizer of another. Returns `folder`."""
    tokenizer = Tokenizer.load(data_folder / "tokenizer")
    model = trained(pattern, dictionary=tokenizer.dictionary, **{"max_positions": 32, **options}).build()
    if head:
        model.register_classification_head(*head)
    folder.mkdir(exist_ok=True)
    write_model(TrainedModel(model, tokenizer), folder)
    return folder
