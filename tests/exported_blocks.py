"""The exported sublayers of a pattern with the weights of ours, in tiny networks that take embeddings."""

from typing import Any, Optional

import torch
from every_kind import EXAMPLES, HEADS, TOKENS, WIDTH
from exports import code_of_every_kind
from torch import Tensor, nn

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.huggingface.merge import plan_as_json
from lazyformer_fairseq.modules.networks.encoder import Encoder
from lazyformer_fairseq.modules.sublayers.attention_variant import variant_classes
from lazyformer_fairseq.patterns.attention_kinds import ATTENTION_KINDS, with_defaults
from lazyformer_fairseq.patterns.grammar import plan, read_sublayer

BATCH, FFN = 3, 8
# Beside every_kind's: what encoders alone may have, and sums.
MORE = {
    "window": ["window=2,global=2", "window=2,global=given", "window=2,dilation=2"],
    "strided": ["strided=3,part=local"],
    "fixed": ["fixed=4,summary=1,heads=split"],
    "synthesizer": [
        "synthesizer=fixed",
        "synthesizer=factorised_dense",
        "synthesizer=factorised_random,rank=2",
        "synthesizer=factorised_random+dot,rank=2,persistent=3",
        "synthesizer=random+dense+factorised_dense+factorised_random",
    ],
    "span": ["span=3,ramp=1", "span=100"],
    "buckets": ["buckets=2,chunk=3", "buckets=8,rounds=3,chunk=5", "buckets=4"],
    "entmax": ["entmax=2", "entmax=1.01"],
}
KINDS = [row.name for row in ATTENTION_KINDS]
SETTINGS = ["", *(each for name in KINDS for each in EXAMPLES.get(name, []) + MORE.get(name, []))]


class Exported(nn.Module):
    """The sublayers, and what a model puts around them."""

    def __init__(self, pattern: str, buckets: int, **options: Any):
        super().__init__()
        self.code = code_of_every_kind()
        self.config = self.code.LazyFormerConfig(
            hidden_size=WIDTH,
            intermediate_size=FFN,
            num_attention_heads=HEADS,
            max_position_embeddings=TOKENS,
            plan=plan_as_json(pattern),
            hidden_dropout_prob=0.0,
            relative_position_buckets=buckets,
            **options,
        )
        self.sublayers = self.code.build_sublayers(self.config)
        self.relative_position_bias = self.code.RelativePositionBias(HEADS, buckets) if buckets else None
        self.checkpoint = None

    def forward(
        self,
        x_BTC: Tensor,
        padding_mask_BT: Optional[Tensor] = None,
        global_positions_BT: Optional[Tensor] = None,
        attention: str = "eager",
        output_attentions: bool = False,
    ) -> tuple[Tensor, list[Tensor]]:
        """The last output, and attention probabilities."""
        bias = self.relative_position_bias
        scores = self.code.Scores() if bias is None else bias(x_BTC.size(1))
        if padding_mask_BT is not None:
            scores = scores.with_padding(padding_mask_BT, is_on_right=False)
        if global_positions_BT is not None:
            scores = scores.with_given(global_positions_BT)
        attention = "eager" if output_attentions else attention
        x_BTC, _, probabilities = self.code.run_sublayers(
            self.sublayers, x_BTC, scores, attention, output_attentions, self.checkpoint
        )
        return x_BTC, probabilities


def both(pattern: str, buckets: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Encoder, Exported]:
    """Ours and the exported one, with the same weights, none of them 0."""
    torch.manual_seed(1)
    given = {"max_positions": TOKENS, "relative_position_buckets": buckets, "attention_backend": "eager"}
    ours = Encoder(pattern, None, WIDTH, FFN, HEADS, **given)
    for weight in ours.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    exported = Exported(pattern, buckets)
    exported.load_state_dict(ours.state_dict())
    return ours.to(dtype).eval(), exported.to(dtype).eval()


def embeddings(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(BATCH, TOKENS, WIDTH, generator=torch.Generator().manual_seed(2)).to(dtype)


def padding(where: str) -> Optional[Tensor]:
    """(B, T), True at padding: on "none", "right", "left" or "both" sides, of other lengths in each row; or "a row"."""
    mask = torch.zeros(BATCH, TOKENS, dtype=torch.bool)
    if where == "none":
        return None
    mask[1] = where == "a row"
    for row in range(1, BATCH):
        if where in ("right", "both"):
            mask[row, TOKENS - 2 * row :] = True
        if where in ("left", "both"):
            mask[row, : row + 1] = True
    return mask


def combined() -> list[str]:
    """For every two kinds that may stand together, settings of both."""
    found = []
    for number, name in enumerate(KINDS):
        for other in KINDS[:number]:
            together = f"{EXAMPLES[other][-1]},{EXAMPLES[name][-1]}"
            try:
                plan(f"s[{together}]", "encoder")
            except UserError:
                continue
            found.append(together)
    return found


def pattern_of(settings: str) -> str:
    """An s, and what can read it."""
    s = f"s[{settings}]" if settings else "s"
    try:
        plan(f"{s}k", "encoder")
    except UserError:
        return f"{s}fl{s}l"
    return f"{s}flk{s}kl"


def buckets_of(settings: str) -> int:
    """Of T5's bias: where a kind can have it, it has it."""
    values = read_sublayer(f"s[{settings}]").values if settings else with_defaults(())
    return 0 if any("bias" in choice.refuses for choice in variant_classes(values)) else 8


def given(settings: str) -> Optional[Tensor]:
    if "given" not in settings:
        return None
    return torch.rand(BATCH, TOKENS, generator=torch.Generator().manual_seed(4)) < 0.3
