"""Models of transformers with the package's networks inside."""

import subprocess

import pytest
import torch
import transformers
from exports import SIZES, code_in, some_ids
from helpers import ROOT, mostly_slow
from torch.testing import assert_close

import lazyformer_fairseq
from lazyformer_fairseq import (
    LazyFormerCausalConfig,
    LazyFormerConfig,
    LazyFormerForCausalLM,
    LazyFormerForMaskedLM,
    build,
    huggingface,
)
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.huggingface.models.encoder import LazyFormerModel
from lazyformer_fairseq.modules.attention import attend
from lazyformer_fairseq.modules.networks import stack
from lazyformer_fairseq.modules.networks.encoder import Encoder
from lazyformer_fairseq.modules.networks.recomputed import segments_of
from lazyformer_fairseq.modules.networks.stream_memory import StreamMemory
from lazyformer_fairseq.modules.sublayers import attention
from lazyformer_fairseq.patterns.architectures import ARCHITECTURES, CAUSAL_ARCHITECTURES

NO_DROPOUT = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "activation_dropout"), 0.0)
OURS = (
    ("lm_head.decoder.", "encoder.lm_head."),
    ("lm_head.", "encoder.lm_head."),
    ("lazyformer.encoder.", "encoder.sentence_encoder."),
)
LABELS = torch.where(torch.rand(3, 11, generator=torch.Generator().manual_seed(3)) < 0.3, some_ids(), -100)


def tiny(pattern: str = "(sflf)x2", **settings) -> LazyFormerForMaskedLM:
    torch.manual_seed(1)
    return LazyFormerForMaskedLM(LazyFormerConfig(sublayer_pattern=pattern, **{**SIZES, **NO_DROPOUT, **settings}))


def test_it_is_the_packages_encoder_and_a_message_names_what_does_not_exist():
    model = LazyFormerForMaskedLM(
        LazyFormerConfig(sublayer_pattern="(sflf)x6", hidden_size=256, num_attention_heads=4, intermediate_size=1024)
    )
    assert isinstance(model.lazyformer.encoder, Encoder)
    assert type(model.lazyformer) is huggingface.LazyFormerModel is LazyFormerModel
    assert lazyformer_fairseq.LazyFormerModel is not LazyFormerModel, "fairseq's, as ever"
    with pytest.raises(UserError, match="did you mean modernbert_base"):
        LazyFormerConfig.from_arch("modernbert_bsae", vocab_size=9)
    with pytest.raises(AttributeError):
        _ = huggingface.Lazy


def test_a_config_without_a_pattern_is_the_papers_model(tmp_path):
    config = LazyFormerConfig()
    assert config.sublayer_pattern == "M2x6"
    model = LazyFormerForMaskedLM(LazyFormerConfig(**SIZES)).eval()
    assert len(model.lazyformer.encoder.sublayers) == model.config.num_hidden_layers == 24
    model.save_pretrained(tmp_path)
    code = code_in(tmp_path)
    assert_close(code.LazyFormerForMaskedLM.from_pretrained(tmp_path)(some_ids()).logits, model(some_ids()).logits)
    with pytest.raises(UserError, match="'' is empty; use, for example, M2x6"):
        LazyFormerConfig(sublayer_pattern="")
    assert LazyFormerForCausalLM(LazyFormerCausalConfig(**SIZES))(some_ids()).logits.isfinite().all()


TINY = [arch for arch in (*ARCHITECTURES, *CAUSAL_ARCHITECTURES) if arch.endswith("_tiny")]
QUICK = ("lazyformer_m2x6_s_tiny", "longformer_tiny", "neobert_tiny", "transformer_xl_tiny")


@pytest.mark.parametrize("arch", mostly_slow(TINY, *QUICK))
@torch.no_grad()
def test_the_same_seed_gives_the_weights_and_numbers_of_our_model(arch):
    torch.manual_seed(3)
    is_causal = arch in CAUSAL_ARCHITECTURES
    ours = build(arch, 40, **({"adaptive_softmax_cutoff": "20,30"} if is_causal else {})).eval()
    torch.manual_seed(3)
    config = LazyFormerConfig.from_arch(arch, 40, **({"adaptive_softmax_cutoff": "20,30"} if is_causal else {}))
    model = (LazyFormerForCausalLM if is_causal else LazyFormerForMaskedLM)(config).eval()
    named = {}
    for name, weight in model.state_dict().items():
        theirs, mine = next((each for each in OURS if name.startswith(each[0]) and not is_causal), ("", ""))
        named[mine + name.removeprefix(theirs)] = weight
    wanted = ours.state_dict()
    assert named.keys() == wanted.keys()
    assert all(torch.equal(weight, wanted[name]) for name, weight in named.items())
    marked = torch.zeros_like(some_ids()).index_fill(1, torch.tensor([0]), 1)
    asks = "global=given" in config.sublayer_pattern
    given = {"global_attention_mask": marked} if asks else {}
    found = model(some_ids(right=0 if is_causal else 3), **given).logits
    given = {"global_positions": marked.bool()} if asks else {}
    assert torch.equal(found, ours(some_ids(right=0 if is_causal else 3), **given)[0])


def test_logits_of_predicted_tokens_alone_are_computed_in_training():
    model, ids, labels = tiny(), some_ids(right=3), LABELS
    whole = model.eval()(ids, labels=labels)
    assert whole.logits.shape == (3, 11, 40), "for compute_metrics"
    assert_close(whole.loss, torch.nn.functional.cross_entropy(whole.logits.flatten(0, 1), labels.flatten()))
    alone = model.train()(ids, labels=labels)
    assert_close(alone.logits, whole.logits[labels != -100])
    assert_close(alone.loss, whole.loss)
    assert_close(model(ids, labels=labels, num_items_in_batch=100).loss, whole.loss * alone.logits.size(0) / 100)
    assert model(ids).logits.shape == (3, 11, 40)
    model.config.sparse_prediction = False
    assert model(ids, labels=labels).logits.shape == (3, 11, 40)


def test_the_back_end_is_chosen_by_name_and_attentions_are_eager(monkeypatch):
    called = []

    def noted(*given):
        called.append(given[-1])
        return attend(*given)

    monkeypatch.setattr(attention, "attend", noted)
    model = tiny(attention_backend="materialize")
    model(some_ids())
    model(some_ids(), output_attentions=True)
    model.set_attn_implementation("eager")
    model(some_ids())
    assert called == ["materialize"] * 2 + ["eager"] * 4
    with pytest.raises(UserError, match="choose from auto, eager"):
        tiny(attention_backend="fastest")


def test_gradient_checkpointing_leaves_gradients_and_spans_cost(monkeypatch):
    pattern = "s[span=8,span_loss=0.5] f l f"
    config = LazyFormerCausalConfig(**SIZES, **NO_DROPOUT, sublayer_pattern=pattern)
    plans = []
    monkeypatch.setattr(stack, "segments_of", lambda *given: plans.append(segments_of(*given)) or plans[-1])
    for model in (tiny(pattern), LazyFormerForCausalLM(config)):
        model.train()(some_ids(), labels=LABELS).loss.backward()
        wanted = {name: weight.grad for name, weight in model.named_parameters()}
        model.zero_grad(set_to_none=True)
        model.gradient_checkpointing_enable()
        loss = model(some_ids(), labels=LABELS).loss
        loss.backward()
        assert wanted.keys() == {name for name, _ in model.named_parameters()}
        for name, weight in model.named_parameters():
            assert_close(weight.grad, wanted[name])
        assert plans.pop() == [[0, 1, 2, 3]]
        span = next(module for module in model.modules() if hasattr(module, "penalty_weight"))
        span.shares.data += 0.5
        assert model(some_ids(), labels=LABELS).loss - model.eval()(some_ids(), labels=LABELS).loss > 1


@torch.no_grad()
def test_documents_do_not_see_each_other_and_embeddings_may_be_given():
    model, ids = tiny().eval(), some_ids()
    apart = model(ids, documents=[[4, 7]] * 3, restart_positions=True, output_hidden_states=True)
    assert_close(apart.logits[:, :4], model(ids[:, :4]).logits)
    assert_close(apart.logits[:, 4:], model(ids[:, 4:]).logits)
    assert len(apart.hidden_states) == 9
    words = model.lazyformer.encoder.embed_tokens(ids)
    assert_close(model(inputs_embeds=words).logits, model(ids).logits)
    with pytest.raises(ValueError, match="documents cannot be combined with output_attentions"):
        model(ids, documents=[[4, 7]] * 3, output_attentions=True)
    model.set_attn_implementation("eager")  # or transformers refuses what follows
    model.config.output_attentions = True
    with pytest.raises(ValueError, match="documents cannot be combined with output_attentions"):
        model(ids, documents=[[4, 7]] * 3)


IMPORT = "from lazyformer_fairseq import LazyFormerConfig, LazyFormerForMaskedLM, LazyFormerForCausalLM"
HIDE = (
    "from importlib import util; f = util.find_spec; util.find_spec = lambda n: None if n == 'transformers' else f(n)"
)


def test_the_import_needs_no_fairseq_and_names_the_extra_that_is_lacking(warm_python):
    def run(*code: str) -> subprocess.CompletedProcess:
        return subprocess.run([warm_python / "python", "-c", "; ".join(code)], capture_output=True, text=True, cwd=ROOT)

    shown = run(IMPORT, "import sys", "print('fairseq' in sys.modules)")
    assert shown.stdout == "False\n", shown.stderr
    message = "LazyFormerConfig requires transformers (not installed): pip install 'lazyformer_fairseq[huggingface]'"
    assert message in run(HIDE, IMPORT).stderr.splitlines()[-1]


# Causal models


def causal(pattern: str = "(sf)x2", **settings) -> LazyFormerForCausalLM:
    torch.manual_seed(2)
    sizes = {**SIZES, **NO_DROPOUT, "initializer_range": 0.4, "eos_token_id": None, "pad_token_id": None}
    config = LazyFormerCausalConfig(sublayer_pattern=pattern, **{**sizes, **settings})
    return LazyFormerForCausalLM(config).eval()


PATTERNS = {
    "plain": ("(sf)x2", {}),
    "lazy": ("s f l f k f", {}),
    "convolution": ("c f s f", {"normalize_before": True}),
    "recurrence": ("r f s r[cell=brc] r[cell=mingru]", {}),
    "window": ("s[window=3] f l f", {}),
    "span": ("s[span=8] f", {}),
    "same length": ("(sf)x2", {"same_length": True, "mem_len": 4}),
    "without attention": ("f", {}),
    "no memory": ("s[strided=4] f", {"mem_len": 0}),
    "absolute": (
        "s[positions=absolute,length=14] f l k f",
        {"mem_len": 0, "untied_softmax": True, "scaled_init": True},
    ),
    "bands": ("(sf)x2", {"adaptive_softmax_cutoff": "10,25", "adaptive_softmax_factor": 2}),
}


@pytest.mark.parametrize("name", mostly_slow(PATTERNS, "lazy", "recurrence", "span", "absolute", "bands"))
@torch.no_grad()
def test_each_step_computes_what_a_pass_over_all_does(name):
    pattern, settings = PATTERNS[name]
    model, ids = causal(pattern, **settings), some_ids(time=5)
    found = model.generate(ids, max_new_tokens=9, do_sample=False, return_dict_in_generate=True, output_logits=True)
    whole = model(found.sequences).logits
    assert found.sequences.shape == (3, 14)
    assert_close(torch.stack(found.logits, 1), whole[:, 4:-1])
    assert torch.equal(found.sequences[:, 5:], whole[:, 4:-1].argmax(-1))
    for how in ({"num_beams": 3}, {"do_sample": True}, {"num_beams": 2, "do_sample": True}):
        with_and_without = []
        for cache in (True, False):
            torch.manual_seed(4)
            with_and_without.append(model.generate(ids, max_new_tokens=7, use_cache=cache, **how))
        assert torch.equal(*with_and_without)


@torch.no_grad()
def test_memory_goes_on_as_in_training_and_padding_is_refused():
    model, ids = causal(mem_len=4), some_ids()
    memory = StreamMemory()
    model(ids[:, :6], past_key_values=memory)
    assert memory.length == 4
    limited = huggingface.LazyFormerMemory(longest=4)
    model(ids[:, :6], past_key_values=limited)
    assert_close(model(ids[:, 6:], past_key_values=limited).logits, model(ids[:, 6:], past_key_values=memory).logits)
    whole = model(ids[:, :6], use_cache=True)
    kept = whole["past_key_values" if "past_key_values" in whole else "cache"]
    assert_close(model(ids[:, 6:], past_key_values=kept).logits, model(ids).logits[:, 6:])
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    with pytest.raises(UserError, match="texts of equal length"):
        model.generate(ids, attention_mask=mask, max_new_tokens=2)
    with pytest.raises(UserError, match="with 40 words cannot be resized"):
        model.resize_token_embeddings(41)


def test_a_causal_models_loss_is_ours_and_it_loads_by_the_auto_classes(tmp_path):
    model = causal(adaptive_softmax_cutoff="10,25", pad_token_id=1)
    out = model.train()(some_ids(), labels=some_ids())
    assert out.logits is None, "rare words' scores are computed where they are needed"
    evaluated = model.eval()(some_ids(), labels=some_ids())
    nats = torch.nn.functional.cross_entropy(evaluated.logits[:, :-1].flatten(0, 1), some_ids()[:, 1:].flatten())
    assert_close(out.loss, nats)
    assert_close(evaluated.loss, nats)
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is LazyFormerForCausalLM
    assert torch.equal(again(some_ids()).logits, evaluated.logits)
