"""``lazyformer plan``, and what launches take from it."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from helpers import mostly_slow
from in_process import pretrain, refusal

from lazyformer_fairseq.arguments import CONFIGS
from lazyformer_fairseq.cli import main
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation.costs import latency, memory
from lazyformer_fairseq.evaluation.planning import job as job_module
from lazyformer_fairseq.evaluation.planning.fit import USABLE, Hardware, fit, possible_back_ends
from lazyformer_fairseq.evaluation.planning.job import (
    Job,
    job_of_arch,
    job_of_launch,
    job_of_yaml,
    vocabulary_of,
    with_options,
)
from lazyformer_fairseq.executors import nvidia_smi
from lazyformer_fairseq.fairseq_plugin.launcher.launch import Launch
from lazyformer_fairseq.options import read_size

LONG = "bert_base --gpus 8x6GB --tokens-per-sample 4096"
V100 = Hardware(8, 16 * 10**9, "fp16")


MEASURED = {}


@pytest.fixture(autouse=True)
def each_update_is_measured_once(monkeypatch):
    """Measuring takes a second or two, and many tests plan the same training."""

    def once(*given, **how):
        key = repr((given, how))
        if key not in MEASURED:
            MEASURED[key] = memory.measure_update_memory(*given, **how)
        return MEASURED[key]

    monkeypatch.setattr(job_module, "measure_update_memory", once)


def run(*arguments: object):
    return CliRunner().invoke(main, list(map(str, arguments)), catch_exceptions=True)


def plan(*arguments: object) -> dict:
    result = run("plan", *arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def short_job(arch: str, pattern: str) -> Job:
    """Return a job of few sublayers: each takes a part of a second to measure."""
    return with_options(job_of_arch(arch), {"sublayer_pattern": pattern})


def test_it_fits_and_the_next_larger_batch_does_not():
    job = short_job("lazyformer_small", "M2")
    found = fit(job, Hardware(1, 4 * 10**9, "fp16"), "recompute")
    assert 0 < found.batch < 256 and found.batch * found.update_freq == 256
    assert found.memory.peak <= USABLE * 4e9
    larger = next(size for size in range(found.batch + 1, 257) if 256 % size == 0)
    assert job.measure_memory(larger, "fp16", "cuda", "recompute", accumulates=True).peak > USABLE * 4e9


def test_an_update_stays_what_it_is_on_any_number_of_gpus_that_it_divides_among():
    job = short_job("bert_small", "M1")
    for processes in (1, 64):
        found = fit(job, Hardware(processes, 4 * 10**9, "fp16"))
        assert processes * found.batch * found.update_freq == 256
    with pytest.raises(UserError, match="256 sequences cannot be split equally among 7 GPUs"):
        fit(job, Hardware(7, 16 * 10**9, "fp16"))


def test_auto_plans_for_the_hungriest_that_it_may_take():
    job = short_job("bert_base", "M1x4")
    peaks = [job.measure_memory(1, "fp16", "cuda", name, True, 8).peak for name in ("eager", "recompute")]
    assert peaks[0] > peaks[1]
    assert fit(job, V100).memory == fit(job, V100, "eager").memory
    with pytest.raises(UserError, match="--attention-backend fused cannot compute M1x4"):  # attention dropout
        fit(job, V100, "fused")
    assert fit(short_job("par_transformer_base_0s", "ff"), V100).batch == 32, "nothing attends"


@pytest.mark.parametrize("arch", ["bert_base", "lazyformer_m2x6_s", "mpnet_base"])
def test_the_arch_and_its_yaml_are_the_same_training(arch):
    by_name, by_file = job_of_arch(arch), job_of_yaml(CONFIGS / "pretraining" / f"{arch}.yaml")
    assert all(getattr(by_name, each) == getattr(by_file, each) for each in ("tokens", "flops", "parameters"))
    if arch == "bert_base":
        sizes = (16, "fp16", "cuda", "eager")
        assert by_name.measure_memory(*sizes) == by_file.measure_memory(*sizes)
    assert (by_name.checkpoints, by_file.checkpoints) == (3 + 2 + 9, 2 + 20), "the file keeps all of its 50,000th"


def test_permuted_text_is_computed_with_its_masks():
    """Of 512 tokens 77 are predicted, and come twice more; XLNet's once."""
    plain, both = (job_of_arch(arch) for arch in ("bert_base", "mpnet_base"))
    only = job_of_launch("mpnet_base", None, "none", ["--permuted-only"])
    assert [job.computed for job in (plain, both, only)] == [512, 666, 589] and plain.tokens == both.tokens
    assert plain.flops < only.flops < both.flops
    assert job_of_launch("bert_base", None, "none", ["--task", "masked_permuted_lm"]).flops == both.flops
    assert "fused" not in possible_back_ends(replace(both, config=replace(both.config, attention_dropout=0)), "cuda")
    few = [replace(job, config=replace(job.config, sublayer_pattern="sf")) for job in (plain, only, both)]
    peaks = [job.measure_memory(8, "bf16", "cuda", "recompute").peak for job in few]
    assert peaks == sorted(peaks)


def test_settings_of_hydra_and_those_of_a_language_model():
    given = ["optimization.max_update=9", "model.encoder_embed_dim=96"]
    job = job_of_launch(None, CONFIGS / "pretraining" / "bert_base.yaml", "none", given)
    assert (job.max_update, job.sizes.embed_dim) == (9, 96) and vocabulary_of("none") is None
    job = job_of_yaml(CONFIGS / "language_modeling" / "par_transformer_base.yaml")
    found = (job.is_causal, job.time, job.memory_length, job.per_update, job.max_update)
    assert found == (True, 192, 192, 256, 40000)


def test_the_data_of_all_shards_counts(tmp_path):
    (tmp_path / "dict.txt").write_text("a 1\n")
    for shard in ("shard0", "shard1"):
        (tmp_path / shard).mkdir()
        with (tmp_path / shard / "train.bin").open("wb") as file:
            file.truncate(30_000_000)
    assert "0.06 GB of data" in run("plan", "bert_laptop_tiny", "--gpus", "8x16GB", "--data", tmp_path).output


@pytest.mark.parametrize("precision", mostly_slow(["fp32", "bf16"], "bf16"))
def test_muon_keeps_one_moment_of_the_matrices(precision, tmp_path):
    words = ("bert_small", "--gpus", "1x1GB", "--precision", precision)
    adams, muons = plan(*words), plan(*words, "--optimizer", "muon")
    matrices = 8 * (4 * 512**2 + 2 * 512 * 2048)
    assert adams["memory"]["optimizer"] - muons["memory"]["optimizer"] == 4 * matrices
    assert adams["checkpoint_bytes"] - muons["checkpoint_bytes"] == 4 * matrices
    path = tmp_path / "mine.yaml"
    path.write_text("model: {_name: lazyformer}\noptimizer: {_name: muon}")
    by_options = job_of_launch("bert_base", None, "none", ["--optimizer", "muon"])
    by_hydra = job_of_launch(None, CONFIGS / "pretraining" / "bert_base.yaml", "none", ["optimizer._name=muon"])
    matrices = 12 * (4 * 768**2 + 2 * 768 * 3072)
    assert (
        by_options.single_moment_parameters
        == by_hydra.single_moment_parameters
        == job_of_yaml(path).single_moment_parameters
        == matrices
    )


def test_options_of_a_launch_count(tmp_path):
    (tmp_path / "dict.txt").write_text("".join(f"piece{number} 1\n" for number in range(95)))
    given = ["--sublayer-pattern", "(sff)x5 (f)x9", "--tokens-per-sample=128", "--num-workers", "0"]
    given += ["--mask-prob", "0.15:0.3"]  # memory is that of the update with most
    job = job_of_launch("bert_base", None, f"{tmp_path}:elsewhere", given, per_update=64)
    assert (job.pattern, job.time, job.per_update, job.vocab_size) == ("(sff)x5 (f)x9", 128, 64, 100)
    assert job.masked == 0.3
    with pytest.raises(UserError, match="--tokens-per-sample many: must be a number"):
        with_options(job, {"tokens_per_sample": "many"})


def test_switches_count_as_options_of_a_launch_and_as_settings_of_hydra():
    on = "--checkpoint-activations --untied-lm-head --no-token-positional-embeddings --dropout 0".split()
    job, plain = job_of_launch("bert_base", None, "none", on), job_of_arch("bert_base")
    assert job.config.checkpoint_activations and job.config.no_token_positional_embeddings
    assert job.parameters - plain.parameters == 768 * (job.vocab_size - 512)
    hydra = ["model.reversible=false", "model.no_token_positional_embeddings=true"]
    job = job_of_launch(None, CONFIGS / "pretraining" / "bert_base.yaml", "none", hydra)
    assert job.config.no_token_positional_embeddings is True and job.config.reversible is False


def test_the_recipes_options_count(monkeypatch):
    jobs = []
    monkeypatch.setattr(Launch, "show_plan", lambda run, job: jobs.append(job_of_launch(*job)))
    for words in ("bert_laptop data --recipe laptop --dropout 0.1", "longformer_small data --recipe longformer-phase"):
        assert pretrain(*words.split(), "--dry-run").returncode == 0
    laptop, causal = jobs
    found = laptop.optimizer, laptop.masked, laptop.config.encoder_normalize_before, laptop.config.dropout
    assert found == ("muon", 0.3, True, 0.1) and causal.config.decoder_normalize_before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: {_name: roberta}\n", "the model is roberta, but must be"),
        ("model: 3\n", "cannot be read"),
        ("a: [\n", "not a valid YAML settings file"),
        ("", "found NoneType"),
        ("model: {_name: lazyformer, dropout: 7}", "--dropout 7.0: must be at least 0 and below 1"),
        ("model: {_name: lazyformer}\ntask: {tokens_per_sample: 2.5}", "sample 2.5: must be a whole number, 1 or more"),
        ("model: {_name: lazyformer}\ntask: {mask_prob: .nan}", "--mask-prob nan: must be a number, from 0 to 1"),
        ("model: {_name: lazyformer}\noptimization: {max_update: lots}", "--max-update lots: must be a whole number"),
        ("model: {_name: lazyformer}\ndataset: {batch_size: 0}", "--sequences-per-update 0: must be 1 or more"),
        ("model: {_name: lazyformer, encoder_embed_dim: 900000000}", "900000000: must be below 10,000,000"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text, message):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        job_of_yaml(path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("all_attention_small_tiny --gpus 4 --teraflops 60", "weights|stream memory|eager|--teraflops 60"),
        ("lazyformer_small --gpus 8 --attention-backend fused", "fused requires compute capability 8.0"),
        ("bert_base --gpus 1x1GB", "THIS DOES NOT FIT|Choose shorter sequences or a larger GPU."),
        pytest.param(
            "bert_base --gpus 1x1GB --precision fp32",
            "Choose shorter sequences, half precision or a larger GPU.",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            f"{LONG} --attention-backend eager",
            "Choose --attention-backend recompute, shorter",
            marks=pytest.mark.slow,
        ),
        pytest.param("nbrc_tiny --gpus 8x16GB", "million|eager", marks=pytest.mark.slow),  # no back end attends
    ],
)
def test_the_text_says_all_that_counts(options, words):
    output = run("plan", *options.split()).output
    assert all(word in output for word in words.split("|"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lazyformer_m2x6"[:-1]], "no such arch; did you mean"),
        (["bert_bas.yaml"], "bert_bas.yaml: no such file here or in "),
        (["bert_base", "--data", "nowhere"], "nowhere is not a folder"),
        (["bert_base", "--data", "."], "dict.txt contains no symbols"),
        (["bert_base", "--tokens-per-sample", "99999999"], "must be below 10,000,000"),
        (["bert_base", "--sequences-per-update", "1999999999"], "must be below 1,000,000,000"),
    ],
)
def test_mistakes(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dict.txt").touch()
    assert message in str(run("plan", *arguments).exception)


@pytest.mark.parametrize("option", ["--teraflops", "--gpus", "--max-update", "--sequences-per-update"])
@pytest.mark.parametrize("value", ["nan", "inf", "-1", "0", "1" + "0" * 20])
def test_a_plan_takes_no_nonsense(option, value):
    assert re.search("Invalid value|must be", refusal("plan", "bert_base", f"{option}={value}"))


@pytest.mark.parametrize(("text", "size"), [("16GB", 16 * 10**9), ("16GiB", 2**34), ("1.5gb", 15 * 10**8)])
def test_sizes(text, size):
    assert read_size(text) == size
    assert "'big' is not a size; use, for example, 16GB" in run("plan", "x", "--gpus", "8xbig").output


@pytest.fixture
def gpus(monkeypatch):
    """``gpus(8, 16160)``: so many GPUs of so many MiB, of compute capability 7.0."""

    def there(number: int, mebibytes: object) -> None:
        def ask(*options: str) -> list[str]:
            if options == ("-L",):
                return ["GPU: NVIDIA"] * number
            return [str(mebibytes) if "memory" in options[0] else "7.0"] * number

        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(nvidia_smi, "_ask", ask)

    return there


def batch_of(*arguments: object) -> int:
    words = pretrain(*arguments, "--dry-run").stdout.split()
    hydra = [word.partition("=")[2] for word in words if word.startswith("dataset.batch_size=")]
    return int(hydra[0] if hydra else words[words.index("--batch-size") + 1])


def test_it_takes_what_the_plan_says_and_what_the_user_gives_wins(gpus):
    gpus(8, 16160)
    planned = plan("bert_base")
    assert (planned["gpus"], planned["gpu_memory"], planned["precision"]) == (8, 16160 * 2**20, "fp16"), "this machine"
    assert batch_of("bert_base", "data") == planned["batch_size"] == 16
    assert batch_of("bert_base.yaml", "data") == 16
    assert batch_of("bert_base", "data", "--batch-size", 2) == 2
    assert batch_of("bert_base", "data", "--no-fit") == 16
    gpus(8, 32510)
    assert batch_of("bert_base", "data") == 32, "more memory, a larger batch"


@pytest.mark.parametrize("told", ["[N/A]", ""])
def test_a_driver_that_does_not_tell(gpus, told):
    gpus(8, told)
    assert batch_of("bert_base", "data") == 16


def test_without_a_gpu_the_plan_is_for_the_processor(gpus, monkeypatch):
    monkeypatch.setattr(latency, "MATRIX_SIZES", {"cpu": (256, 512)})
    gpus(0, 0)
    result = pretrain("bert_base", "data", *"--dry-run --sequences-per-update 32 --sublayer-pattern M1".split())
    assert "--batch-size 4 " in result.stdout and " --cpu " in result.stdout
    assert re.search(r"this machine's CPU: 1 x [\d.]+ GB, fp32", result.stderr)
    assert re.search("--teraflops [.0-9]+, the matmul speed of this CPU", result.stderr)
    planned = plan("bert_small")
    assert (planned["gpus"], planned["batch_size"], planned["precision"]) == (1, 4, "fp32")
    assert 1e9 < planned["flops_per_second"] < 2e13


@pytest.mark.parametrize("here", [0, 2])
@pytest.mark.parametrize(("asked", "batch", "memory"), [("8", 16, 16), ("8x16GB", 16, 16), ("8x80GB", 32, 80)])
def test_gpus_that_are_not_here_can_be_planned_for(gpus, here, asked, batch, memory):
    gpus(here, 16160)
    words = ("bert_base", "data", "--gpus", asked, "--dry-run")
    if here and asked == "8":
        assert "this node has only 2; use at most that many, or describe another node, as in --gpus 8x16GB" in refusal(
            "pretrain", *words
        )
        return
    result = pretrain(*words)
    assert {"--fp16", "--nproc-per-node"} <= set(result.stdout.split()) and "--cpu" not in result.stdout
    assert f"--batch-size {batch} " in result.stdout and f"8 x {memory}.0 GB, fp16" in result.stderr
    assert ("planning for GPUs with 16 GB" in result.stderr) == (asked == "8"), "what nobody gave is said"
    assert plan("bert_base", "--gpus", asked)["batch_size"] == batch
    assert "GPU memory applies only to --dry-run; use 8" in refusal("pretrain", *words[:3], "8x16GB")


@pytest.mark.parametrize("wrong", ["0", "-1", "1e2", "8x", "x16GB", "8x16", "10000000", "8x0GB"])
def test_what_is_no_number_of_gpus(wrong):
    for words in ("plan bert_base", "pretrain bert_base data"):
        assert re.search("use, for example, (8 or 8x16GB|16GB)", refusal(*words.split(), f"--gpus={wrong}"))
