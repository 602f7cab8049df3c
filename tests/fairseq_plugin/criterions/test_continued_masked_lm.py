"""Criterion ``continued_masked_lm``: terms by hand, and what is refused."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from fairseq.data import Dictionary
from fairseq.logging import metrics
from omegaconf import OmegaConf
from safetensors.torch import save_model

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.criterions.language_modeling import (
    ContinuedMaskedLMConfig,
    ContinuedMaskedLMCriterion,
    MaskedLMAccuracyCriterion,
    network_of,
)
from lazyformer_fairseq.fairseq_plugin.models.config import LazyFormerConfig
from lazyformer_fairseq.fairseq_plugin.models.export import OPTIONS
from lazyformer_fairseq.fairseq_plugin.models.lazyformer import LazyFormerModel

SIZES = dict(encoder_embed_dim=12, encoder_ffn_embed_dim=8, encoder_attention_heads=2, max_positions=8, dropout=0.0)
PAD = 1


def make_dictionary(words: int = 20) -> Dictionary:
    dictionary = Dictionary()
    for number in range(words):
        dictionary.add_symbol(f"w{number}")
    return dictionary


def make_model(pattern: str, seed: int, **options) -> LazyFormerModel:
    torch.manual_seed(seed)
    cfg = LazyFormerConfig(**{**SIZES, "sublayer_pattern": pattern, **options})
    model = LazyFormerModel(cfg, make_dictionary())
    for weight in model.parameters():  # so that what attends to what matters
        torch.nn.init.normal_(weight, std=0.4)
    return model


def make_task(dictionary=None) -> SimpleNamespace:
    dictionary = dictionary or make_dictionary()
    return SimpleNamespace(
        source_dictionary=dictionary,
        target_dictionary=dictionary,
        build_model=lambda cfg: LazyFormerModel.build_model(
            OmegaConf.merge(OmegaConf.structured(LazyFormerConfig), {k: v for k, v in cfg.items() if k != "_name"}),
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


def save(model: LazyFormerModel, folder) -> str:
    """The model as `lazyformer export` writes one, but for the tokenizer."""
    folder.mkdir(exist_ok=True)
    options = OmegaConf.to_container(OmegaConf.structured(model.cfg), enum_to_str=True)
    config = {"format": "lazyformer model", "format_version": 1, "architecture": "lazyformer"}
    config["model"] = {name: options[name] for name in OPTIONS}
    (folder / "config.json").write_text(json.dumps(config))
    metadata = {"architecture": "lazyformer", "sublayer_pattern": model.cfg.sublayer_pattern}
    save_model(model, str(folder / "model.safetensors"), metadata)
    return str(folder)


def make_criterion(task=None, **options) -> ContinuedMaskedLMCriterion:
    return ContinuedMaskedLMCriterion(ContinuedMaskedLMConfig(**options), task or make_task())


def test_without_options_it_is_plain_masked_lm():
    model, batch = make_model("M2", 1), make_batch()
    plain, _, plain_log = MaskedLMAccuracyCriterion(make_task())(model, batch)
    loss, count, log = make_criterion()(model, batch)
    assert torch.equal(loss, plain) and count == 4 and log.keys() == plain_log.keys()


def test_a_model_learns_nothing_from_itself(tmp_path):
    model, batch = make_model("sfsf", 1).double(), make_batch()
    criterion = make_criterion(distill=save(make_model("sfsf", 1), tmp_path / "t"), distill_masked_lm_weight=0.0)
    loss, _, log = criterion(model, batch)
    assert abs(loss.item()) < 1e-9 and abs(log["words_kl"]) < 1e-9 and abs(log["attention_kl"]) < 1e-9
    loss.backward()
    assert max(weight.grad.abs().max() for weight in model.parameters() if weight.grad is not None) < 1e-9


@pytest.mark.parametrize("backend", ["auto", "eager", "recompute"])
def test_the_loss_is_the_formula_in_double_precision(tmp_path, backend):
    """Against probabilities written out by softmax, from weights alone."""
    student = make_model("sflf", 1, attention_backend=backend).double()
    teacher = make_model("sfsf", 2).double()
    options = dict(distill_temperature=3.0, distill_masked_lm_weight=0.5, distill_words_weight=2.0)
    criterion = make_criterion(distill=save(teacher.float(), tmp_path / "t"), distill_attention_weight=0.7, **options)
    teacher.double()
    batch = make_batch()
    loss, count, log = criterion(student, batch)

    logits = [at_masks(model, batch) for model in (student, teacher)]
    answers = batch["target"][batch["target"] != PAD]
    masked_lm = -logits[0].log_softmax(-1)[torch.arange(4), answers].sum()
    p, q = (each.div(3).softmax(-1) for each in (logits[1], logits[0]))
    words = 9 * (p * (p.log() - q.log())).sum()
    mine, its = last_probabilities(student, batch, 0), last_probabilities(teacher, batch, 2)
    text = batch["net_input"]["src_tokens"] != PAD
    rows = [
        (its[b, n, t] * (its[b, n, t] / mine[b, n, t]).log())[text[b]].sum()
        for b in range(3) for n in range(2) for t in range(6) if text[b, t]
    ]  # fmt: skip
    attention = torch.stack(rows).mean() * count
    torch.testing.assert_close(
        loss, 0.5 * masked_lm + 2 * words + 0.7 * attention, rtol=1e-6, atol=1e-6, check_dtype=False
    )
    torch.testing.assert_close(log["loss"], masked_lm, check_dtype=False)
    with metrics.aggregate(new_root=True) as meters:
        ContinuedMaskedLMCriterion.reduce_metrics([log, log])
    found = meters.get_smoothed_values()
    assert found["words_kl"] == pytest.approx(words.item() / 4 / math.log(2), abs=1e-3)
    assert found["attention_kl"] == pytest.approx(attention.item() / 4 / math.log(2), abs=1e-3)
    loss.backward()
    assert all(weight.grad is not None for weight in student.parameters() if weight.requires_grad)


def at_masks(model, batch):
    logits, _ = model(batch["net_input"]["src_tokens"])
    return logits[batch["target"] != PAD]


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"distill_temperature": 0.0}, "--distill-temperature 0: must be more than 0"),
        ({"distill_words_weight": -1.0}, "--distill-words-weight -1: must be 0 or more"),
        ({"distill_masked_lm_weight": math.inf}, "--distill-masked-lm-weight inf"),
        ({"replace_progressively": "x"}, "--replace-progressively: went, for it gained nothing .*; leave it out"),
        ({"distill": "nowhere"}, "nowhere: no such file or folder"),
    ],
)
def test_what_cannot_be_meant_is_refused(options, message):
    with pytest.raises(UserError, match=message):
        make_criterion(**options)


def test_a_teacher_with_another_dictionary_is_refused(tmp_path):
    path = save(make_model("sf", 1), tmp_path / "t")
    with pytest.raises(UserError, match="dictionary of 24 symbols, this run's has 25"):
        make_criterion(make_task(make_dictionary(21)), distill=path)


def test_an_original_whose_settings_are_another_models_is_refused(tmp_path):
    folder = tmp_path / "t"
    path = save(make_model("sf", 1), folder)
    config = json.loads((folder / "config.json").read_text())
    config["model"]["encoder_embed_dim"] = 1_000_000  # which would not fit the memory
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="model.safetensors: .*embed_tokens.weight is"):
        make_criterion(distill=path)


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_in_half_precision_the_original_is_too(tmp_path, precision):
    path = save(make_model("sfsf", 1), tmp_path / "original")
    losses = []
    for precision_here in (torch.float32, precision):
        model = make_model("sflf", 2).to(precision_here)
        criterion = make_criterion(distill=path).to(precision_here)
        losses.append(criterion(model, make_batch())[0].float())
        losses[-1].backward()
    torch.testing.assert_close(*losses, rtol=0.05, atol=0.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"encoder_attention_heads": 3}, "the teacher has 3 heads, the model 2: .*--distill-attention-weight 0"),
        ({"sublayer_pattern": "ff"}, "no sublayer that makes an attention distribution"),
        ({"sublayer_pattern": "s[linformer=4]f"}, "not one over tokens alone"),
    ],
)
def test_attention_that_cannot_be_compared_is_refused(tmp_path, options, message):
    bias = {"relative_position_buckets": 0}
    model = make_model("sf", 1, **bias)
    options = dict(options)
    path = save(make_model(options.pop("sublayer_pattern", "sf"), 2, **bias, **options), tmp_path / "t")
    with pytest.raises(UserError, match=message):
        make_criterion(distill=path)(model, make_batch())
    loss, _, log = make_criterion(distill=path, distill_attention_weight=0.0)(model, make_batch())
    assert loss > 0 and "attention_kl" not in log


def test_a_record_of_heads_that_moved_is_refused(tmp_path):
    path = tmp_path / "warm_start.json"
    path.write_text('{"sublayers": [{"from": 0, "head_order": null}]}')
    make_criterion(warm_start=str(path))
    path.write_text('{"sublayers": [{"from": 0, "head_order": [1, 0]}]}')
    with pytest.raises(UserError, match="--warm-start .*warm_start.json: heads were moved"):
        make_criterion(warm_start=str(path))
