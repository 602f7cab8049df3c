"""Exported models of each kind of attention: how they start, and one graph by torch.export, ONNX and torch.compile."""

from typing import Any

import pytest
import torch
from every_kind import EXAMPLES, HEADS, TOKENS, WIDTH, WORDS
from exported_blocks import FFN, KINDS, buckets_of, pattern_of
from exports import code_of_every_kind
from torch import Tensor, nn

from lazyformer_fairseq.huggingface.export import plan_as_json
from lazyformer_fairseq.modules.networks.encoder import Encoder, init_bert_weights

OF_EACH_KIND = [*(EXAMPLES[name][-1] for name in KINDS), "window=2,global=given"]
# Reformer draws random numbers by a generator, of which torch.compile and ONNX have none.
STATIC = [settings for settings in OF_EACH_KIND if "buckets" not in settings]


def model(settings: str, initializer_range: float = 0.5) -> nn.Module:
    torch.manual_seed(1)
    code = code_of_every_kind()
    sizes = {"vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": FFN, "num_attention_heads": HEADS}
    given = {"max_position_embeddings": TOKENS, "relative_position_buckets": buckets_of(settings), **sizes}
    plan = plan_as_json(pattern_of(settings))
    config = code.LazyFormerConfig(plan=plan, initializer_range=initializer_range, **given)
    return code.LazyFormerForMaskedLM(config).eval()


def texts(batch: int, time: int, settings: str) -> dict[str, Tensor]:
    """Ids and masks, with padding before the first text and behind the second."""
    ids = torch.randint(3, WORDS, (batch, time), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    mask[0, :2] = mask[1, time - 3 :] = 0
    given = {"global_attention_mask": (ids % 3 == 0).long()} if "given" in settings else {}
    return {"input_ids": ids, "attention_mask": mask, **given}


def exported(network: nn.Module, settings: str) -> torch.export.ExportedProgram:
    given = texts(3, 9, settings)
    any_size = {name: dict.fromkeys((0, 1), torch.export.Dim.DYNAMIC) for name in given}
    return torch.export.export(network, (), given, dynamic_shapes=any_size, strict=False)


def assert_same(found: Any, network: nn.Module, settings: str) -> None:
    """For a longer and larger batch than the graph was made with."""
    given = texts(4, TOKENS, settings)
    is_text = given["attention_mask"].bool()
    with torch.no_grad():
        expected = network(**given).logits
        torch.testing.assert_close(found(given)[is_text], expected[is_text], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("settings", ["", *(pytest.param(each, marks=pytest.mark.slow) for each in OF_EACH_KIND)])
def test_torch_exports_one_graph_for_all_sizes(settings):
    network = model(settings)
    graph = exported(network, settings).module()
    assert_same(lambda given: graph(**given).logits, network, settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "how"), [*((each, {"fullgraph": True, "backend": "eager"}) for each in ["", *STATIC]), ("", {})]
)
def test_torch_compile_makes_one_graph(settings, how):
    network = model(settings)
    compiled = torch.compile(network, dynamic=True, **how)
    assert_same(lambda given: compiled(**given).logits, network, settings)


@pytest.mark.slow
@pytest.mark.parametrize("settings", ["", *STATIC])
def test_onnx_computes_the_same(settings, tmp_path):
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    network, path = model(settings), str(tmp_path / "model.onnx")
    torch.onnx.export(exported(network, settings), f=path, dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]

    def run(given: dict[str, Tensor]) -> Tensor:
        return torch.from_numpy(session.run(None, {name: given[name].numpy() for name in names})[0])

    assert_same(run, network, settings)


@pytest.mark.parametrize("settings", ["", *OF_EACH_KIND, "synthesizer=factorised_random+fixed,rank=4"])
def test_fresh_weights_are_drawn_as_ours_are(settings):
    pattern, buckets = pattern_of(settings), buckets_of(settings)
    ours = Encoder(pattern, None, WIDTH, FFN, HEADS, max_positions=TOKENS, relative_position_buckets=buckets)
    ours = ours.apply(init_bert_weights).state_dict()
    network = model(settings, initializer_range=0.02).lazyformer.state_dict()
    for name, expected in ours.items():
        spread = [weight.std().item() if weight.numel() > 1 else 0 for weight in (network[name], expected)]
        if expected.numel() < 64:  # too few to know more
            assert (spread[0] > 0) == (spread[1] > 0), name
        else:
            assert spread[0] == pytest.approx(spread[1], rel=0.5), name


def test_projections_of_global_tokens_start_as_copies():
    sublayers = model("window=2,global=1").lazyformer.sublayers
    s, lazy = sublayers[0].inner, sublayers[2].inner
    q, k, v = s.qkv_proj.weight.chunk(3)
    window = s.choices["window"]
    assert torch.equal(window.q_proj.weight, q) and torch.equal(window.k_proj.weight, k)
    assert torch.equal(s.value_makers["window"].v_proj.weight, v)
    assert torch.equal(lazy.value_makers["window"].v_proj.weight, lazy.v_proj.weight)
