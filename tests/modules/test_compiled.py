import copy
import functools
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from every_variant import ON_A_CPU
from helpers import dictionary_of
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.utils import counters

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.criterions.language_modeling import MaskedLMAccuracyCriterion
from lazyformer_fairseq.fairseq_plugin.models.config import MaskedLMConfig
from lazyformer_fairseq.fairseq_plugin.models.lazyformer import LazyFormerModel
from lazyformer_fairseq.modules.compiled import compiled

PAD = 1
# Sequences, tokens, and whether some are padded: of full blocks, a last batch, another length.
BATCHES = [(2, 16, True), (3, 24, True), (4, 40, True), (5, 32, True), (2, 16, False)]


@pytest.fixture
def quick_compiler(monkeypatch):
    """torch.compile that traces forward and backward as ever, but runs what it found without generating code."""
    compiled.cache_clear()
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    yield
    compiled.cache_clear()
    torch._dynamo.reset()


def make(compile: bool, attention_backend: str = "auto") -> tuple[LazyFormerModel, MaskedLMAccuracyCriterion]:
    torch.manual_seed(1)
    sizes = {"encoder_embed_dim": 16, "encoder_ffn_embed_dim": 24, "encoder_attention_heads": 2, "max_positions": 40}
    cfg = MaskedLMConfig("M2", dropout=0.0, compile=compile, attention_backend=attention_backend, **sizes)
    model = LazyFormerModel(cfg, dictionary_of(24))
    torch.nn.init.normal_(model.encoder.sentence_encoder.relative_position_bias.table)
    return model, MaskedLMAccuracyCriterion(SimpleNamespace(target_dictionary=dictionary_of(24)))


def a_batch(sequences: int, time: int, is_padded: bool) -> dict:
    tokens = torch.randint(4, 24, (sequences, time))
    target = torch.where(torch.rand(sequences, time) < 0.2, tokens, PAD)
    target[:, 0] = tokens[:, 0]
    if is_padded:
        tokens[0, -3:] = target[0, -3:] = PAD
    positions = target.flatten().ne(PAD).nonzero().squeeze(1)
    net_input = {"src_tokens": tokens, "has_padding": is_padded}
    return {"net_input": net_input, "target": target, "masked_positions": positions, "ntokens": 0, "nsentences": 0}


def assert_equal_training(eager, compiled_one, batch: dict, rtol: float = 1e-4) -> None:
    """Loss, answers and all gradients: by the size of the difference, as in half precision each number is rounded."""
    losses = [criterion(model, batch) for model, criterion in (eager, compiled_one)]
    torch.testing.assert_close(losses[1][0], losses[0][0], rtol=rtol / 10, atol=1e-5)
    assert losses[1][2]["ncorrect"] == losses[0][2]["ncorrect"]
    for (model, _), (loss, _, _) in zip((eager, compiled_one), losses, strict=True):
        model.zero_grad()
        loss.backward()
    for (name, one), other in zip(eager[0].named_parameters(), compiled_one[0].parameters(), strict=True):
        difference, size = (gradient.float().norm() for gradient in (other.grad - one.grad, one.grad))
        assert difference <= rtol * size + 1e-5, name


@pytest.mark.parametrize("attention_backend", ON_A_CPU)
@pytest.mark.slow
def test_training_is_the_same_and_few_graphs_serve_all_shapes(quick_compiler, attention_backend):
    eager, other = make(False, attention_backend), make(True, attention_backend)
    torch.manual_seed(2)
    for batch in BATCHES:
        assert_equal_training(eager, other, a_batch(*batch))
    assert not counters["graph_break"]
    # Below the tail with padding one for the first shape and one for all others, one without; one of the tail, which
    # sees other numbers by then; of the loss again two.
    assert 3 <= counters["stats"]["unique_graphs"] <= 6


def test_few_graphs_serve_all_numbers_of_masked_tokens(quick_compiler):
    model, criterion = make(True)
    graphs = []
    for masked in (5, 8, 9, 13):
        batch = a_batch(2, 16, False)
        batch["masked_positions"] = torch.arange(masked)
        criterion(model, batch)[0].backward()
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[1:] == [graphs[1]] * 3


def test_training_is_the_same_and_checkpoints_are_those_of_a_model_that_is_not_compiled(quick_compiler):
    """Only training is compiled."""
    eager, other, batch = make(False), make(True), a_batch(2, 16, True)
    with torch.no_grad():
        other[1].eval()(other[0].eval(), batch)
    assert not counters["stats"]["unique_graphs"]
    other[0].train(), other[1].train()
    assert_equal_training(eager, other, batch)
    assert not counters["graph_break"] and counters["stats"]["unique_graphs"] == 3  # below the tail, of it, the loss's
    assert other[0].state_dict().keys() == eager[0].state_dict().keys()
    copied = copy.deepcopy(other[0])
    with torch.no_grad():
        for parameter in other[0].parameters():
            parameter.zero_()
    assert_equal_training(eager, (copied, other[1]), batch)


def test_no_compiler_is_a_user_error(monkeypatch):
    error = TorchDynamoException("InvalidCxxCompiler: No working C++ compiler found\n\nmore lines")
    monkeypatch.setattr(torch, "compile", lambda function, fullgraph: mock.Mock(side_effect=error))
    compiled.cache_clear()
    with pytest.raises(UserError, match="--compile: .*No working C.* compiler found.*, install a C"):
        compiled(torch.relu)(torch.zeros(1))
    compiled.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_generated_code_trains_the_same(dtype):
    """The kernels of torch's own compiler, in every precision."""
    eager, other = make(False), make(True)
    torch.manual_seed(2)
    for model in (eager[0], other[0]):
        model.to(dtype)
    for batch in [*BATCHES[:2], BATCHES[-1]]:
        assert_equal_training(eager, other, a_batch(*batch), rtol=1e-4 if dtype == torch.float32 else 0.05)
