"""Causal decoders of tiny sizes, with weights large enough that everything shows."""

import torch
from torch import nn

from lazyformer_fairseq.modules.networks.causal_decoder import CausalDecoder

VOCABULARY = 50


def make_decoder(pattern: str, **options) -> CausalDecoder:
    torch.manual_seed(1)
    sizes = dict(vocab_size=VOCABULARY, embed_dim=16, ffn_embed_dim=24, num_heads=2, mem_len=64, cutoffs=(9, 30))
    decoder = CausalDecoder(pattern, **{**sizes, **options})
    for parameter in decoder.parameters():
        nn.init.normal_(parameter, std=0.3)
    return decoder.double().eval()


def random_tokens(batch: int, time: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (batch, time), generator=torch.Generator().manual_seed(2))
