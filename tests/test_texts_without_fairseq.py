"""Commands that read and write text and shards write and print the same where fairseq cannot be imported."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from helpers import ROOT, toy_texts, write_toy_wikitext
from in_process import invoke

ENCODER = ROOT / "tests" / "fixtures" / "checkpoints" / "encoder"


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    (folder / "raw.txt").write_text("\n\n".join(toy_texts(150)))
    write_toy_wikitext(folder / "words")
    few = ("--word-coverage", "1", "--valid-share", "0.1", "--workers", "1")
    invoke("corpus", folder / "raw.txt", folder / "data", "--tokenizer", ENCODER / "tokenizer", *few)
    return folder


def written(folder: Path) -> dict[str, Any]:
    """By name, without times and versions."""
    found: dict[str, Any] = {}
    for path in (path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".html", ".safetensors")):
        found[str(path.relative_to(folder))] = path.read_bytes()
        if path.name == "manifest.json":
            kept = json.loads(path.read_bytes())
            found[path.name] = {name: kept[name] for name in kept if name not in ("versions", "timing")}
    return found


@pytest.mark.parametrize(
    "command",
    [
        "corpus raw.txt {out} --vocab-size 160 --word-coverage 1 --near-duplicates --workers 1",
        "lm prepare wikitext words {out}",
        "import {encoder} {out} --sublayer-pattern sflfs --text data",  # a warm start, and what it costs
        "import {encoder} {out} --sublayer-pattern sflfs --text raw.txt",
        "plan --config {root}/configs/pretraining/bert_base.yaml --gpus 2x24GB",
        pytest.param(
            "plan --arch lazyformer_m2x6_s --arch bert_base --data data --gpus 4x16GB --attention-backend eager",
            marks=pytest.mark.slow,
        ),
        pytest.param("plan --arch transformer_xl_base --gpus 2x24GB", marks=pytest.mark.slow),
    ],
)
def test_commands_write_and_print_the_same(command, texts, without_fairseq, tmp_path, monkeypatch):
    monkeypatch.chdir(texts)
    found = []
    for name, path in (("with", ""), ("without", os.environ["PYTHONPATH"])):
        words = command.format(out=(out := tmp_path / name / "out"), encoder=ENCODER, root=ROOT).split()
        how = {"capture_output": True, "text": True, "env": {**os.environ, "PYTHONPATH": path}}
        done = subprocess.run([without_fairseq / "lazyformer", *words], **how)
        assert done.returncode == 0, done.stderr
        found.append((written(out), done.stdout.replace(str(out), "OUT")))
    assert found[0] == found[1]
    assert found[0][0] or "plan" in command
