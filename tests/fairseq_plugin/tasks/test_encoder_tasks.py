"""Tasks of encoders, and what all tasks do: folders given as DATA, global tokens, training in fp16 as in fp32."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import build_toy_corpus, mostly_slow, train_words, updates_of, write_toy_glue

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.tasks.full_sentences_masked_lm import data_folders, tokenizer_of

LAZY = "--arch lazyformer_m2x6_s_tiny --sublayer-pattern M2 --dropout 0"
SETTINGS = {
    "full_sentences_masked_lm": f"{LAZY} --tokens-per-sample 32 --criterion masked_lm_accuracy --batch-size 4",
    "glue": f"{LAZY} --criterion glue --batch-size 16 --pooler-dropout 0",
    "stream_language_modeling": (
        "--arch lazy_par_transformer_tiny --sublayer-pattern sflf --tgt-len 6 --mem-len 9 --dropout 0 "
        "--adaptive-softmax-cutoff 20,40 --criterion causal_lm --batch-size 16"
    ),
}
UPDATES = "--max-update 8 --disable-validation"


@pytest.fixture(scope="session")
def data(data_folder, lm_data, tmp_path_factory) -> dict[str, tuple[Path, str]]:
    """By task, the data and what else its command needs."""
    glue = write_toy_glue(tmp_path_factory.mktemp("glue"))
    return {
        "full_sentences_masked_lm": (data_folder, ""),
        "glue": (glue / "CoLA", f"--tokenizer-folder {data_folder / 'tokenizer'}"),
        "stream_language_modeling": (lm_data, ""),
    }


def assert_close(half: dict, full: dict, start: dict) -> None:
    """The fp16 run ends near the fp32 run, compared with how far that came; both made all updates."""
    assert updates_of(half) == updates_of(full) == 8
    names = [name for name, weight in full["model"].items() if weight.is_floating_point() and weight.numel() > 1]
    assert "loss_scale" in half["last_optimizer_state"]
    moved, apart = (
        torch.cat([(one["model"][name].double() - two["model"][name].double()).flatten() for name in names]).norm()
        for one, two in ((full, start), (half, full))
    )
    assert 0 < apart < 0.1 * moved


@pytest.mark.slow
@pytest.mark.parametrize("task", SETTINGS)
def test_fp16_trains_close_to_fp32(task, data, tmp_path, fairseq_train):
    folder, more = data[task]

    def train(name: str, options: str) -> dict:
        return fairseq_train(folder, f"{SETTINGS[task]} {UPDATES} {more} {options}", tmp_path / name, task=task)

    assert_close(train("half", "--fp16"), train("full", ""), train("start", "--lr 0"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize("flat", ["", "--fp16-no-flatten-grads"], ids=["one vector", "apart"])
@pytest.mark.parametrize("task", SETTINGS)
def test_fp16_trains_close_to_fp32_on_a_gpu(task, flat, data, tmp_path):
    folder, more = data[task]

    def train(name: str, options: str) -> dict:
        options = f"{more} {SETTINGS[task]} {UPDATES} --distributed-world-size 1 {options}"
        words = [word for word in train_words(folder, options, tmp_path / name, task) if word != "--cpu"]
        run = subprocess.run([sys.executable, "-m", "fairseq_cli.train", *words], capture_output=True, text=True)
        assert run.returncode == 0, run.stderr[-2000:]
        return torch.load(tmp_path / name / "checkpoint_last.pt", map_location="cpu")

    assert_close(train("half", f"--fp16 {flat}"), train("full", ""), train("start", "--lr 0"))


def test_a_corpus_stands_for_its_shards_in_order(tmp_path):
    for name in ("corpus/shard10", "corpus/shard2", "corpus/shard0", "corpus/shards", "plain"):
        (tmp_path / name).mkdir(parents=True)
    corpus, plain = str(tmp_path / "corpus"), str(tmp_path / "plain")
    shards = [f"{corpus}/shard{number}" for number in (0, 2, 10)]
    assert data_folders(corpus) == shards
    assert data_folders(f"{corpus}:{plain}") == [*shards, plain]
    assert data_folders(shards[1]) == [shards[1]]
    with pytest.raises(UserError, match="missing is no folder"):
        data_folders(f"{corpus}:missing")


@pytest.mark.parametrize("given", mostly_slow(["corpus", "shards"], "corpus"))
def test_pretraining_takes_a_shard_an_epoch(given, tmp_path, fairseq_train, caplog):
    corpus = tmp_path / "corpus"
    build_toy_corpus(corpus, 160, shards=2)
    assert tokenizer_of(f"{corpus}/shard1") == tokenizer_of(str(corpus)) == corpus / "tokenizer"
    data = corpus if given == "corpus" else f"{corpus}/shard0:{corpus}/shard1"
    options = "--arch lazyformer_m2x6_s_tiny --sublayer-pattern M2 --criterion masked_lm_accuracy --batch-size 8"
    with caplog.at_level("INFO"):
        fairseq_train(data, f"{options} --max-epoch 3", tmp_path / "run")
    read = re.findall(r"shard(\d)/train: \d+ items packed", "\n".join(caplog.messages))
    assert read[:3] == ["0", "1", "0"]  # fairseq reads one ahead
    assert (tmp_path / "run" / "tokenizer").is_dir()


PATTERN = "'(s[window=2,global={}]fl)x2'"  # the task marks the tokens; weights are those of `global=1`


def test_glue_goes_on_from_first_tokens_to_the_first_text(data_folder, fairseq_train, tmp_path):
    glue = write_toy_glue(tmp_path / "glue")
    shared = "--criterion glue --arch bert_tiny --batch-size 16 --max-update 2"
    options = f"{shared} --tokenizer-folder {data_folder / 'tokenizer'} --sublayer-pattern {PATTERN.format(1)}"
    cola = fairseq_train(glue / "CoLA", options, tmp_path / "cola", task="glue")
    options = f"{shared} --sublayer-pattern {PATTERN.format('given')} --finetune-from-model"
    scores = fairseq_train(
        glue / "STS-B", f"{options} {tmp_path / 'cola' / 'checkpoint_last.pt'}", tmp_path / "sts-b", task="glue"
    )
    heads = {name for name in (*cola["model"], *scores["model"]) if name.startswith("classification_heads")}
    assert cola["model"].keys() - heads == scores["model"].keys() - heads
    # Few updates of a small rate: the projections of global tokens are the ones that were trained before.
    name = "encoder.sentence_encoder.sublayers.0.inner.choices.window.q_proj.weight"
    assert (cola["model"][name] - scores["model"][name]).abs().max() < 0.01
