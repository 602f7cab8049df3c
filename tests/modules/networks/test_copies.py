"""Models of every architecture and kind are copied and pickled, as torch.save and workers of a process pool do."""

import copy
import io
import multiprocessing
import pickle
import re
from collections.abc import Callable

import every_variant
import pytest
import torch
from exports import code_of
from helpers import mostly_slow
from torch import nn

import lazyformer_fairseq
from lazyformer_fairseq import LazyFormerCausalConfig, LazyFormerConfig, build, huggingface
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.modules.networks.stack import Stack
from lazyformer_fairseq.patterns.architectures import ARCHITECTURES, CAUSAL_ARCHITECTURES
from lazyformer_fairseq.patterns.attention_variants import ATTENTION_VARIANTS
from lazyformer_fairseq.patterns.kinds import CAUSAL, kinds, row_of_letter

ARCHS = [arch for arch in (*ARCHITECTURES, *CAUSAL_ARCHITECTURES) if arch.endswith("_tiny")]
# Of the others, sublayers and settings occur among the patterns below.
OWN_CLASSES = ("bert_tiny", "modernbert_tiny", "mpnet_tiny", "reformer_reversible_tiny", "transformer_xl_tiny")
# Kinds that are no s with settings, and settings that the shared examples leave out.
SHARED = (
    "sflfkf-",
    "c[width=3]",
    "c[form=lightweight]",
    "r[cell=mingru]",
    "f[gate=gelu]",
    "f[experts=3,top=1,capacity=2]",
)
OF_ENCODERS = (
    *every_variant.ENCODERS,
    *SHARED,
    "s[window=2,global=given]",
    "s[synthesizer=factorised_random+factorised_dense,rank=2]",
    "s[synthesizer=fixed]",
    "s[span=4,ramp=2,span_loss=0.5]",
)
OF_DECODERS = (*(case.values[1] for case in every_variant.CASES if case.values[0] == CAUSAL), *SHARED)
HEADS = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
IDS = every_variant.tokens()
SIZES = {"vocab_size": every_variant.WORDS, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 8}


def of_arch(arch: str, pattern: str = "") -> nn.Module:
    changes = {"sublayer_pattern": pattern} if pattern else {}
    if arch in CAUSAL_ARCHITECTURES:
        changes |= {"adaptive_softmax_cutoff": "9", "mem_len": 0}
    else:
        changes["max_positions"] = every_variant.TOKENS
    if arch in ARCHITECTURES and pattern:
        changes["relative_position_buckets"] = 0  # which some attention variants cannot stand with
    return build(arch, every_variant.WORDS, **changes)


def of_transformers(ending: str) -> nn.Module:
    if ending == "ForCausalLM":
        return lazyformer_fairseq.LazyFormerForCausalLM(LazyFormerCausalConfig(sublayer_pattern="sflf", **SIZES))
    return getattr(huggingface, f"LazyFormer{ending}")(LazyFormerConfig(sublayer_pattern="sflf", **SIZES))


def exported(ending: str) -> nn.Module:
    code = code_of("sflf")
    config = LazyFormerConfig(sublayer_pattern="sflf", **SIZES).to_dict()
    return getattr(code, f"LazyFormer{ending}")(code.LazyFormerConfig(**config))


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{arch: lambda arch=arch: of_arch(arch) for arch in ARCHS},
    **{f"encoder {pattern}": lambda pattern=pattern: of_arch("bert_tiny", pattern) for pattern in OF_ENCODERS},
    **{
        f"decoder {pattern}": lambda pattern=pattern: of_arch("transformer_xl_tiny", pattern) for pattern in OF_DECODERS
    },
    **{ending: lambda ending=ending: of_transformers(ending) for ending in (*HEADS, "ForCausalLM")},
    **{f"exported {ending}": lambda ending=ending: exported(ending) for ending in HEADS},
}


def outputs(model: nn.Module) -> list[torch.Tensor]:
    given = {}
    if any(planned.values.get("global") == "given" for planned in plan_of(model)):
        given["global_positions"] = torch.zeros_like(IDS, dtype=torch.bool)
    torch.manual_seed(3)  # a Reformer draws its hashes
    found = model.eval()(IDS, **given)
    found = found if isinstance(found, tuple) else found.to_tuple()
    return [each for each in found if isinstance(each, torch.Tensor)]


def plan_of(model: nn.Module) -> tuple:
    network = next((part for part in model.modules() if isinstance(part, Stack)), None)
    return () if network is None else network.plan  # an exported model has none of our rows


def saved_and_loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = (copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), saved_and_loaded)


@pytest.mark.parametrize("name", mostly_slow(MODELS, *(name for name in MODELS if name not in ARCHS), *OWN_CLASSES))
@torch.no_grad()
def test_a_copy_computes_the_same(name):
    torch.manual_seed(1)
    model = MODELS[name]()
    wanted = outputs(model)
    assert wanted
    for way in WAYS:
        again = way(model)
        assert all(torch.equal(*pair) for pair in zip(outputs(again), wanted, strict=True))
        assert again.state_dict().keys() == model.state_dict().keys()
        assert all(one.kind is other.kind for one, other in zip(plan_of(again), plan_of(model), strict=True))


def test_these_are_all_kinds_and_settings():
    text = " ".join([*OF_ENCODERS, *OF_DECODERS])
    named = {*re.findall(r"[\[,](\w+)", text)}
    assert {setting.name for kind in kinds() for setting in kind.settings} <= named
    assert {kind.letter for kind in kinds()} <= {*re.sub(r"\[[^]]*\]", "", text)}


@pytest.mark.parametrize("row", [*kinds(), *ATTENTION_VARIANTS], ids=lambda row: row.name)
def test_a_row_of_a_table_comes_back_as_itself(row):
    assert pickle.loads(pickle.dumps(row)) is row
    assert copy.deepcopy(row) is row


def test_a_kind_that_is_not_registered_here_is_named():
    with pytest.raises(UserError, match="sublayers of kind 'q', which is not registered here: install the package"):
        row_of_letter("q")


@pytest.mark.slow
def test_a_spawned_worker_gets_models():
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        for model in (of_arch("lazyformer_m2x6_s_tiny"), of_transformers("ForMaskedLM")):
            model.eval().requires_grad_(False)  # gradients cannot come back
            found, wanted = pool.apply(model, (IDS,)), model(IDS)
            assert torch.equal(found[0], wanted[0])
