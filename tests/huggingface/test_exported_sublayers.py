"""Exported sublayers compute what ours do and are one graph: every kind, padding on either side."""

from typing import Any, Optional

import pytest
import torch
from every_variant import EXAMPLES, HEADS, TOKENS, WIDTH, WORDS
from exports import code_of
from torch import Tensor, nn

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.modules.networks.encoder import Encoder, PaddingPermutation, TokenInfo
from lazyformer_fairseq.patterns.attention_variants import ATTENTION_VARIANTS, chosen_variants, with_defaults
from lazyformer_fairseq.patterns.grammar import plan, read_sublayer

BATCH, FFN = 3, 8
# Beside every_variant's: what encoders alone may have, and sums.
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
VARIANTS = [row.name for row in ATTENTION_VARIANTS if not row.why_not_encoder]
EVERY_KIND = "".join(f"s[{EXAMPLES[name][-1]}]" for name in VARIANTS) + "slkfcr"
SETTINGS = ["", *(each for name in VARIANTS for each in EXAMPLES.get(name, []) + MORE.get(name, []))]


def model(settings: str, initializer_range: float = 0.5, **options: Any) -> nn.Module:
    """An exported masked language model."""
    torch.manual_seed(1)
    code = code_of(EVERY_KIND)
    sizes = {"vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": FFN, "num_attention_heads": HEADS}
    given = {"max_position_embeddings": TOKENS, "relative_position_buckets": buckets_of(settings), **sizes}
    pattern = pattern_of(settings)
    config = code.LazyFormerConfig(sublayer_pattern=pattern, initializer_range=initializer_range, **given, **options)
    return code.LazyFormerForMaskedLM(config).eval()


def both(settings: str, dtype: torch.dtype = torch.float32) -> tuple[Encoder, nn.Module]:
    """Our encoder and the exported one, with the same weights, none of them 0."""
    given = {"max_positions": TOKENS, "relative_position_buckets": buckets_of(settings), "attention_backend": "eager"}
    has_positions = "rope" not in settings
    given["no_token_positional_embeddings"] = not has_positions
    ours = Encoder(pattern_of(settings), WORDS, WIDTH, FFN, HEADS, **given)
    torch.manual_seed(1)
    for weight in ours.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    exported = model(settings, hidden_dropout_prob=0.0, position_embeddings=has_positions).lazyformer
    exported.encoder.load_state_dict(ours.state_dict())
    return ours.to(dtype).eval(), exported.to(dtype).eval()


def inputs(settings: str, where: str) -> tuple[Tensor, Tensor, dict[str, Optional[Tensor]], dict[str, Tensor]]:
    """Ids, which of them are text, and what networks are given besides, ours and the exported one."""
    generator = torch.Generator().manual_seed(2)
    mask, ids = padding(where), torch.randint(3, WORDS, (BATCH, TOKENS), generator=generator)
    marked = torch.rand(BATCH, TOKENS, generator=generator) < 0.3 if "given" in settings else None
    ours = {"padding_mask_BT": mask if mask.any() else None, "info": TokenInfo(marked)}
    return ids.masked_fill(mask, 1), ~mask, ours, {"attention_mask": ~mask, "global_attention_mask": marked}


def padding(where: str) -> Tensor:
    """(B, T), True at padding: on "none", "right", "left" or "both" sides, of other lengths in each row; or "a row"."""
    mask = torch.zeros(BATCH, TOKENS, dtype=torch.bool)
    mask[1] = where == "a row"
    for row in range(1, BATCH):
        if where in ("right", "both"):
            mask[row, TOKENS - 2 * row :] = True
        if where in ("left", "both"):
            mask[row, : row + 1] = True
    return mask


def pattern_of(settings: str) -> str:
    """An s, and what can read it; a pattern of convolution or recurrence is one already."""
    if is_pattern(settings):
        return settings
    s = f"s[{settings}]" if settings else "s"
    try:
        plan(f"{s}k", "encoder")
    except UserError:
        return f"{s}fl{s}l"
    return f"{s}flk{s}kl"


def is_pattern(settings: str) -> bool:
    return settings[:1] == "c" or settings[:2] == "r["


def buckets_of(settings: str) -> int:
    """Of T5's bias: where a sublayer can have it, it has it."""
    values = read_sublayer(f"s[{settings}]").values if settings and not is_pattern(settings) else with_defaults(())
    return 0 if any("bias" in row.refuses for row in chosen_variants(values)) else 8


ONE_OF_EACH = ["", *(EXAMPLES[name][-1] for name in VARIANTS), "window=2,global=given"]
CONVOLUTIONS = [
    f"c{settings}fsc{settings}" for settings in ("", "[width=4]", "[width=5,form=lightweight]", "[width=1]")
]
RECURRENCES = [f"r[cell={cell}]fsr[cell={cell}]" for cell in ("brc", "nbrc", "mingru")]
# A row that is nothing but padding has no influence, and gives no NaN.
CASES = ((torch.float64, ("none", "both", "a row"), 1e-9), (torch.float32, ("left", "right"), 1e-5))


@pytest.mark.parametrize("settings", [*SETTINGS, *CONVOLUTIONS, *RECURRENCES])
@torch.no_grad()
def test_exported_blocks_are_ours(settings):
    for dtype, sides, within in CASES:
        ours, exported = both(settings, dtype)
        for where in sides:
            ids, is_text, to_ours, to_exported = inputs(settings, where)
            expected = ours(ids, **to_ours)[0]
            for exported.config._attn_implementation in ("eager", "sdpa"):
                found = exported(ids, **to_exported).last_hidden_state
                torch.testing.assert_close(found[is_text], expected[is_text], atol=within, rtol=within)
                assert found.isfinite().all()  # padding meets other sublayers
    if "given" in settings:
        with pytest.raises(ValueError, match="pass global_attention_mask"):
            exported(ids)
        with pytest.raises(ValueError, match="global_attention_mask contains 2"):
            exported(ids, global_attention_mask=torch.full_like(ids, 2))


@pytest.mark.parametrize("settings", ONE_OF_EACH)
@torch.no_grad()
def test_probabilities_are_ours_and_those_of_an_l_are_its_s(settings):
    ours, exported = both(settings, torch.float64)
    ids, is_text, to_ours, to_exported = inputs(settings, "both")
    found = []
    ours.sublayers[0].inner.register_forward_hook(lambda module, given, output: found.append(output[1]))
    ours(ids, **to_ours)
    asked, plain = (exported(ids, **to_exported, output_attentions=wanted) for wanted in (True, False))
    torch.testing.assert_close(asked.last_hidden_state, plain.last_hidden_state, atol=1e-9, rtol=1e-9)
    of_queries = is_text[:, None].expand(-1, HEADS, -1)
    expected = PaddingPermutation.of(~is_text).pairs_back(found[0]["distribution"].probabilities, TOKENS)
    torch.testing.assert_close(asked.attentions[0][of_queries], expected[of_queries], atol=1e-9, rtol=1e-9)
    assert torch.equal(asked.attentions[1], asked.attentions[0])
    assert len(asked.attentions) == sum(planned.kind.letter in "slk" for planned in ours.plan)


# One graph by torch.export, ONNX and torch.compile


# Reformer draws random numbers by a generator, of which torch.compile and ONNX have none.
STATIC = [settings for settings in ONE_OF_EACH if "buckets" not in settings]


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


@pytest.mark.parametrize(
    "settings", ["", *(pytest.param(each, marks=pytest.mark.slow) for each in (*ONE_OF_EACH[1:], RECURRENCES[2]))]
)
def test_torch_exports_one_graph_for_all_sizes(settings):
    network = model(settings)
    graph = exported(network, settings).module()
    assert_same(lambda given: graph(**given).logits, network, settings)


@pytest.mark.slow
@pytest.mark.parametrize("settings", RECURRENCES[1:2])
def test_a_loop_is_one_graph_for_one_length_alone(settings):
    network, given = model(settings), texts(3, 9, settings)
    with pytest.raises(ValueError, match=r"export the model for one length, or use r\[cell=mingru\]"):
        exported(network, settings)
    graph = torch.export.export(network, (), given, strict=False).module()
    torch.testing.assert_close(graph(**given).logits, network(**given).logits)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "how"), [*((each, {"fullgraph": True, "backend": "eager"}) for each in STATIC), ("", {})]
)
def test_torch_compile_makes_one_graph(settings, how):
    torch.compiler.reset()  # of other cases of this test, else a limit is reached
    network = model(settings)
    compiled = torch.compile(network, dynamic=True, **how)
    assert_same(lambda given: compiled(**given).logits, network, settings)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [*STATIC, RECURRENCES[2]])
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
