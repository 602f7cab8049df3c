"""The criterions: loss, accuracy and terms by hand, no more logits than needed, and what is refused."""

import json
import math
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch
from fairseq.logging import metrics
from helpers import dictionary_of
from omegaconf import OmegaConf
from safetensors.torch import save_model
from torch.nn.functional import cross_entropy

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.criterions.language_modeling import (
    CausalLMCriterion,
    ContinuedMaskedLMConfig,
    ContinuedMaskedLMCriterion,
    MaskedLMAccuracyCriterion,
)
from lazyformer_fairseq.fairseq_plugin.models.config import CausalLMConfig, MaskedLMConfig
from lazyformer_fairseq.fairseq_plugin.models.lazyformer import CausalLanguageModel, LazyFormerModel
from lazyformer_fairseq.modules.losses import network_of
from lazyformer_fairseq.modules.networks.options import MaskedLMOptions, plain_options
from lazyformer_fairseq.modules.networks.stream_memory import StreamMemory

SIZES = dict(encoder_embed_dim=12, encoder_ffn_embed_dim=8, encoder_attention_heads=2, max_positions=8, dropout=0.0)
PAD, WORDS = 1, 24


def make_model(pattern: str, seed: int = 1, **options) -> LazyFormerModel:
    torch.manual_seed(seed)
    cfg = MaskedLMConfig(**{**SIZES, "sublayer_pattern": pattern, **options})
    model = LazyFormerModel(cfg, dictionary_of(WORDS))
    for weight in model.parameters():  # so that what attends to what matters
        torch.nn.init.normal_(weight, std=0.4)
    return model


def make_task(words: int = WORDS) -> SimpleNamespace:
    dictionary = dictionary_of(words)
    return SimpleNamespace(
        source_dictionary=dictionary,
        target_dictionary=dictionary,
        build_model=lambda cfg: LazyFormerModel.build_model(
            OmegaConf.merge(OmegaConf.structured(MaskedLMConfig), {k: v for k, v in cfg.items() if k != "_name"}),
            SimpleNamespace(source_dictionary=dictionary),
        ),
    )


def make_batch() -> dict:
    tokens = torch.randint(4, 24, (3, 6), generator=torch.Generator().manual_seed(3))
    tokens[2, 4:] = PAD
    target = torch.full_like(tokens, PAD)
    target[0, 1], target[1, 4], target[2, 3], target[2, 0] = 7, 8, 9, 10
    net_input = {"src_tokens": tokens, "has_padding": True}
    return {"net_input": net_input, "target": target, "ntokens": 16, "nsentences": 3}


def at_masks(model, batch):
    logits, _ = model(batch["net_input"]["src_tokens"])
    return logits[batch["target"] != PAD]


def logged(criterion: type, log: dict) -> dict[str, float]:
    """What two processes with that log make of it."""
    with metrics.aggregate(new_root=True) as meters:
        criterion.reduce_metrics([log, log])
    return meters.get_smoothed_values()


def test_loss_and_accuracy_equal_those_of_all_logits():
    model, batch = make_model("M2"), make_batch()
    scores = at_masks(model, batch)
    batch["target"][1, 4] = int(scores[1].argmax())  # one right answer
    answers = batch["target"][batch["target"] != PAD]
    by_hand, right = cross_entropy(scores, answers, reduction="sum"), int((scores.argmax(-1) == answers).sum())
    criterion = MaskedLMAccuracyCriterion(make_task())
    loss, sample_size, log = criterion(model, batch)
    torch.testing.assert_close(loss, by_hand)
    assert sample_size == 4 and log["ncorrect"] == right >= 1
    values = logged(MaskedLMAccuracyCriterion, log)
    assert values["loss"] == pytest.approx(by_hand.item() / 4 / math.log(2), abs=1e-3)
    assert values["ppl"] == pytest.approx(math.exp(by_hand.item() / 4), rel=1e-3)
    assert values["accuracy"] == pytest.approx(100 * right / 4, abs=0.01)

    named = {**batch, "masked_positions": torch.tensor([1, 6 + 4, 12, 12 + 3])}
    assert criterion(model, named)[:2] == (loss, sample_size)
    logits, _ = model(**batch["net_input"], masked_tokens=torch.tensor([10]))
    torch.testing.assert_close(logits, scores[1:2])


@pytest.mark.parametrize("training", [True, False])
def test_logits_are_made_at_masked_positions_alone(training):
    model, criterion = make_model("M2").train(training), MaskedLMAccuracyCriterion(make_task()).train(training)
    made = []
    model.encoder.lm_head.register_forward_hook(lambda *call: made.append(call[-1].numel()))
    criterion(model, make_batch())
    assert made == [WORDS * 4]


# --- causal_lm --------------------------------------------------------------------------------------------------------


def make_causal(pattern: str = "sf"):
    torch.manual_seed(1)
    sizes = dict(decoder_embed_dim=8, decoder_ffn_embed_dim=8, decoder_attention_heads=2, adaptive_softmax_cutoff="7")
    model = CausalLanguageModel(CausalLMConfig(sublayer_pattern=pattern, **sizes), dictionary_of(WORDS)).eval()
    stream = torch.randint(4, WORDS, (3, 7))
    target = stream[:, 1:].clone()
    target[2, 4:] = PAD
    batch = {"net_input": {"src_tokens": stream[:, :-1]}, "target": target, "ntokens": 16, "nsentences": 3}
    return model, batch, CausalLMCriterion(make_task())


def test_the_loss_is_that_of_all_log_probabilities_without_padding_and_memory_is_handed_on():
    model, batch, criterion = make_causal()
    log_probabilities, _ = model(batch["net_input"]["src_tokens"])
    by_hand = -log_probabilities.gather(-1, batch["target"][..., None]).squeeze(-1)[batch["target"] != PAD].sum()
    memory = batch["net_input"]["memory"] = StreamMemory()
    model.softmax.log_probabilities = None  # whoever calls it fails
    loss, sample_size, log = criterion(model, batch)
    torch.testing.assert_close(loss, by_hand)
    assert sample_size == 16 and not [name for name in log if "span" in name] and memory.length == 6
    values = logged(CausalLMCriterion, log)
    assert values["loss"] == pytest.approx(by_hand.item() / 16 / math.log(2), abs=1e-3)  # bits a token
    assert values["ppl"] == pytest.approx(math.exp(by_hand.item() / 16), abs=0.1)
    assert criterion(model, batch)[0] != loss


def test_spans_cost_a_loss_of_their_own():
    """The gradient is that of both losses of a token; the logged loss is the cross-entropy, as of any model."""
    model, batch, criterion = make_causal("s[span=40,ramp=3,span_loss=0.01] f s[span=20,ramp=3,span_loss=0.5]")
    low, high = model.decoder.options.common["spans"]
    low.shares.data.copy_(torch.tensor([0.1, 0.3]))
    high.shares.data.copy_(torch.tensor([0.5, 0.2]))
    loss, sample_size, log = criterion(model, batch)
    penalty = 0.01 * 40 * 0.2 + 0.5 * 20 * 0.35
    nll, _ = model(**batch["net_input"], target=batch["target"])
    torch.testing.assert_close(loss, nll.sum() + 16 * penalty)
    torch.testing.assert_close(log["loss"], nll.sum().detach())

    gradients = torch.autograd.grad(loss / sample_size, [low.shares, high.shares])
    of_nll = torch.autograd.grad(nll.sum() / sample_size, [low.shares, high.shares])
    for found, by_nll, of_penalty in zip(gradients, of_nll, (0.01 * 40 / 2, 0.5 * 20 / 2), strict=True):
        torch.testing.assert_close(found, by_nll + of_penalty)
    values = logged(CausalLMCriterion, log)
    assert values["span"] == pytest.approx((40 * 0.2 + 20 * 0.35) / 2, abs=0.1)
    assert values["span_loss"] == pytest.approx(penalty / math.log(2), abs=1e-4)
    assert values["loss"] == pytest.approx(nll.sum().item() / 16 / math.log(2), abs=1e-3)


# --- batches that predict nothing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["masked_lm_accuracy", "continued_masked_lm", "causal_lm"])
def test_a_batch_without_targets_has_a_loss_and_gradients_of_zero_and_no_weight_in_the_log(name, tmp_path):
    pattern = "s[span=40,ramp=3,span_loss=0.01] f[experts=2]"
    if name == "causal_lm":
        model, batch, criterion = make_causal(pattern)
    else:
        model, batch = make_model(pattern), make_batch()
        criterion = MaskedLMAccuracyCriterion(make_task())
    if name == "continued_masked_lm":
        criterion = make_criterion(distill=save(make_model("sf"), tmp_path / "teacher"))
    empty = {**batch, "target": torch.full_like(batch["target"], PAD)}
    loss, predicted, log = criterion.train()(model.train(), empty)
    loss.backward()
    assert loss == 0
    assert predicted == 0
    assert not any(weight.grad.count_nonzero() for weight in model.parameters() if weight.grad is not None)
    assert all(math.isfinite(value) for value in logged(type(criterion), log).values())

    _, _, other = criterion(model, batch)
    with metrics.aggregate(new_root=True) as meters:
        criterion.reduce_metrics([other])
        criterion.reduce_metrics([log])
    found = meters.get_smoothed_values()
    expected = logged(type(criterion), other)
    means = [name for name in expected if name != "experts_dropped"]  # which every token counts in
    assert {name: found[name] for name in means} == pytest.approx({name: expected[name] for name in means}, rel=1e-3)


# --- continued_masked_lm ----------------------------------------------------------------------------------------------


def save(model: LazyFormerModel, folder) -> str:
    """The model as `lazyformer export` writes one, but for the tokenizer."""
    folder.mkdir(exist_ok=True)
    config = {"format": "lazyformer model", "format_version": 1, "architecture": "lazyformer"}
    config["model"] = asdict(plain_options(MaskedLMOptions, model.cfg))
    (folder / "config.json").write_text(json.dumps(config))
    metadata = {"architecture": "lazyformer", "sublayer_pattern": model.cfg.sublayer_pattern}
    save_model(model, str(folder / "model.safetensors"), metadata)
    return str(folder)


def make_criterion(task=None, **options) -> ContinuedMaskedLMCriterion:
    return ContinuedMaskedLMCriterion(ContinuedMaskedLMConfig(**options), task or make_task())


def test_without_options_it_is_plain_masked_lm_and_a_model_learns_nothing_from_itself(tmp_path):
    model, batch = make_model("sfsf"), make_batch()
    plain, _, plain_log = MaskedLMAccuracyCriterion(make_task())(model, batch)
    loss, count, log = make_criterion()(model, batch)
    assert torch.equal(loss, plain) and count == 4 and log.keys() == plain_log.keys()
    criterion = make_criterion(distill=save(model, tmp_path / "t"), distill_masked_lm_weight=0.0)
    loss, _, log = criterion(model.double(), batch)
    assert abs(loss.item()) < 1e-9 and abs(log["words_kl"]) < 1e-9 and abs(log["attention_kl"]) < 1e-9


@pytest.mark.parametrize("backend", ["auto", "eager", "recompute"])
def test_the_loss_is_the_formula_in_double_precision(tmp_path, backend):
    """Against probabilities written out by softmax, from weights alone."""
    student, teacher = make_model("sflf", attention_backend=backend).double(), make_model("sfsf", 2)
    options = dict(distill_temperature=3.0, distill_masked_lm_weight=0.5, distill_words_weight=2.0)
    criterion = make_criterion(distill=save(teacher, tmp_path / "t"), distill_attention_weight=0.7, **options)
    teacher.double()
    batch = make_batch()
    loss, count, log = criterion(student, batch)

    logits = [at_masks(model, batch) for model in (student, teacher)]
    masked_lm = cross_entropy(logits[0], batch["target"][batch["target"] != PAD], reduction="sum")
    p, q = (each.div(3).softmax(-1) for each in (logits[1], logits[0]))
    words = 9 * (p * (p.log() - q.log())).sum()
    mine, its = last_probabilities(student, batch, 0), last_probabilities(teacher, batch, 2)
    text = batch["net_input"]["src_tokens"] != PAD
    rows = [
        (its[b, n, t] * (its[b, n, t] / mine[b, n, t]).log())[text[b]].sum()
        for b in range(3) for n in range(2) for t in range(6) if text[b, t]
    ]  # fmt: skip
    attention = torch.stack(rows).mean() * count
    expected = 0.5 * masked_lm + 2 * words + 0.7 * attention
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6, check_dtype=False)
    torch.testing.assert_close(log["loss"], masked_lm, check_dtype=False)
    found = logged(ContinuedMaskedLMCriterion, log)
    assert found["words_kl"] == pytest.approx(words.item() / 4 / math.log(2), abs=1e-3)
    assert found["attention_kl"] == pytest.approx(attention.item() / 4 / math.log(2), abs=1e-3)
    loss.backward()
    assert all(weight.grad is not None for weight in student.parameters() if weight.requires_grad)


def last_probabilities(model, batch, number):
    """(B, N, T, K) of sublayer `number`: scores, padding and softmax by hand."""
    network = network_of(model)
    _, extra = model(batch["net_input"]["src_tokens"], return_all_hiddens=True)
    x = extra["inner_states"][number]
    q, k, _ = network.sublayers[number].inner.qkv_proj(x).chunk(3, -1)
    q, k = (part.unflatten(-1, (2, 6)).transpose(1, 2) for part in (q, k))
    added = network.relative_position_bias(x.size(1)).dense(6, 6, q)
    raw = q @ k.transpose(-1, -2) / math.sqrt(6) + added
    return raw.masked_fill((batch["net_input"]["src_tokens"] == PAD)[:, None, None], -math.inf).softmax(-1)


def test_what_cannot_be_meant_is_refused():
    for options, message in (
        ({"distill_temperature": 0.0}, "--distill-temperature 0: must be more than 0"),
        ({"distill_words_weight": -1.0}, "--distill-words-weight -1: must be 0 or more"),
        ({"distill_masked_lm_weight": math.inf}, "--distill-masked-lm-weight inf"),
        ({"distill": "nowhere"}, "nowhere: no such file or folder"),
    ):
        with pytest.raises(UserError, match=message):
            make_criterion(**options)


def test_a_teacher_of_another_dictionary_or_other_sizes_than_it_says_is_refused(tmp_path):
    path = save(make_model("sf"), tmp_path / "t")
    with pytest.raises(UserError, match="dictionary of 24 symbols, but this run's dictionary has 25"):
        make_criterion(make_task(25), distill=path)
    config = json.loads((tmp_path / "t/config.json").read_text())
    config["model"]["encoder_embed_dim"] = 1_000_000  # which would not fit the memory
    (tmp_path / "t/config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="model.safetensors: .*embed_tokens.weight has the shape"):
        make_criterion(distill=path)


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_in_half_precision_the_original_is_too(tmp_path, precision):
    path = save(make_model("sfsf"), tmp_path / "original")
    losses = []
    for precision_here in (torch.float32, precision):
        criterion = make_criterion(distill=path).to(precision_here)
        loss = criterion(make_model("sflf", 2).to(precision_here), make_batch())
        assert next(criterion.distillation.teacher.parameters()).dtype == precision_here
        losses.append(loss[0].float())
        losses[-1].backward()
    torch.testing.assert_close(*losses, rtol=0.05, atol=0.0)


@pytest.mark.parametrize(
    ("pattern", "heads", "message"),
    [
        ("sf", 3, "the teacher has 3 heads and the model has 2, so .*--distill-attention-weight 0"),
        ("ff", 2, "no sublayer that computes an attention distribution"),
        ("s[linformer=4]f", 2, "does not compute a distribution over the input tokens only"),
    ],
)
def test_attention_that_cannot_be_compared_is_refused(tmp_path, pattern, heads, message):
    bias = {"relative_position_buckets": 0}
    model = make_model("sf", **bias)
    path = save(make_model(pattern, 2, **bias, encoder_attention_heads=heads), tmp_path / "t")
    with pytest.raises(UserError, match=message):
        make_criterion(distill=path)(model, make_batch())
    loss, _, log = make_criterion(distill=path, distill_attention_weight=0.0)(model, make_batch())
    assert loss > 0 and "attention_kl" not in log
