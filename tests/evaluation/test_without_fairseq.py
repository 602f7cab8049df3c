"""Trained models are used, exported and imported where fairseq cannot be imported, to the bit as where it can."""

import json
import os
import subprocess
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from helpers import ROOT
from in_process import invoke
from tiny_berts import save_tiny
from trained_encoders import write_encoder

import lazyformer_fairseq
from lazyformer_fairseq.data.text.dictionary_file import load_dictionary
from lazyformer_fairseq.data.text.tokenizer import load_tokenizer
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation import checkpoints, loading
from lazyformer_fairseq.storage import checkpoint_file

TRAINED_MODELS = ROOT / "tests" / "fixtures" / "checkpoints"
USE = """
def use(hub):
    found = [hub.extract_features("the cat sat", "a dog").tolist(), hub.fill_mask("the <mask> sat", topk=3)]
    for name, head in hub.model.classification_heads.items():
        if name == "next_sentence":
            found.append(hub.follows("the cat", "sat"))
        elif hasattr(head, "span_proj"):
            found.append(hub.answer("who sat?", "the cat sat on the mat", n_best=2))
        else:
            found.append(hub.predict(["the cat sat", "a dog"]))
    return found
"""
USE_EACH = f"""{USE}
import json, sys, lazyformer_fairseq
print(json.dumps([use(lazyformer_fairseq.load(folder)) for folder in sys.argv[1:]]))
assert "fairseq" not in sys.modules
lazyformer_fairseq.LazyFormerModel
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory, data_folder) -> list[Path]:
    """Checkpoints of a run, of a fine-tuned one, and models with each sort of head."""
    folder = tmp_path_factory.mktemp("models")
    made = {"spans": ("squad", 2, "span"), "pairs": ("next_sentence", 2), "scores": ("mine", 1)}
    written = [
        write_encoder(folder / name, data_folder, "sflf", *head, token_types=2 * (name == "pairs"))
        for name, head in made.items()
    ]
    return [TRAINED_MODELS / "encoder", TRAINED_MODELS / "fine_tuned", *written]


def contents(folder: Path) -> dict[str, object]:
    """By name; of safetensors the header apart, as the library writes its metadata in any order."""
    found: dict[str, object] = {}
    for path in (path for path in folder.rglob("*") if path.is_file()):
        content = found[str(path.relative_to(folder))] = path.read_bytes()
        if path.suffix == ".safetensors":
            end = 8 + int.from_bytes(content[:8], "little")
            found[str(path.relative_to(folder))] = json.loads(content[8:end]), content[end:]
    return found


def test_texts_get_the_same_answers_and_fairseqs_model_is_refused_in_a_line(models, without_fairseq):
    scope: dict = {}
    exec(USE, scope)
    expected = [scope["use"](lazyformer_fairseq.LazyFormerModel.from_pretrained(folder)) for folder in models]
    done = subprocess.run([without_fairseq / "python", "-c", USE_EACH, *models], capture_output=True, text=True)
    assert json.loads(done.stdout) == json.loads(json.dumps(expected))
    said = done.stderr.splitlines()[-1]
    assert "LazyFormerModel requires fairseq, which is not" in said
    assert "without fairseq, use lazyformer_fairseq.load" in said


@pytest.mark.parametrize(
    "command",
    [
        "export {models}/encoder {out}",
        "export {models}/fine_tuned {out} --to huggingface",
        pytest.param("export {models}/encoder {out} --to huggingface --as custom", marks=pytest.mark.slow),
        pytest.param("import {models}/fine_tuned {out}", marks=pytest.mark.slow),
        pytest.param("import {models}/encoder {out} --sublayer-pattern sflfs", marks=pytest.mark.slow),
        "import {bert} {out}",
        "predict {models}/fine_tuned texts.csv --output {out}/answers.csv",
    ],
)
def test_commands_write_the_same_files(command, without_fairseq, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("texts.csv").write_text("text,label\nthe cat sat,1\nAnna walks,0\n")
    if "{bert}" in command:
        Path("bert").mkdir()
        save_tiny(Path("bert"))
    written = []
    for name in ("with", "without"):
        out = tmp_path / name / "model"  # whose name is on the card
        words = command.format(models=TRAINED_MODELS, bert="bert", out=out).split()
        if name == "with":
            invoke(*words)
        else:
            subprocess.run([without_fairseq / "lazyformer", *words], check=True, capture_output=True)
        written.append(contents(out))
    assert written[0] == written[1] != {}


def test_a_causal_language_model_is_built_from_its_checkpoint():
    path = TRAINED_MODELS / "language_model" / "checkpoint_last.pt"
    dictionary = load_dictionary(path.parent / "data" / "dict.txt")
    model = loading.build(checkpoints.load(path), dictionary, path).eval()
    ids = torch.arange(4, 25)[None]
    expected = json.loads((TRAINED_MODELS / "expected.json").read_text())["language_model"]["nats_of_ids_5_to_24"]
    with torch.no_grad():
        nats, _ = model(ids[:, :-1], target=ids[:, 1:])
    torch.testing.assert_close(nats[0], torch.tensor(expected), atol=1e-4, rtol=1e-4)


def test_a_model_of_a_plain_loop_is_saved_and_read_by_both(data_folder, tmp_path):
    tokenizer = load_tokenizer(data_folder / "tokenizer")
    model = lazyformer_fairseq.build("lazyformer_m2x6_s_tiny", len(tokenizer.symbols), max_positions=16)
    optimizer, ids = torch.optim.AdamW(model.parameters(), 1e-2), torch.randint(4, 40, (2, 8))
    torch.nn.functional.cross_entropy(model(ids)[0].flatten(0, 1), ids.flatten()).backward()
    optimizer.step()
    lazyformer_fairseq.save(model, tokenizer, tmp_path / "model")
    assert model.training
    for load in (lazyformer_fairseq.load, lazyformer_fairseq.LazyFormerModel.from_pretrained):
        assert torch.equal(load(tmp_path / "model").model(ids)[0], model.eval()(ids)[0])
    with pytest.raises(UserError, match="not a CausalLM"):
        lazyformer_fairseq.save(lazyformer_fairseq.build("par_transformer_tiny", 9), tokenizer, tmp_path / "other")
    with pytest.raises(UserError, match="a dictionary of 9 symbols, but this run's dictionary has"):
        lazyformer_fairseq.save(lazyformer_fairseq.build("bert_tiny", 9), tokenizer, tmp_path / "other")


class Runs:
    def __reduce__(self):
        return os.mkdir, ("ran",)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"model": {}, "cfg": {"model": Runs()}}, "refused without running any code in it"),
        ({"model": {}, "cfg": None, "args": Namespace(arch="roberta")}, "settings or weights are missing"),
        ([1], "settings or weights are missing"),
        ({"model": {}, "cfg": {"model": {"_name": "mine"}}}, "its model 'mine' is unknown"),
        ({"model": {}, "cfg": {"model": {"layers": 3}}}, "or a checkpoint from a later version: unknown option layers"),
    ],
)
def test_what_is_no_checkpoint_of_ours_is_refused_and_not_run(content, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "checkpoint_last.pt"
    checkpoint_file.save(content, path)
    dictionary = load_dictionary(TRAINED_MODELS / "language_model" / "data" / "dict.txt")
    with pytest.raises(UserError, match=said):
        loading.build(checkpoints.load(path), dictionary, path)
    assert not (tmp_path / "ran").exists()
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(checkpoint_file.DamagedCheckpointError):
        checkpoints.load(path)
