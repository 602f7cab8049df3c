"""The exported sublayers of a pattern with the weights of ours, in tiny networks that take embeddings."""

import importlib
from typing import Any, Optional

import torch
from every_kind import HEADS, TOKENS, WIDTH
from torch import Tensor, nn

from lazyformer_fairseq.huggingface import modelling
from lazyformer_fairseq.huggingface.modelling.configuration import LazyFormerConfig
from lazyformer_fairseq.huggingface.modelling.interface import Shared
from lazyformer_fairseq.huggingface.modelling.stack import RelativePositionBias, build_sublayers, run_sublayers
from lazyformer_fairseq.modules.networks.encoder import Encoder
from lazyformer_fairseq.patterns.attention_kinds import chosen_kinds
from lazyformer_fairseq.patterns.grammar import plan

BATCH, FFN = 3, 8
for _part in (
    "self_attention lazy_attention shared_keys feed_forward identity kinds.window kinds.sparse kinds.linformer "
    "kinds.synthesizer kinds.span kinds.persistent kinds.entmax kinds.reformer"
).split():
    importlib.import_module(f"{modelling.__name__}.{_part}")


def planned(pattern: str) -> list[dict[str, Any]]:
    """As the exporter writes it."""
    found = plan(pattern, "encoder")
    written = []
    for each in found:
        rows = chosen_kinds(each.values)
        settings = {setting.name: each.values[setting.name] for row in rows for setting in row.settings}
        giver = None
        if each.giver is not None:
            giver = max(i for i, other in enumerate(found[: len(written)]) if other.kind.hands_on)
        written.append(
            {
                "letter": each.kind.letter,
                "kinds": [row.name for row in rows],
                "settings": settings,
                "readers": list(each.readers),
                "giver": giver,
            }
        )
    return written


class Exported(nn.Module):
    """The sublayers, and what a model puts around them."""

    def __init__(self, pattern: str, buckets: int, **options: Any):
        super().__init__()
        self.config = LazyFormerConfig(
            hidden_size=WIDTH,
            intermediate_size=FFN,
            num_attention_heads=HEADS,
            max_position_embeddings=TOKENS,
            plan=planned(pattern),
            hidden_dropout_prob=0.0,
            relative_position_buckets=buckets,
            **options,
        )
        self.sublayers = build_sublayers(self.config)
        self.relative_position_bias = RelativePositionBias(self.config) if buckets else None

    def forward(
        self,
        x_BTC: Tensor,
        padding_mask_BT: Optional[Tensor] = None,
        global_positions_BT: Optional[Tensor] = None,
        attention: str = "eager",
        output_attentions: bool = False,
    ) -> tuple[Tensor, list[Tensor]]:
        """The last output, and attention probabilities."""
        bias = None if self.relative_position_bias is None else self.relative_position_bias(x_BTC.size(1))
        shared = Shared.of(
            padding_mask_BT,
            bias,
            global_positions_BT=global_positions_BT,
            output_attentions=output_attentions,
            attention=attention,
        )
        x_BTC, _, probabilities = run_sublayers(self.sublayers, x_BTC, shared)
        return x_BTC, probabilities


def both(pattern: str, buckets: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Encoder, Exported]:
    """Ours and the exported one, with the same weights, none of them 0."""
    torch.manual_seed(1)
    ours = Encoder(
        pattern, None, WIDTH, FFN, HEADS, max_positions=TOKENS, relative_position_buckets=buckets, lazy_backend="eager"
    )
    for weight in ours.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    weights = {name: weight for name, weight in ours.state_dict().items()}
    exported = Exported(pattern, buckets)
    exported.load_state_dict(weights)
    return ours.to(dtype).eval(), exported.to(dtype).eval()


def embeddings(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(BATCH, TOKENS, WIDTH, generator=torch.Generator().manual_seed(2)).to(dtype)


def padding(where: str) -> Optional[Tensor]:
    """(B, T), True at padding: "none", "right", "left" or "both" sides, of other lengths in each row."""
    mask = torch.zeros(BATCH, TOKENS, dtype=torch.bool)
    if where == "none":
        return None
    for row in range(1, BATCH):
        if where in ("right", "both"):
            mask[row, TOKENS - 2 * row :] = True
        if where in ("left", "both"):
            mask[row, : row + 1] = True
    return mask
