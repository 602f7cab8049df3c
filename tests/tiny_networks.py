"""Tiny networks in float64, with weights so large that whatever is computed wrongly shows, and inputs for them."""

from pathlib import Path
from types import ModuleType

import torch
from helpers import load_script
from torch import Tensor, nn

from lazyformer_fairseq.modules.networks.causal_decoder import CausalDecoder
from lazyformer_fairseq.modules.networks.encoder import Encoder

WIDTH, HEADS, WORDS = 12, 3, 17


def loud(module: nn.Module, std: float = 0.5) -> nn.Module:
    """Draws all weights anew, biases and LayerNorms too."""
    torch.manual_seed(1)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=std)
    return module.double().eval()


def make_encoder(pattern: str, **options) -> Encoder:
    """Blocks alone, which take embeddings, unless options say otherwise."""
    sizes = dict(vocab_size=None, embed_dim=WIDTH, ffn_embed_dim=20, num_heads=HEADS, relative_position_buckets=0)
    return loud(Encoder(pattern, **{**sizes, "attention_backend": "eager", **options}), 0.4)


def make_decoder(pattern: str, **options) -> CausalDecoder:
    sizes = dict(vocab_size=WORDS, embed_dim=WIDTH, ffn_embed_dim=20, num_heads=HEADS, mem_len=64)
    return loud(CausalDecoder(pattern, **{**sizes, "attention_backend": "eager", **options}), 0.4)


def vectors(batch: int, time: int, seed: int = 2, width: int = WIDTH) -> Tensor:
    return torch.randn(batch, time, width, generator=torch.Generator().manual_seed(seed), dtype=torch.double)


def random_tokens(batch: int, time: int) -> Tensor:
    return torch.randint(2, WORDS, (batch, time), generator=torch.Generator().manual_seed(2))


def fairseqs_example(place: str) -> ModuleType:
    """A file that is installed with fairseq; importing its package would register a model."""
    import fairseq

    return load_script(Path(fairseq.__file__).parent / "examples" / place)
