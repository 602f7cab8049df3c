"""Exported convolution computes what ours does."""

import pytest
import torch
from exported_blocks import both, embeddings, padding

from lazyformer_fairseq.huggingface.merge import plan_as_json


@pytest.mark.parametrize("settings", ["", "[width=4]", "[width=5,form=lightweight]", "[width=1]"])
@pytest.mark.parametrize("where", ["none", "left", "right", "both"])
def test_exported_convolution_is_ours(settings, where):
    ours, exported = both(f"c{settings}fsc{settings}", 8, torch.float64)
    mask, x = padding(where), embeddings(torch.float64)
    expected, found = ours(x, mask)[0], exported(x, mask)[0]
    is_text = slice(None) if mask is None else ~mask
    torch.testing.assert_close(found[is_text], expected[is_text], atol=1e-9, rtol=1e-9)
    assert found.isfinite().all()


def test_gradients_are_ours():
    gradients = []
    for network in both("cfc[form=lightweight]", 0, torch.float64):
        mask = padding("both")
        network(embeddings(torch.float64), mask)[0][~mask].square().sum().backward()
        gradients.append({name: weight.grad for name, weight in network.named_parameters()})
    assert gradients[0].keys() == gradients[1].keys()
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected, msg=name)


def test_the_plan_has_its_settings_():
    plan = plan_as_json("c[width=4]f")
    assert plan[0]["settings"] == {"width": 4, "form": "depthwise"} and plan[1]["settings"] == {}
