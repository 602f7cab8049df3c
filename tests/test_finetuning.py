"""Fine-tuning through fairseq-train, as a user runs it: what is promised of whole runs."""

import functools
import re
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
from helpers import (
    assert_equal_state,
    message_of,
    mostly_slow,
    stopped_at,
    toy_texts,
    train_in_two_processes,
    train_tokenizer,
    train_words,
    updates_of,
)  # fmt: skip

from lazyformer_fairseq.data.text.normalisation import TextSettings
from lazyformer_fairseq.modules.networks import documents

FINETUNING = "--criterion glue --batch-size 16 --best-checkpoint-metric matthews --maximize-best-checkpoint-metric"
TINY = "--arch lazyformer_m2x6_s_tiny --sublayer-pattern M2"
ARCHS = [
    *("--arch lazyformer_m2x6_s_tiny", "--arch par_bert_tiny", "--arch bert_tiny --encoder-normalize-before"),
    *("--arch bert_tiny --sublayer-pattern '(sff)x2 lf'", "--arch mpnet_tiny --sublayer-pattern M2"),
]


@pytest.fixture(scope="module")
def pretrained(data_folder, tmp_path_factory, fairseq_train):
    """``pretrained("--arch ...")``: a checkpoint after one update."""

    @functools.cache
    def run(arch: str) -> Path:
        folder = tmp_path_factory.mktemp("pre-trained")
        options = f"{arch} --criterion masked_lm_accuracy --batch-size 4 --max-update 1 --disable-validation"
        task = {"task": "masked_permuted_lm --tokens-per-sample 32"} if "mpnet" in arch else {}
        fairseq_train(data_folder, options, folder, **task)
        return folder / "checkpoint_last.pt"

    return run


@pytest.mark.parametrize("arch", mostly_slow(ARCHS, *ARCHS[:2], ARCHS[-1]))
def test_a_checkpoint_of_any_arch_fine_tunes(glue, tmp_path, fairseq_train, pretrained, arch):
    checkpoint = pretrained(arch)
    options = f"{arch} {FINETUNING} --finetune-from-model {checkpoint} --max-update 1"
    weights = torch.load(checkpoint)["model"]
    state = fairseq_train(glue / "CoLA", f"{options} --lr 0", tmp_path / "fine-tuned", task="glue")
    for name, weight in weights.items():
        assert torch.equal(state["model"][name], weight), name  # it did start from them
    assert {name for name in state["model"] if name not in weights} == {
        f"classification_heads.cola.{layer}.{part}" for layer in ("dense", "out_proj") for part in ("weight", "bias")
    }
    assert updates_of(state) == 1


def test_without_padding_a_run_learns_the_same(glue, tmp_path, fairseq_train, pretrained):
    start = f"{TINY} {FINETUNING} --finetune-from-model {pretrained(TINY)} --max-update 6 --dropout 0 --lr 1e-2"
    padded = fairseq_train(glue / "CoLA", start, tmp_path / "padded", task="glue")
    with mock.patch.object(
        documents.PackedTokens, "take", autospec=True, side_effect=documents.PackedTokens.take
    ) as taken:
        in_a_row = fairseq_train(glue / "CoLA", f"{start} --no-padding", tmp_path / "row", task="glue")
    assert taken.call_count >= 6
    for name, weight in padded["model"].items():
        torch.testing.assert_close(in_a_row["model"][name], weight, rtol=1e-3, atol=1e-4)


def metrics_of(log: str) -> list[dict[str, float]]:
    """Of each validation in a log of ``--log-format simple``."""
    lines = re.findall(r"valid on 'valid' subset \| (.*)", log)
    return [{name: float(value) for name, value in re.findall(r"(\w+) (-?[\d.]+)(?= \||$)", line)} for line in lines]


@pytest.mark.slow
def test_two_processes_validate_as_one(glue, data_folder, tmp_path, fairseq_train, caplog, free_port):
    # 30 sentences in batches of 4: alone the last batch has 2; of two processes one gets a batch less.
    shared = f"{TINY} {FINETUNING} --batch-size 4 --tokenizer-folder {data_folder / 'tokenizer'}"
    with caplog.at_level("INFO"):
        fairseq_train(glue / "CoLA", f"{shared} --lr 0.003 --max-epoch 2", tmp_path / "one", task="glue")
    alone = metrics_of(caplog.text)[-1]
    last = tmp_path / "one" / "checkpoint_last.pt"
    options = f"{shared} --lr 0 --max-epoch 1 --finetune-from-model {last} --no-save"
    run = train_in_two_processes(train_words(glue / "CoLA", options, tmp_path / "two", task="glue"), free_port)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    (of_two,) = metrics_of(run.stdout)
    for name in ("loss", "matthews", "accuracy"):
        assert of_two[name] == pytest.approx(alone[name], abs=1.1e-3), name  # they are printed to so many digits
    assert abs(alone["matthews"]) > 0.1, "metrics at zero would agree whatever went wrong"


def test_an_interrupted_run_goes_on_bit_for_bit(glue, tmp_path, fairseq_train, pretrained):
    start = f"{FINETUNING} --finetune-from-model {pretrained(TINY)} --max-epoch 2 --warmup-ratio 0.06 --dropout 0.1"
    run = (glue / "CoLA", f"{TINY} {start} --save-interval-updates 11")
    whole = fairseq_train(*run, tmp_path / "whole", task="glue")
    assert updates_of(whole) == 16
    with stopped_at(13):  # the checkpoint of update 11 is the last, within the second epoch
        fairseq_train(*run, tmp_path / "interrupted", task="glue")
    assert updates_of(tmp_path / "interrupted" / "checkpoint_last.pt") == 11
    resumed = fairseq_train(*run, tmp_path / "interrupted", task="glue")
    assert_equal_state(resumed["model"], whole["model"])
    assert resumed["optimizer_history"][-1] == whole["optimizer_history"][-1]
    assert resumed["extra_state"]["best"] == whole["extra_state"]["best"]


def test_what_does_not_fit_is_refused(glue, tmp_path, fairseq_train, pretrained):
    checkpoint = pretrained(TINY)
    kept = checkpoint.read_bytes()
    options = f"{FINETUNING} --finetune-from-model {checkpoint} --max-update 1"

    def refusal(more: str, data: Path = glue / "CoLA") -> str:
        return message_of(fairseq_train, data, f"{options} {more}", tmp_path / "run", task="glue")

    broken = shutil.copytree(glue / "CoLA", tmp_path / "CoLA")
    lines = (broken / "dev.tsv").read_text().splitlines()
    (broken / "dev.tsv").write_text("\n".join([*lines[:2], "toy\t2\t\tthe garden", *lines[2:]]) + "\n")
    assert f"{broken / 'dev.tsv'}, line 3: label '2' is not one of CoLA's labels: 0, 1" in refusal(TINY, broken)
    for size, words in (
        (150, "of 160 symbols, but this run's dictionary has 150"),
        (160, "a different dictionary of the same size"),
    ):
        train_tokenizer(tmp_path / str(size), toy_texts(150, seed=7), size, TextSettings())
        assert words in refusal(f"{TINY} --tokenizer-folder {tmp_path / str(size)}")
    assert "--arch" in refusal("--arch par_bert_tiny")
    assert checkpoint.read_bytes() == kept
    assert not list((tmp_path / "run").glob("*.pt"))


# --- a longer model from a shorter one (Longformer, section 5) --------------------------------------------------------

SHORT = "--arch bert_tiny --sublayer-pattern '(sflf)x2' --max-positions 32"
LONG = "--arch bert_tiny --sublayer-pattern '(s[window=8,global=1]flf)x2' --max-positions 80"
POSITIONS = "encoder.sentence_encoder.embed_positions.weight"
SUBLAYERS = "encoder.sentence_encoder.sublayers."


def test_a_longformer_starts_from_a_checkpoint_without_global_tokens(glue, tmp_path, fairseq_train, pretrained, caplog):
    checkpoint = pretrained(SHORT)
    options = f"{LONG} {FINETUNING} --max-update 1 --lr 0 --finetune-from-model {checkpoint}"
    refused = message_of(fairseq_train, glue / "CoLA", options, tmp_path / "refused", task="glue")
    assert "has 32 positions, but --max-positions is 80; pass --copy-positions" in refused

    caplog.clear()
    state = fairseq_train(glue / "CoLA", f"{options} --copy-positions", tmp_path / "long", task="glue")["model"]
    short = torch.load(checkpoint)["model"]
    assert torch.equal(state[POSITIONS], torch.cat([short[POSITIONS]] * 3)[:80])
    for layer in (0, 4):
        q, k, v = short[f"{SUBLAYERS}{layer}.inner.qkv_proj.weight"].chunk(3)
        inner = f"{SUBLAYERS}{layer}.inner."
        assert torch.equal(state[f"{inner}choices.window.q_proj.weight"], q)
        assert torch.equal(state[f"{inner}choices.window.k_proj.weight"], k)
        assert torch.equal(state[f"{inner}value_transforms.window.v_proj.weight"], v)
        lazy = f"{SUBLAYERS}{layer + 2}.inner."
        assert torch.equal(state[f"{lazy}value_transforms.window.v_proj.weight"], short[f"{lazy}v_proj.weight"])
    assert "--copy-positions repeats them up to 80" in caplog.text
    assert "15 more): they are initialized as copies" in caplog.text


def test_a_run_resumes_with_more_positions(data_folder, tmp_path, fairseq_train):
    options = "--arch bert_tiny --sublayer-pattern sf --criterion masked_lm_accuracy --batch-size 4 --lr 0"
    short = fairseq_train(data_folder, f"{options} --max-positions 32 --max-update 1 --disable-validation", tmp_path)
    longer = f"{options} --max-positions 40 --max-update 2 --disable-validation"
    for more, remedy in (("", "pass --copy-positions"), (" --copy-positions", "pass --reset-optimizer")):
        assert remedy in message_of(fairseq_train, data_folder, longer + more, tmp_path)
    resumed = fairseq_train(data_folder, f"{longer} --copy-positions --reset-optimizer", tmp_path)
    assert updates_of(resumed) >= 1
    weight = short["model"][POSITIONS]
    assert torch.equal(resumed["model"][POSITIONS], torch.cat([weight, weight[:8]]))
