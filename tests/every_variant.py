"""Every attention variant, with settings short enough for a dozen tokens and two heads, in tiny networks."""

import pytest
import torch
from torch import Tensor

from lazyformer_fairseq.modules.attention import BACK_ENDS, AttentionCall
from lazyformer_fairseq.modules.networks.causal_decoder import CausalDecoder, init_transformer_xl_weights
from lazyformer_fairseq.modules.networks.encoder import Encoder
from lazyformer_fairseq.modules.networks.stack import Stack
from lazyformer_fairseq.patterns.attention_variants import ATTENTION_VARIANTS, AttentionVariant
from lazyformer_fairseq.patterns.kinds import CAUSAL, ENCODER

# By the name of a row one or more settings of an s, short enough for a dozen tokens and two heads.
EXAMPLES = {
    "window": ["window=2", "window=1,dilation=2,dilated_heads=1", "window=2,global=1"],
    "strided": ["strided=3", "strided=3,heads=split", "strided=3,part=summary"],
    "fixed": ["fixed=4,summary=1", "fixed=4,part=local", "fixed=4,summary=1,part=summary"],
    "synthesizer": ["synthesizer=dense", "synthesizer=random", "synthesizer=dense+dot"],
    "span": ["span=4,ramp=2"],
    "persistent": ["persistent=3", "persistent=3,rope=100"],
    "entmax": ["entmax=1.5", "entmax=learned"],
    "buckets": ["buckets=4,rounds=2,chunk=4", "buckets=4,rounds=2,chunk=4,rope=100"],
    "qk_norm": ["qk_norm", "qk_norm,rope=100", "window=2,global=1,qk_norm"],
    "rope": ["rope=100", "window=2,global=1,rope=100"],
    "positions": ["positions=absolute"],
    "linformer": ["linformer=3", "linformer=3,share=none", "linformer=3,share=kv", "linformer=3,share=layers"],
}
ON_A_CPU = tuple(name for name, row in BACK_ENDS.items() if row.why_not(AttentionCall(), "cpu", torch.float64) is None)
TOKENS, WORDS, WIDTH, HEADS = 12, 17, 16, 2


def rows(direction: str) -> list[AttentionVariant]:
    return [
        row for row in ATTENTION_VARIANTS if not (row.why_not_encoder if direction == ENCODER else row.why_not_causal)
    ]


def examples(row: AttentionVariant, direction: str) -> list[str]:
    """Those of a row; a causal synthesizer has to know its longest input."""
    added = f",length={TOKENS}" if direction == CAUSAL and row.name == "synthesizer" else ""
    return [settings + added for settings in EXAMPLES.get(row.name, [])]


CASES = [
    pytest.param(direction, f"s[{settings}]", id=f"{direction} {settings}")
    for direction in (ENCODER, CAUSAL)
    for row in rows(direction)
    for settings in examples(row, direction)
]
of_each_variant = pytest.mark.parametrize(("direction", "s"), CASES)
of_each_row = pytest.mark.parametrize(
    ("direction", "s"),
    [(direction, f"s[{examples(row, direction)[0]}]") for direction in (ENCODER, CAUSAL) for row in rows(direction)],
)
ENCODERS = [case.values[1] for case in CASES if case.values[0] == ENCODER]
of_encoders = pytest.mark.parametrize("s", ENCODERS)


def build(direction: str, pattern: str, **options) -> Stack:
    """A tiny network of embeddings, in double precision, with the weights that it gets by itself."""
    torch.manual_seed(1)
    sizes = (WIDTH, 8, options.pop("num_heads", HEADS))
    if direction == ENCODER:
        given = {"max_positions": TOKENS, "relative_position_buckets": 0, "attention_backend": "eager", **options}
        return Encoder(pattern, WORDS, *sizes, **given).double().eval()
    decoder = CausalDecoder(pattern, WORDS, *sizes, **{"mem_len": 0, "attention_backend": "eager", **options})
    return decoder.apply(init_transformer_xl_weights).double().eval()


def tokens(batch: int = 2, time: int = TOKENS) -> Tensor:
    return torch.randint(2, WORDS, (batch, time), generator=torch.Generator().manual_seed(2))


def run(network: Stack, tokens_BT: Tensor, *padding: Tensor) -> Tensor:
    """Features; what is drawn in a forward pass, such as buckets, is drawn alike in each."""
    torch.manual_seed(3)
    return network(tokens_BT, *padding)[0]


def assert_alike(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-9)
