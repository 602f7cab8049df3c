from dataclasses import replace
from functools import partial

import pytest
import torch
from tiny_networks import make_decoder, make_encoder, random_tokens
from torch import nn

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.modules.layer_norm import RMSNorm, layer_norm
from lazyformer_fairseq.modules.networks.masked_lm import MaskedLM
from lazyformer_fairseq.modules.networks.options import MaskedLMOptions


def test_epsilon_is_added_to_the_variance():
    x = torch.tensor([[1.0, 3.0, 5.0, 7.0]])
    torch.testing.assert_close(layer_norm(4, 0.5)(x), (x - x.mean()) / (x.var(unbiased=False) + 0.5).sqrt())


@pytest.mark.parametrize("prenorm", [False, True])
def test_a_models_epsilon_reaches_all_its_layer_norms(prenorm):
    options = MaskedLMOptions(
        sublayer_pattern="sflk-", encoder_embed_dim=8, encoder_attention_heads=2, encoder_ffn_embed_dim=8,
        layer_norm_eps=0.25, encoder_normalize_before=prenorm,
    )  # fmt: skip
    model = MaskedLM(options, 9)
    found = [module.eps for module in model.modules() if isinstance(module, torch.nn.LayerNorm)]
    assert found == [0.25] * 6  # of s, f, l, k, embeddings or output, head
    with pytest.raises(UserError, match="must be above 0 and below 1, such as 1e-05, not 0"):
        MaskedLM(replace(options, layer_norm_eps=0), 9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_rms_norm_is_torchs(dtype):
    """Of numbers whose squares are beyond half precision: statistics are in single."""
    torch.manual_seed(1)
    theirs, ours = (norm_class(64, eps=1e-3) for norm_class in (nn.RMSNorm, RMSNorm))
    nn.init.normal_(theirs.weight)
    ours.load_state_dict(theirs.state_dict())
    x, gradient = (torch.randn(3, 5, 64) * 500).to(dtype), torch.randn(3, 5, 64).to(dtype)
    found = []
    for module in (theirs.to(dtype), ours.to(dtype), torch.compile(ours.to(dtype), fullgraph=True, backend="eager")):
        module.zero_grad()
        given = x.clone().requires_grad_()
        y = module(given)
        y.backward(gradient)
        found.append((y, given.grad, module.weight.grad.clone()))
    assert all(each.dtype == dtype and each.isfinite().all() for each in found[1])
    for each in found[1:]:
        torch.testing.assert_close(each, found[0])
    if dtype == torch.float64:
        call = partial(torch.func.functional_call, ours)
        given = (x / 500).requires_grad_(), theirs.weight.detach().requires_grad_()
        assert torch.autograd.gradcheck(lambda x, weight: call({"weight": weight}, (x,)), given)


@pytest.mark.parametrize("options", [{"norm": "rms"}, {"norm_bias": False}], ids=str)
@pytest.mark.parametrize("prenorm", [False, True])
@pytest.mark.parametrize("make", [make_encoder, make_decoder])
def test_all_norms_of_a_network_and_no_linear_map_has_a_bias(make, prenorm, options):
    """As with torch's own norms in their places."""
    pattern, more = "sflkc f[gate=silu]-", {} if make is make_decoder else {"vocab_size": 17}
    network = make(pattern, normalize_before=prenorm, linear_bias=False, layer_norm_eps=0.25, **more, **options)
    maps = [module for module in network.modules() if isinstance(module, nn.Linear)]
    assert len(maps) > 8 and all(module.bias is None for module in maps)
    tokens = random_tokens(2, 7)
    found, _ = network(tokens)
    norm_class = nn.RMSNorm if "norm" in options else partial(nn.LayerNorm, bias=False)
    norms = {path: module for path, module in network.named_modules() if path.endswith("layer_norm")}
    assert len(norms) == 6 + (prenorm or make is make_encoder)
    for path, module in norms.items():
        theirs = norm_class(module.weight.numel(), eps=0.25).double()
        theirs.load_state_dict(module.state_dict())
        network.set_submodule(path, theirs)
    torch.testing.assert_close(network(tokens)[0], found)
