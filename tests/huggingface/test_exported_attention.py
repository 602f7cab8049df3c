"""Exported attention computes what ours does: every kind of it, an l and a k above it, padding on either side."""

import pytest
import torch
from every_kind import EXAMPLES
from exported_blocks import BATCH, TOKENS, both, embeddings, padding
from torch import Tensor

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.patterns.attention_kinds import ATTENTION_KINDS
from lazyformer_fairseq.patterns.grammar import plan

MORE = {  # beside every_kind's, what encoders alone may have, and sums
    "window": ["window=2,global=2", "window=2,global=given", "window=2,dilation=2"],
    "strided": ["strided=3,part=local"],
    "fixed": ["fixed=4,summary=1,heads=split"],
    "synthesizer": [
        "synthesizer=fixed", "synthesizer=factorised_dense", "synthesizer=factorised_random,rank=2",
        "synthesizer=factorised_random+dot,rank=2", "synthesizer=random+dense+factorised_dense+factorised_random",
    ],
    "span": ["span=3,ramp=1", "span=100"],
    "buckets": ["buckets=2,chunk=3", "buckets=8,rounds=3,chunk=5", "buckets=4"],
    "entmax": ["entmax=2", "entmax=1.01"],
}  # fmt: skip
KINDS = [row.name for row in ATTENTION_KINDS]
SETTINGS = ["", *(each for name in KINDS for each in EXAMPLES.get(name, []) + MORE.get(name, []))]


def combined() -> list[str]:
    """Every two of the first examples that may stand together."""
    found = []
    for number, name in enumerate(KINDS):
        for other in KINDS[:number]:
            for settings in EXAMPLES[name][:1] + EXAMPLES[name][-1:]:
                together = f"{EXAMPLES[other][-1]},{settings}"
                try:
                    plan(f"s[{together}]", "encoder")
                except UserError:
                    continue
                found.append(together)
    return list(dict.fromkeys(found))


def pattern_of(settings: str) -> str:
    """An s, and what can read it."""
    s = f"s[{settings}]" if settings else "s"
    try:
        plan(f"{s}k", "encoder")
    except UserError:
        return f"{s}fl{s}l"
    return f"{s}flk{s}kl"


def given(settings: str) -> Tensor:
    if "given" not in settings:
        return None
    return torch.rand(BATCH, TOKENS, generator=torch.Generator().manual_seed(4)) < 0.3


def assert_same(settings: str, attention: str, dtype: torch.dtype, **close: float) -> None:
    ours, exported = both(pattern_of(settings), dtype=dtype)
    x, positions = embeddings(dtype), given(settings)
    for where in ("none", "right", "left", "both"):
        mask = padding(where)
        expected, _ = ours(x, mask, global_positions_BT=positions)
        found, _ = exported(x, mask, positions, attention)
        is_text = slice(None) if mask is None else ~mask
        torch.testing.assert_close(found[is_text], expected[is_text], **close)
        assert found.isfinite().all()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("settings", [*SETTINGS, *combined()])
def test_exported_attention_is_ours(settings, attention):
    assert_same(settings, attention, torch.float64, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("settings", SETTINGS)
def test_exported_attention_is_ours_in_single_precision(settings, attention):
    if "rounds" in settings:
        # Of a token that no round shows another, ours adds up e^-100,000 by rounds: to a sum within 0.4% of one.
        assert_same(settings, attention, torch.float32, atol=0.02, rtol=0.02)
    else:
        assert_same(settings, attention, torch.float32, atol=1e-5, rtol=1e-5)
