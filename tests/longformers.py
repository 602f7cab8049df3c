"""Tiny networks of windows in float64, with weights so large that a wrong key shows."""

import torch
from torch import Tensor, nn

from lazyformer_fairseq.modules.networks.causal_decoder import CausalDecoder
from lazyformer_fairseq.modules.networks.encoder import Encoder

C, N, D = 12, 3, 4


def make_encoder(pattern: str, **options) -> Encoder:
    """Blocks alone, which take embeddings; weights are large enough that a wrong key shows."""
    torch.manual_seed(1)
    options = {"relative_position_buckets": 0, "attention_backend": "eager", **options}
    encoder = Encoder(pattern, None, C, 20, N, **options).double().eval()
    for parameter in encoder.parameters():
        nn.init.normal_(parameter, std=0.4)
    return encoder


def make_decoder(pattern: str, **options) -> CausalDecoder:
    torch.manual_seed(1)
    decoder = (
        CausalDecoder(pattern, 17, C, 20, N, **{"mem_len": 0, "attention_backend": "eager", **options}).double().eval()
    )
    for parameter in decoder.parameters():
        nn.init.normal_(parameter, std=0.4)
    return decoder


def inputs(batch: int, time: int, seed: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, time, C, generator=generator, dtype=torch.double)


def first_text(mask_BK: Tensor, count: int) -> Tensor:
    """True at the first so many tokens that are no padding."""
    return ~mask_BK & ((~mask_BK).cumsum(-1) <= count)


def in_window(query: int, key: int, window: int, step: int, causal: bool) -> bool:
    ahead = key - query
    return ahead % step == 0 and abs(ahead) <= window * step and not (causal and ahead > 0)
