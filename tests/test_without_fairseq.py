"""What works where fairseq cannot be imported, as on Python 3.13: commands and modules, in processes without it."""

import json
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import ROOT, mostly_slow, toy_texts, write_toy_wikitext
from in_process import tried
from tiny_berts import save_tiny

CHECKPOINTS = ROOT / "tests" / "fixtures" / "checkpoints"
ENCODER = CHECKPOINTS / "encoder"

BENCH = "--baseline-arch bert_tiny --baseline-backend eager --lengths 8 --tokens 8 --rounds 2 --output bench"
SIZES = "--embed-dim 8 --ffn-embed-dim 16 --heads 2 --updates 2 --seeds 1 --device cpu"
TEXT = "--tokens-per-sample 16 --max-positions 16"
SEARCH = f"--batch-size 64 --max-updates 6 --constant-updates 1 --sublayers 2 --device cpu {TEXT}"
# Each with what it is to print or write.
COMMANDS = (
    ("pattern show 'M2x2 s[window=2]' --tokens 4 --heads 2", "lazy attention"),
    ("export trained exported", "exported/model.safetensors"),
    ("export trained theirs --to huggingface", "theirs/model.safetensors"),
    ("import bert imported --sublayer-pattern M2", "imported/warm_start.json"),
    (f"compare data compared --task masked-lm --model bert=sf {SIZES} --tokens-per-sample 32", "compared/results.json"),
    (
        "finetune trained --data moods --output tuned --lrs 1e-3 --seeds 1 --epochs 1 --gpus none",
        "tuned/report/moods.md",
    ),
    ("lm evaluate language_model/checkpoint_last.pt language_model/data", "perplexity"),
)
SLOW_COMMANDS = (
    (f"bench --arch bert_tiny {BENCH}", "bench/results.md"),
    (
        f"compare tokens lms --task language-model --model a=sf {SIZES} --tgt-len 6 --mem-len 5 --batch-size 3 "
        "--adaptive-softmax-cutoff ''",
        "lms/results.json",
    ),
    (f"search data found --task masked-lm --arch bert_tiny {SEARCH}", "found/result.json"),
)

LOOP = """
import torch
from lazyformer_fairseq import build, load, open_masked_text, save
from lazyformer_fairseq.data.batches import EpochBatches
text = open_masked_text("data", tokens_per_sample=32)
model = build("bert_tiny", len(text.dictionary), text.special.pad, sublayer_pattern="M2x2", max_positions=32)
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
for batch in EpochBatches(text.split("train"), batch_size=8, seed=text.seed):
    logits, _ = model(batch["net_input"]["src_tokens"], masked_tokens=batch["masked_positions"])
    loss = torch.nn.functional.cross_entropy(logits, batch["target"].flatten()[batch["masked_positions"]])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
save(model, text.tokenizer, "looped")
print(bool(loss < 6), len(load("looped").fill_mask("Anna <mask> Ben.", topk=2)))
"""
DEMO = """
from pathlib import Path
from lazyformer_fairseq.experiments.demo.settings import DemoSettings
from lazyformer_fairseq.experiments.demo.run import run_demo
run_demo(DemoSettings(corpus="texts", vocab_size=160, updates=12, finetuning_updates=2), Path("demo"))
"""
TRAINER = """
from transformers import AutoModelForMaskedLM, Trainer, TrainingArguments
from lazyformer_fairseq import LazyFormerConfig, LazyFormerForMaskedLM, open_masked_text
text = open_masked_text("data", tokens_per_sample=32)
train = text.split("train")
sizes = dict(hidden_size=16, num_attention_heads=2, intermediate_size=32, max_position_embeddings=32)
ends = dict(vocab_size=len(text.dictionary), pad_token_id=text.special.pad)
def collate(samples):
    batch = train.collater(samples)
    ids, labels = batch["net_input"]["src_tokens"], batch["target"]
    return {"input_ids": ids, "attention_mask": ids.ne(text.special.pad).long(),
            "labels": labels.masked_fill(labels.eq(text.special.pad), -100)}
how = dict(max_steps=3, per_device_train_batch_size=4, use_cpu=True, report_to=[], remove_unused_columns=False)
Trainer(LazyFormerForMaskedLM(LazyFormerConfig(sublayer_pattern="(sflf)x2", **sizes, **ends)),
        TrainingArguments("trained_so", **how), train_dataset=train, data_collator=collate).train()
print(type(AutoModelForMaskedLM.from_pretrained("trained_so/checkpoint-3")).__name__)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory, data_folder, lm_data) -> Path:
    """Where a user stands: texts, corpora, a model that fairseq trained, a BERT."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "texts").mkdir()
    (folder / "texts" / "toy.txt").write_text("\n\n".join(toy_texts(150)))
    write_toy_wikitext(folder / "wikitext")
    (folder / "moods").mkdir()
    for name in ("train", "dev"):
        rows = (f"Anna sees the {thing}\t{mood}" for thing, mood in (("garden", "good"), ("river", "bad")) * 6)
        (folder / "moods" / f"{name}.tsv").write_text("\n".join(["text\tlabel", *rows]) + "\n")
    shutil.copytree(CHECKPOINTS / "m2x2" / "tokenizer", folder / "trained" / "tokenizer")
    shutil.copy(CHECKPOINTS / "m2x2" / "checkpoint_last.pt", folder / "trained")
    save_tiny(folder / "bert")
    (folder / "language_model").symlink_to(CHECKPOINTS / "language_model")
    (folder / "data").symlink_to(data_folder)
    (folder / "tokens").symlink_to(lm_data)
    configs = shutil.copytree(ROOT / "configs" / "pretraining", folder / "pretraining")
    bert = (configs / "bert_base.yaml").read_text()
    (configs / "of_one_layer.yaml").write_text(bert.replace("M1x12", "sf"))
    return folder


@pytest.fixture
def run(without_fairseq, folder, tmp_path) -> Callable[[str], str]:
    """``run("lazyformer ...")``: what it prints; it stands in a folder of its own."""
    for path in folder.iterdir():
        (tmp_path / path.name).symlink_to(path)

    def run(command: str) -> str:
        done = subprocess.run(
            ["bash", "-c", f'PATH="{without_fairseq}:$PATH"; {command}'], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0 and "Traceback" not in done.stderr, f"{command}\n{done.stderr[-3000:]}"
        return done.stdout

    return run


@pytest.mark.parametrize(
    ("command", "made"),
    [
        pytest.param(*each, marks=[pytest.mark.slow] * (each in SLOW_COMMANDS), id=" ".join(each[0].split()[:3]))
        for each in (*COMMANDS, *SLOW_COMMANDS)
    ],
)
def test_a_command_works(command, made, run, tmp_path):
    """Each command that needs no fairseq ends well without it."""
    printed = run(f"lazyformer {command}")
    assert made in printed or (tmp_path / made).exists()


@pytest.mark.parametrize(
    ("code", "prints"),
    [
        pytest.param(LOOP, "True 2", id="a loop"),
        pytest.param(TRAINER, "LazyFormerForMaskedLM", id="Trainer"),
        pytest.param(DEMO, "Picture: demo/loss.png", id="the demo", marks=pytest.mark.slow),
    ],
)
def test_code_of_ones_own_trains(code, prints, run):
    """A loop of one's own, transformers' Trainer and the demo train without fairseq."""
    assert prints in run(f"python -c {shlex.quote(code)}")


# --- Commands that read and write text, shards and plans write and print the same with fairseq and without


def written(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's files by name, without times and versions.

    Numbers in JSON files are compared to six digits: the last ones of a loss differ from process to process, because
    the order of its sums depends on where the tensors lie in memory.
    """
    found: dict[str, Any] = {}
    for path in (path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".html", ".safetensors")):
        found[str(path.relative_to(folder))] = path.read_bytes()
        if path.suffix == ".json":
            content = json.loads(path.read_bytes(), parse_float=lambda digits: round(float(digits), 6))
            if path.name == "manifest.json":
                content = {name: content[name] for name in content if name not in ("versions", "timing")}
            found[str(path.relative_to(folder))] = content
    return found


PREPARING = (
    "corpus texts {out} --vocab-size 160 --word-coverage 1 --valid-share 0.1 --near-duplicates --workers 1",
    "lm prepare wikitext wikitext {out}",
    "import {encoder} {out} --sublayer-pattern sflfs --text texts/toy.txt",  # a warm start, and what it costs
    "plan pretraining/of_one_layer.yaml --gpus 2x24GB",
    "plan lazyformer_m2x6_s bert_base --data data --gpus 4x16GB --attention-backend eager",
    "plan transformer_xl_base --gpus 2x24GB",
)


@pytest.mark.parametrize("command", mostly_slow(PREPARING, *PREPARING[:4]))
def test_commands_write_and_print_the_same(command, folder, without_fairseq, tmp_path, monkeypatch):
    """Files and printed lines do not depend on whether fairseq is installed."""
    monkeypatch.chdir(folder)
    out = tmp_path / "out"
    words = command.format(out=out, encoder=ENCODER).split()
    printed_with = tried(*words).stdout
    out_with = out.rename(tmp_path / "with") if out.exists() else out
    done = subprocess.run([without_fairseq / "lazyformer", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (written(out), done.stdout) == (written(out_with), printed_with)
    assert out.exists() or "plan" in command
