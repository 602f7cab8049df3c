"""Memory that is measured on fake tensors is what torch's allocator gives a real update, within a tenth."""

import gc
from itertools import product

import pytest
import torch
from helpers import ROOT, load_script, mostly_slow
from torch.nn import functional as F

from lazyformer_fairseq.evaluation.costs.latency import peak_memory
from lazyformer_fairseq.evaluation.costs.machine import PRECISIONS
from lazyformer_fairseq.evaluation.costs.memory import Batch, UpdateMemory, measure_update_memory
from lazyformer_fairseq.evaluation.planning.job import job_of_arch, with_options
from lazyformer_fairseq.modules.networks.causal_lm import CausalLM
from lazyformer_fairseq.modules.networks.masked_lm import MaskedLM
from lazyformer_fairseq.modules.networks.options import CausalLMOptions, MaskedLMOptions
from lazyformer_fairseq.modules.networks.stream_memory import StreamMemory
from lazyformer_fairseq.patterns.architectures import MASKED_LM

VOCAB_SIZE = 512
BATCH = Batch(sequences=4, tokens=128, predicted=77)
STREAMS = Batch(sequences=4, tokens=64, memory=64)


def masked(pattern: str, back_end: str = "eager", **more) -> MaskedLMOptions:
    """Return options of a tiny encoder."""
    sizes = {"encoder_embed_dim": 64, "encoder_ffn_embed_dim": 256, "encoder_attention_heads": 4}
    given = {"attention_dropout": 0.0, "max_positions": 128, **sizes, **more}
    return MaskedLMOptions(sublayer_pattern=pattern, attention_backend=back_end, **given)


def causal(pattern: str, back_end: str = "eager", **more) -> CausalLMOptions:
    """Return options of a tiny decoder."""
    sizes = {"decoder_embed_dim": 64, "decoder_ffn_embed_dim": 256, "decoder_attention_heads": 4}
    given = {"attention_dropout": 0.0, "adaptive_softmax_cutoff": "", "mem_len": 64, **sizes, **more}
    return CausalLMOptions(sublayer_pattern=pattern, attention_backend=back_end, **given)


def peak_of_real_update(options, batch: Batch, precision: str = "fp32", device: str = "cpu") -> int:
    """Return what forward and backward pass of a model with numbers take besides weights and memory."""
    is_causal = isinstance(options, CausalLMOptions)
    model = (CausalLM if is_causal else MaskedLM)(options, VOCAB_SIZE).to(device, PRECISIONS[precision]).train()
    tokens = torch.randint(5, VOCAB_SIZE, (batch.sequences, batch.tokens), device=device)
    places = torch.randperm(tokens.numel(), device=device)[: batch.predicted]
    memory = StreamMemory()

    def update() -> None:
        if is_causal:
            loss = model(tokens, memory=memory, target=tokens)[0].sum()
        else:
            logits, _ = model(tokens, masked_tokens=places, has_padding=False)
            loss = F.cross_entropy(logits.float(), tokens.flatten()[places], reduction="sum")
            del logits
        loss.backward()

    update()  # plans and operators are made once, and the memory of streams fills
    model.zero_grad(set_to_none=True)
    return peak_memory(update, device)


def besides_weights(found: UpdateMemory) -> int:
    """Return the bytes of gradients and activations at the peak."""
    return found.peak - found.weights - found.optimizer - found.carried


CASES = {
    "encoder": (masked("sflf"), BATCH, "fp32"),
    "half precision": (masked("(sflf)x2"), BATCH, "bf16"),
    "dropout of distributions": (masked("sfsflf", attention_dropout=0.1, activation_dropout=0.1), BATCH, "fp32"),
    "attention by torch": (masked("sfsflf", "recompute", relative_position_buckets=0), BATCH, "fp32"),
    "pre-norm, no feed-forward dropout": (masked("(sf)x3", encoder_normalize_before=True, dropout=0.0), BATCH, "fp32"),
    "modern": (masked("(s[rope=10000,qk_norm]f[gate=silu])x2", norm="rms", no_linear_bias=True), BATCH, "fp32"),
    "keys and values read": (masked("sfkf"), BATCH, "bf16"),
    "window": (masked("s[window=32,global=1]fs[window=32]f"), BATCH, "fp32"),
    "projected keys": (masked("(s[linformer=32]f)x2", relative_position_buckets=0), BATCH, "fp32"),
    "experts": (masked("(f[experts=4,capacity=2])x4"), BATCH, "fp32"),
    "convolution": (masked("(c)x4"), BATCH, "fp32"),
    "recurrence": (masked("(r[cell=nbrc])x4"), BATCH, "fp32"),
    "checkpoints": (masked("M2x4", checkpoint_activations=True), BATCH, "fp32"),
    "reversible": (masked("(sf)x4", reversible=True, encoder_normalize_before=True), BATCH, "fp32"),
    "streams": (causal("sflf"), STREAMS, "fp32"),
    "bands of words": (causal("sfsf", adaptive_softmax_cutoff="100,300"), STREAMS, "bf16"),
}


QUICK = ("encoder", "half precision", "window", "experts", "checkpoints", "streams", "bands of words")


@pytest.mark.parametrize("name", mostly_slow(CASES, *QUICK))
def test_a_real_update_takes_the_memory_of_one_on_fake_tensors(name):
    options, batch, precision = CASES[name]
    found = measure_update_memory(options, VOCAB_SIZE, batch, precision=precision)
    assert besides_weights(found) == pytest.approx(peak_of_real_update(options, batch, precision), rel=0.1)


def test_a_reversible_update_takes_much_less_than_one_that_keeps_all():
    plain, reversible = (
        masked("(sf)x8", reversible=is_reversible, encoder_normalize_before=True) for is_reversible in (False, True)
    )
    kept, found = (besides_weights(measure_update_memory(each, VOCAB_SIZE, BATCH)) for each in (plain, reversible))
    assert found < kept / 3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("back_end", ["eager", "recompute"])
@pytest.mark.parametrize("pattern", ["sfsf", "sflf"])
def test_a_gpu_takes_what_its_kernels_take_on_fake_tensors(pattern, back_end, precision):
    sizes = {"encoder_embed_dim": 256, "encoder_ffn_embed_dim": 1024, "max_positions": 512}
    options = masked(pattern, back_end, **sizes)
    batch = Batch(sequences=8, tokens=512, predicted=614)
    found = measure_update_memory(options, VOCAB_SIZE, batch, precision=precision, device="cuda")
    assert besides_weights(found) == pytest.approx(peak_of_real_update(options, batch, precision, "cuda"), rel=0.1)


def test_on_a_gpu_masks_of_dropout_are_booleans_and_attention_is_fused():
    options = masked("(sf)x2", "recompute", attention_dropout=0.1)
    on_processor, on_gpu = (
        measure_update_memory(options, VOCAB_SIZE, BATCH, device=device).activations for device in ("cpu", "cuda")
    )
    distributions = 2 * 4 * 4 * 128 * 128 * 4  # of both layers
    masks = 5 * 4 * 128 * 64 * 3  # of embeddings and sublayers, by three bytes fewer
    assert on_processor - on_gpu > distributions + masks


def test_half_precision_keeps_weights_and_gradients_in_single_as_fairseq_does_and_muon_one_moment_of_matrices():
    options = masked("f")
    parameters = sum(weight.numel() for weight in MaskedLM(options, VOCAB_SIZE).parameters())
    for precision, numbers in (("fp32", 2), ("bf16", 4)):
        found = measure_update_memory(options, VOCAB_SIZE, BATCH, precision=precision, single_moment_parameters=1000)
        assert found.optimizer == 4 * (numbers * parameters - 1000)
        assert found.weights == PRECISIONS[precision].itemsize * parameters


def test_gradients_of_earlier_batches_and_what_processes_send_are_there_too():
    options = masked("sf[experts=4]")
    alone, accumulating, of_two = (
        measure_update_memory(options, VOCAB_SIZE, BATCH, **how)
        for how in ({}, {"accumulates": True}, {"processes": 2})
    )
    assert 0 < accumulating.peak - alone.peak <= alone.weights
    assert of_two.peak - alone.peak == of_two.gradients - alone.gradients == alone.weights
    experts = 3 * 2 * (64 * 256 + 256 + 64)
    shared = measure_update_memory(options, VOCAB_SIZE, BATCH, elsewhere=experts)
    assert alone.weights - shared.weights == pytest.approx(4 * experts, rel=1e-6)


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
    measured = job.measure_memory(8, precision, "cpu", "eager")
    assert measured.weights + measured.optimizer == pytest.approx(held, rel=0.01)
    assert measured.peak == pytest.approx(held + peak, rel=0.1)
