"""Named architectures as networks of plain torch: the same weights and outputs as fairseq's models of the name."""

import pytest
import torch
from helpers import dictionary_of

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.modules.networks.named import build
from lazyformer_fairseq.modules.networks.options import MaskedLMOptions, read_options
from lazyformer_fairseq.patterns.architectures import ARCHITECTURES, CAUSAL_ARCHITECTURES

WORDS = 24


@pytest.mark.parametrize("arch", [name for name in (*ARCHITECTURES, *CAUSAL_ARCHITECTURES) if name.endswith("_tiny")])
def test_a_network_is_the_model_that_fairseq_builds(arch):
    from lazyformer_fairseq import CausalLanguageModel, LazyFormerModel
    from lazyformer_fairseq.fairseq_plugin.models.config import CausalLMConfig, MaskedLMConfig

    is_encoder = arch in ARCHITECTURES
    config, model_class = (MaskedLMConfig, LazyFormerModel) if is_encoder else (CausalLMConfig, CausalLanguageModel)
    row = (ARCHITECTURES | CAUSAL_ARCHITECTURES)[arch].options()
    few = {"max_positions": 16} if is_encoder else {"mem_len": 4 * bool(row["mem_len"])}
    torch.manual_seed(0)
    network = build(arch, WORDS, **few).eval()
    torch.manual_seed(0)
    dictionary = dictionary_of(WORDS)
    model = model_class(config(**{**row, **few}), dictionary).eval()
    weights = model.state_dict()
    del weights["dictionary_sha256"]
    assert list(weights) == list(network.state_dict())
    for name, weight in network.state_dict().items():
        assert torch.equal(weight, weights[name]), name
    ids = torch.randint(4, WORDS, (2, 8), generator=torch.Generator().manual_seed(1))
    assert torch.equal(network(ids)[0], model(ids)[0])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"arch": "bert_bsae"}, "unknown architecture 'bert_bsae'; did you mean bert_base"),
        ({"dropuot": 0.1}, "unknown option dropuot; did you mean dropout"),
        ({"max_positions": "many"}, "option max_positions is 'many', but must be of type int"),
        ({"norm": "batch"}, "--norm batch: must be one of layer, rms"),
        ({"encoder_attention_heads": 5}, "an embedding dimension of 32 is not divisible by 5 attention heads"),
    ],
)
def test_a_mistake_is_refused_in_words(given, said):
    with pytest.raises(UserError) as refused:
        build(**{"arch": "bert_tiny", "vocab_size": WORDS, **given})
    assert said in str(refused.value)


def test_whole_numbers_serve_as_floats():
    found = read_options(MaskedLMOptions, {"attention_backend": "recompute", "dropout": 0})
    assert (found.attention_backend, repr(found.dropout)) == ("recompute", "0.0")
