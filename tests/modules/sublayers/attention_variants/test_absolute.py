"""``s[positions=absolute]``: image GPT as transformers has it; texts that are continued; export."""

import pytest
import torch
from every_variant import WORDS, build, run, tokens
from tiny_networks import loud

from lazyformer_fairseq import build as build_model
from lazyformer_fairseq.modules.networks.stream_memory import WholeMemory
from lazyformer_fairseq.patterns.kinds import CAUSAL

SHORT = "s[positions=absolute,length=16]"


def test_an_igpt_computes_what_transformers_image_gpt_computes():
    """Weights are copied; there maps have biases, here zero, and embeddings are not multiplied by sqrt(C)."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    ours = build_model("igpt_s_tiny", 21, sublayer_pattern=f"({SHORT}f)x3").double().eval()
    loud(ours, 0.3)
    config = transformers.ImageGPTConfig(
        vocab_size=22, n_positions=16, n_embd=32, n_layer=3, n_head=2, n_inner=64, activation_function="gelu"
    )
    theirs = transformers.ImageGPTForCausalImageModeling(config).double().eval()
    weights = {name: torch.zeros_like(weight) for name, weight in theirs.state_dict().items() if "bias" in name}
    decoder, of = ours.decoder, "transformer."
    padded = torch.nn.functional.pad(decoder.embedding.bands[0].table, (0, 0, 0, 1))
    weights |= {f"{of}wte.weight": padded * 32**0.5, f"{of}wpe.weight": decoder.positions * 32**0.5}
    weights |= {f"{of}ln_f.weight": decoder.final_layer_norm.weight, "lm_head.weight": ours.softmax.own.bands[0].table}
    for number in range(3):
        attention, feed_forward = (decoder.sublayers[2 * number + part] for part in (0, 1))
        s, f, h = attention.inner, feed_forward.inner, f"{of}h.{number}."
        weights[f"{h}attn.c_attn.weight"] = torch.cat([s.q_proj.weight, s.kv_proj.weight]).t()
        weights[f"{h}attn.c_proj.weight"] = s.out_proj.weight.t()
        weights[f"{h}mlp.c_fc.weight"], weights[f"{h}mlp.c_proj.weight"] = f.fc1.weight.t(), f.fc2.weight.t()
        weights |= {f"{h}ln_{n + 1}.weight": x.layer_norm.weight for n, x in enumerate((attention, feed_forward))}
    missing = theirs.load_state_dict(weights, strict=False).missing_keys
    assert all(name.endswith(".attn.bias") for name in missing), missing
    with torch.no_grad():
        ours.softmax.bias.zero_()
        expected = theirs(tokens(time=16)).logits.log_softmax(-1)
        found, _ = ours(tokens(time=16))
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)  # log-probabilities are in fp32


@pytest.mark.parametrize(
    "pattern", [f"{SHORT} f l {SHORT} k", f"{SHORT} f s[rope=100] f s l", f"{SHORT} f f {SHORT} c"]
)
def test_a_text_that_is_continued_is_read_as_a_whole(pattern):
    """With what it remembers of all of it, beside sublayers that have other positions too."""
    decoder = loud(build(CAUSAL, pattern))
    text, memory = tokens(time=16), WholeMemory()
    parts = []
    for start, end in ((0, 5), (5, 6), (6, 16)):
        parts.append(decoder(text[:, start:end], memory)[0])
        memory.seen = end
    torch.testing.assert_close(torch.cat(parts, 1), run(decoder, text), atol=1e-9, rtol=1e-9)


def test_places_are_learned_and_the_last_maps_are_small_at_first():
    torch.manual_seed(1)
    model = build_model("igpt_s_tiny", WORDS, scaled_init=True)
    assert model.decoder.positions.shape == (1024, 32)
    assert model.decoder.positions.detach().std() == pytest.approx(0.02, rel=0.05)
    maps = model.decoder.last_maps()
    assert len(maps) == 48 and torch.cat([each.weight.detach().flatten() for each in maps]).std() == pytest.approx(
        0.02 / 48**0.5, rel=0.05
    )
    text = tokens()
    same = torch.full_like(text, 5)
    features, _ = model.decoder(same)
    assert not torch.allclose(features[:, 1], features[:, 8])  # which differ in their places alone
    losses, _ = model(text, target=text)
    assert torch.allclose(losses, torch.tensor(float(WORDS)).log().expand_as(losses))  # untied vectors are zero
    losses.sum().backward()
    assert model.softmax.own.bands[0].table.grad.abs().sum() > 0
