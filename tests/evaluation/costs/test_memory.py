"""Memory by formula is what torch's allocator counts, within a tenth; latencies."""

import gc
import time
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple, Optional

import pytest
import torch
from fairseq.optim.fp16_optimizer import FP16Optimizer
from helpers import ROOT, dictionary_of, load_script
from torch import nn
from torch.nn import functional as F

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation.costs.latency import Timing, measure, measure_sublayers, next_segment, peak_memory
from lazyformer_fairseq.evaluation.costs.memory import UpdateMemory, count_optimizer_bytes, count_update_memory
from lazyformer_fairseq.evaluation.planning.job import job_of_arch, with_options
from lazyformer_fairseq.fairseq_plugin.models.config import CausalLMConfig, MaskedLMConfig
from lazyformer_fairseq.fairseq_plugin.models.lazyformer import CausalLanguageModel, LazyFormerModel
from lazyformer_fairseq.modules.attention.selection import BACKENDS
from lazyformer_fairseq.modules.memory_costs import Pass
from lazyformer_fairseq.modules.networks.causal_decoder import CausalDecoder
from lazyformer_fairseq.modules.networks.encoder import Encoder
from lazyformer_fairseq.modules.networks.stack import Stack, StreamMemory
from lazyformer_fairseq.modules.sublayers.interface import Sublayer
from lazyformer_fairseq.patterns.architectures import MASKED_LM
from lazyformer_fairseq.patterns.grammar import plan
from lazyformer_fairseq.patterns.kinds import EncoderSizes
from lazyformer_fairseq.report.numbers import with_spread

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ON_A_PROCESSOR = [name for name in BACKENDS if name != "flex"]  # it does not train there
TINY = {"batch": 4, "time": 128, "embed_dim": 64, "vocab_size": 512}
CAUSAL_TINY = {**TINY, "time": 64, "memory": 64}
LARGER = {"batch": 2, "time": 512, "embed_dim": 256, "vocab_size": 4096}


class Case(NamedTuple):
    """A model and a batch, and the formula's count for one update."""

    model: nn.Module
    network: Stack
    run: Pass
    predicted: Optional[int]

    def count(self, **more: Any) -> UpdateMemory:
        pattern = self.model.cfg.sublayer_pattern
        return count_update_memory(pattern, self.network.sizes, self.run, self.predicted, **more)


def _case(
    model, network, batch: int, time: int, precision: str, back_end: str, memory=0, device="cpu", predicted=None
) -> Case:
    cfg, features = model.cfg, network.features
    drops = (cfg.dropout > 0, cfg.attention_dropout > 0, cfg.activation_dropout > 0)
    recomputed = (cfg.checkpoint_activations, cfg.reversible)
    rest = (str(cfg.activation_fn), network.normalize_before, lambda maker: back_end, *recomputed)
    run = Pass(batch, time, memory, precision, device, features, *drops, *rest)
    return Case(model, network, run, predicted)


def _encoder(
    pattern: str, back_end: str, precision: str = "fp32", *, batch, time, embed_dim, vocab_size, device="cpu", **options
) -> Case:
    sizes = {"encoder_embed_dim": embed_dim, "encoder_ffn_embed_dim": 4 * embed_dim, "encoder_attention_heads": 4}
    given = {"attention_dropout": 0.0, "max_positions": time, **sizes, **options}
    cfg = MaskedLMConfig(sublayer_pattern=pattern, attention_backend=back_end, **given)
    model = LazyFormerModel(cfg, dictionary_of(vocab_size)).to(device, DTYPES[precision]).train()
    rest = {"device": device, "predicted": round(0.15 * batch * time)}
    return _case(model, model.encoder.sentence_encoder, batch, time, precision, back_end, **rest)


def _causal(
    pattern: str, back_end: str, precision: str = "fp32", *, batch, time, memory=0, embed_dim, vocab_size, **options
) -> Case:
    sizes = {"decoder_embed_dim": embed_dim, "decoder_ffn_embed_dim": 4 * embed_dim, "decoder_attention_heads": 4}
    given = {"attention_dropout": 0.0, "adaptive_softmax_cutoff": "", **sizes, **options}
    cfg = CausalLMConfig(sublayer_pattern=pattern, attention_backend=back_end, mem_len=memory, **given)
    model = CausalLanguageModel(cfg, dictionary_of(vocab_size)).to(DTYPES[precision]).train()
    return _case(model, model.decoder, batch, time, precision, back_end, memory=memory)


def _loss_of(case: Case) -> Any:
    """What computes the loss of a random batch; only the graph stays, as in the criterions."""
    run, vocab_size = case.run, case.network.sizes.vocab_size
    device = next(case.model.parameters()).device
    tokens = torch.randint(5, vocab_size, (run.batch, run.time), device=device)
    if case.predicted is None:
        memory = StreamMemory()
        if run.memory:
            case.model(tokens, memory=memory, target=tokens)
        return lambda: case.model(tokens, memory=memory if run.memory else None, target=tokens)[0].sum()
    places = torch.randperm(tokens.numel(), device=device)[: case.predicted]

    def loss() -> torch.Tensor:
        logits, _ = case.model(tokens, masked_tokens=places, has_padding=False)
        return F.cross_entropy(logits.float(), tokens.flatten()[places], reduction="sum")

    return loss


def assert_within_a_tenth(case: Case) -> None:
    loss = _loss_of(case)
    loss().backward()  # plans and operators are made once
    case.model.zero_grad(set_to_none=True)
    measured = peak_memory(lambda: loss().backward(), case.run.device)
    counted = case.count()
    held = counted.weights + counted.optimizer + counted.carried
    assert counted.peak - held == pytest.approx(measured, rel=0.1)


def quick_cases():
    """How a model is built, its pattern, back end, precision and options."""
    for back_end in ON_A_PROCESSOR:
        yield _encoder, "sflf", back_end, "fp32", TINY
        yield _causal, "sflf", back_end, "bf16", CAUSAL_TINY
    for pattern, back_end in (("(f)x4", "eager"), ("sfkf-", "eager"), ("sfkf", "fused")):
        yield _encoder, pattern, back_end, "fp32", TINY
    for back_end, precision in product(("eager", "fused"), ("fp32", "bf16")):
        yield _encoder, "s[rope=10000]flfs[rope=10000]f", back_end, precision, {**TINY, "relative_position_buckets": 0}
        yield _encoder, "s[qk_norm,rope=10000]flfs[qk_norm]f", back_end, precision, TINY
    for memory in (0, 128):
        yield _causal, "s[rope=10000]fkfs[rope=10000]f", "recompute", "fp32", {**CAUSAL_TINY, "memory": memory}
        yield _causal, "s[qk_norm,rope=10000]fs[qk_norm]f", "recompute", "bf16", {**CAUSAL_TINY, "memory": memory}
    for pattern, precision in product(("(c)x4", "(c[width=4])x4"), ("fp32", "bf16")):
        yield _encoder, pattern, "eager", precision, TINY
    yield _causal, "(c[width=9])x4", "eager", "fp32", CAUSAL_TINY
    for cell, precision in product(("brc", "nbrc", "mingru"), ("fp32", "bf16")):
        yield _encoder, f"(r[cell={cell}])x4", "eager", precision, TINY
        yield _causal, f"(r[cell={cell}])x4", "eager", precision, CAUSAL_TINY
    for number, pattern in enumerate(("(sf)x8", "M2x4", "(f)x8")):
        for build, sizes in ((_encoder, TINY), (_causal, CAUSAL_TINY)):
            part, precision = ("decoder" if build is _causal else "encoder"), ("fp32", "bf16", "fp32")[number]
            back_end = "fused" if number else "eager"
            yield build, pattern, back_end, precision, {**sizes, "checkpoint_activations": True}
            yield build, pattern, back_end, precision, {**sizes, "reversible": True, f"{part}_normalize_before": True}
    yield _encoder, "(f[gate=silu])x4", "eager", "fp32", {**TINY, **MODERN}
    yield _encoder, "(f[experts=4,capacity=2])x4", "eager", "fp32", TINY
    yield _causal, "(sf[experts=4,top=1,capacity=2,gate=silu])x2", "recompute", "bf16", CAUSAL_TINY
    yield _causal, "(sf[gate=relu])x2", "recompute", "bf16", {**CAUSAL_TINY, "norm": "rms", "no_linear_bias": True}


OF_ENCODERS = (
    ("eager", {"attention_dropout": 0.1}),
    ("recompute", {"attention_dropout": 0.1}),
    ("eager", {"dropout": 0.0}),
    ("eager", {"activation_dropout": 0.1}),
    ("eager", {"activation_fn": "relu"}),
    ("eager", {"encoder_normalize_before": True}),
    ("recompute", {"relative_position_buckets": 0}),
    ("eager", {"vocab_size": 8192}),
)
MODERN = {
    **{"norm": "rms", "no_linear_bias": True, "encoder_normalize_before": True, "embedding_norm": True},
    **{"plain_lm_head": True, "untied_lm_head": True, "activation_dropout": 0.1},
}
OF_CAUSAL = ({"memory": 0}, {"adaptive_softmax_cutoff": "100,300"}, {"decoder_normalize_before": True})
SETTINGS = ("window=32", "window=32,global=1", "strided=16", "fixed=32", "linformer=32", "entmax=1.5")


def slow_cases():
    for precision in ("fp32", "bf16"):
        for back_end in ON_A_PROCESSOR:
            yield from ((_encoder, pattern, back_end, precision, TINY) for pattern in ("sfsf", "sflflflf"))
            yield from ((_causal, pattern, back_end, precision, CAUSAL_TINY) for pattern in ("sfsf", "sflf"))
            yield _encoder, "sfsflf", back_end, precision, LARGER
        for back_end, options in OF_ENCODERS:
            yield _encoder, "sfsflf", back_end, precision, {**TINY, **options}
        for options in OF_CAUSAL:
            yield _causal, "sfsflf", "eager", precision, {**CAUSAL_TINY, **options}
        longer = {**TINY, "time": 256, "relative_position_buckets": 0}
        for setting in SETTINGS:
            yield _encoder, f"s[{setting}]fs[{setting}]flf", "eager", precision, longer


@pytest.mark.parametrize(
    ("build", "pattern", "back_end", "precision", "options"),
    [*quick_cases(), *(pytest.param(*case, marks=pytest.mark.slow) for case in slow_cases())],
)
def test_memory_by_formula_is_what_is_measured(build, pattern, back_end, precision, options):
    assert_within_a_tenth(build(pattern, back_end, precision, **options))


def test_a_kind_that_does_not_count_is_named():
    with pytest.raises(UserError, match="nobody counts the memory of feed-forward"):
        Sublayer.count_memory(EncoderSizes(10, 8, 16, 2), plan("f")[0], Pass(1, 2))


def test_half_precision_keeps_weights_and_gradients_in_single_as_fairseq_does_and_single_two_moments():
    model = nn.Linear(30, 20)
    numbers = sum(weight.numel() for weight in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.ones(30)).sum().backward()
    optimizer.step()
    states = [state.items() for state in optimizer.state.values()]
    moments = sum(4 * value.numel() for state in states for name, value in state if name.startswith("exp"))
    assert count_optimizer_bytes(numbers, 4) == moments
    masters = FP16Optimizer.build_fp32_params(None, list(model.bfloat16().parameters()), flatten=False)
    kept = sum(4 * (master.numel() + master.grad.numel()) for master in masters)
    assert count_optimizer_bytes(numbers, 2) == kept + moments


def test_parts_of_the_peak_add_up_with_what_is_accumulated_and_what_several_processes_send():
    case = _encoder("sfsf", "eager", **TINY)
    one, two = case.count(), case.count(processes=2)
    assert two.peak - one.peak == two.gradients - one.gradients == one.weights
    case = _encoder("sf[experts=4]", "eager", **TINY)
    one, two, three = (case.count(processes=number) for number in (1, 2, 3))
    experts = sum(each.numel() * 4 for name, each in case.model.named_parameters() if ".experts." in name)
    assert one.weights - two.weights == experts // 2 and one.optimizer - two.optimizer == experts
    assert three.weights == one.weights  # which do not divide them
    case = _encoder("sfsf", "eager", **{**TINY, "vocab_size": 8192})  # the peak is at the logits
    assert case.count(accumulates=True).peak == case.count().peak + case.count().gradients
    counted = _causal("sfsf", "eager", **CAUSAL_TINY).count(accumulates=True)
    assert counted.peak == sum(counted[:-1])


@pytest.mark.parametrize(
    ("pattern", "precision", "measured"),
    [("sfsf", "fp16", 139_618_304), ("sfsf", "bf16", 140_470_272), ("sflf", "bf16", 118_646_784)],
)
def test_materialize_in_half_precision_as_an_h200_took_it(pattern, precision, measured):
    """By the test below: a GPU subtracts in single precision without a copy, which a processor makes."""
    case = _encoder(pattern, "materialize", precision, **{**LARGER, "batch": 8})
    counted = case._replace(run=replace(case.run, device="cuda")).count()
    held = counted.weights + counted.optimizer + counted.carried
    assert counted.peak - held == pytest.approx(measured, rel=0.1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("back_end", [name for name in BACKENDS])
@pytest.mark.parametrize("pattern", ["sfsf", "sflf"])
def test_on_a_gpu(pattern, back_end, precision):
    if precision == "bf16" and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("bf16 came with compute capability 8.0")
    assert_within_a_tenth(_encoder(pattern, back_end, precision, device="cuda", **{**LARGER, "batch": 8}))


WIDE = {"encoder_embed_dim": 128, "encoder_ffn_embed_dim": 512, "encoder_attention_heads": 4, "max_positions": 64}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "optimizer", "task"),
    [
        *((*given, MASKED_LM) for given in product(("fp32", "bf16"), ("fused_adam", "muon"))),
        *((precision, "fused_adam", "masked_permuted_lm") for precision in ("fp32", "bf16")),
    ],
)
def test_an_update_of_fairseq(data_folder, tmp_path, precision, optimizer, task):
    sizes = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in WIDE.items())
    command = (
        f"--user-dir {ROOT / 'lazyformer_fairseq'} --task {task} --tokens-per-sample 64 "
        f"--criterion masked_lm_accuracy --arch bert_tiny {sizes} --attention-backend eager --batch-size 8 --cpu "
        f"--optimizer {optimizer} --lr-scheduler linear_warmup --lr 1e-3 --max-update 9"
    )
    command += " --bf16" if precision == "bf16" else ""
    training = load_script("fairseq_stepwise").FairseqTraining([str(data_folder), *command.split()], tmp_path / "run")
    for _ in range(2):
        training.update()  # the optimizer's moments are there from the first on
    training.trainer.zero_grad()
    gc.collect()
    built = training.trainer.optimizer
    masters = list(getattr(built, "fp32_params", ()))  # fairseq keeps their gradients too
    states = [value for state in built.optimizer.state.values() for value in state.values()]
    kept = [*training.trainer.model.parameters(), *masters, *(master.grad for master in masters), *states]
    held = sum(each.numel() * each.element_size() for each in kept if isinstance(each, torch.Tensor))
    peak = peak_memory(training.update, "cpu")
    job = with_options(
        job_of_arch("bert_tiny", len(training.task.dictionary)),
        {**WIDE, "tokens_per_sample": 64, "optimizer": optimizer, "task": task},
    )
    counted = job.count_memory(8, precision, "cpu", "eager")
    assert counted.weights + counted.optimizer == pytest.approx(held, rel=0.01)
    assert counted.peak == pytest.approx(held + peak, rel=0.1)


# --- Latencies, on things whose calls can be seen


def test_things_take_turns_and_warm_up_is_not_kept():
    calls = []
    things = {name: lambda name=name: (calls.append(name), time.sleep(0.02 * (name == "c"))) for name in "abc"}
    timings = measure(things, rounds=5, warm_up=2)
    rounds = [calls[start : start + 3] for start in range(0, len(calls), 3)]
    assert len(rounds) == 7 and all(sorted(one) == ["a", "b", "c"] for one in rounds)
    assert len({tuple(one) for one in rounds}) > 1, "the order changes, so that nobody always follows the same one"
    assert [len(timing.samples) for timing in timings.values()] == [5, 5, 5]
    assert timings["c"].median >= 0.02 > timings["a"].median


def test_median_and_quartiles():
    timing = Timing((4.0, 1.0, 2.0, 3.0, 100.0))
    assert timing.median == 3.0
    assert timing.as_json() == {"n": 5, "median": 3.0, "low": 2.0, "high": 4.0, "samples": [4.0, 1.0, 2.0, 3.0, 100.0]}
    assert with_spread(timing.as_json(), 2) == "3.00 (2.00 to 4.00)"
    assert with_spread(Timing((4.0, 1.0)).as_json()) == "2.5 (n = 2)", "two samples have no quartiles"


SIZES = {"vocab_size": 17, "embed_dim": 8, "ffn_embed_dim": 16, "num_heads": 2}


@pytest.mark.parametrize(
    ("network", "memory"), [(Encoder("f", **SIZES), 0), (CausalDecoder("f", **SIZES, mem_len=6), 6)]
)
def test_sublayers_of_a_network(network, memory):
    sublayers = {planned.text: planned for planned in plan("slf")}
    timings = measure_sublayers(network, sublayers, time=4, memory=memory, rounds=2, warm_up=0)
    assert list(timings) == ["s", "l", "f"]
    assert all(len(timing.samples) == 2 and timing.median > 0 for timing in timings.values())


def test_next_segment_meets_a_full_memory():
    decoder, lengths = CausalDecoder("sflf", **SIZES, mem_len=6), []

    def model(tokens_BT, memory, target):
        lengths.append(memory.length)
        decoder(tokens_BT, memory)

    tokens = torch.zeros(1, 4, dtype=torch.long)
    score = next_segment(model, tokens, tokens, mem_len=6)
    score(), score()
    assert lengths == [0, 4, 6, 6]


def test_peak_memory_counts_what_was_held_at_once():
    def two_then_one():
        kept = torch.ones(1000)  # 4,000 bytes
        gone = torch.ones(3000)
        del gone
        return kept, torch.ones(500)

    assert [peak_memory(two_then_one, "cpu") for _ in range(2)] == [16_000] * 2, "the same on every run"
