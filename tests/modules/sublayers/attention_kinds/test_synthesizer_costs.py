"""What a synthesizer costs, by formula, against built models and Table 2."""

import pytest

from lazyformer_fairseq.measure.costs.flops import (
    count_sublayer_parameters,
)
from lazyformer_fairseq.modules.sublayers.attention_kinds.synthesizer import factors_of
from lazyformer_fairseq.patterns.grammar import plan
from lazyformer_fairseq.patterns.kinds import EncoderSizes

OF_TABLE_2 = "random fixed factorised_random dense factorised_dense random+dense dense+dot random+dot".split()


def test_parameters_differ_as_in_table_2():
    """Of the paper's Transformer: 512 wide, 8 heads, 12 self-attentions, 256 positions. It prints millions.

    What it prints for dense and its sums does not fit one choice of layers (dense + vanilla has 12M more than dense,
    but 70M like vanilla alone in language modelling), so those are not compared.
    """
    sizes = EncoderSizes(0, 512, 2048, 8, 256, 0)

    def count(terms: str) -> int:
        kind = f"[synthesizer={terms}]" if terms else ""
        return 12 * count_sublayer_parameters(plan(f"s{kind}")[0], sizes)

    printed = {"": 68, "fixed": 61, "random": 67, "factorised_random": 61, "random+dot": 73}
    for terms, total in printed.items():
        difference = (count(terms) - count("fixed")) / 1e6
        assert difference == pytest.approx(total - printed["fixed"], abs=1.0), terms
    assert count("random") - count("fixed") == 12 * 8 * 256**2
    assert count("factorised_random") - count("fixed") == 12 * 8 * 2 * 256 * 8


@pytest.mark.parametrize("length", [1, 2, 7, 10, 64, 100, 512])
def test_factors_make_every_position(length):
    a, b = factors_of(length)
    assert a * (b - 1) < length <= a * b and a <= b
    assert length not in (64, 512) or a * b == length
