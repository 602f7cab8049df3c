"""Models in files: old checkpoints stay good for all that they were good for; safetensors hold the same model.

tests/fixtures/README.md says what the old ones are.
"""

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from helpers import ROOT, assert_equal_state, build_toy_corpus, updates_of, write_toy_glue
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from lazyformer_fairseq.cli import main
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.models import CausalLanguageModel, LazyFormerModel
from lazyformer_fairseq.fairseq_plugin.models.export import export
from lazyformer_fairseq.finetuning.grid import load_start_models

FIXTURES = ROOT / "tests" / "fixtures"
OF_0_1_0, OF_2026_11 = FIXTURES / "checkpoint_of_0.1.0", FIXTURES / "checkpoints_of_2026_11"
LANGUAGE_MODEL = OF_2026_11 / "language_model"
EXPECTED = {folder: json.loads((folder / "expected.json").read_text()) for folder in (OF_0_1_0, OF_2026_11)}
SIZES = (
    "--encoder-embed-dim 16 --encoder-ffn-embed-dim 32 --max-positions 64 --dropout 0 --attention-dropout 0 "
    "--batch-size 4 --arch lazyformer_m2x6_s_tiny"
)


@pytest.fixture(params=["0.1.0", "2026-11"])
def old(request) -> SimpleNamespace:
    """A masked language model's checkpoint, what it was trained with, and what it gave when it was new."""
    folder, pattern = OF_0_1_0, "M2x2"
    if request.param == "2026-11":
        folder, pattern = OF_2026_11 / "encoder", "'sflf sf' --encoder-normalize-before"
    expected = EXPECTED[OF_0_1_0 if folder == OF_0_1_0 else OF_2026_11]
    return SimpleNamespace(folder=folder, options=f"{SIZES} --sublayer-pattern {pattern}", expected=expected)


def assert_near(found: torch.Tensor, expected: list) -> None:
    torch.testing.assert_close(found, torch.tensor(expected), atol=1e-4, rtol=1e-4)


def test_an_encoder_is_used_from_raw_text(old):
    hub = LazyFormerModel.from_pretrained(old.folder)
    assert_near(hub.extract_features(*old.expected["texts"])[:, 0], old.expected["features"])
    answers = hub.fill_mask("Anna <mask> Ben near the river.", topk=3)
    assert [answer.word for answer in answers] == [word for word, _ in old.expected["filled"]]
    probabilities = [probability for _, probability in old.expected["filled"]]
    assert [answer.probability for answer in answers] == pytest.approx(probabilities, abs=1e-4)


def test_the_run_of_an_encoder_is_resumed(old, tmp_path, fairseq_train):
    shutil.copy(old.folder / "checkpoint_last.pt", tmp_path)
    options = f"{old.options} --criterion masked_lm_accuracy --lr 1e-2 --save-interval-updates 1000"
    resumed = fairseq_train(OF_0_1_0 / "data", f"{options} --max-update {old.expected['resumed_updates']}", tmp_path)
    history = [part["num_updates"] for part in resumed["optimizer_history"]]
    assert history == [old.expected["updates"], old.expected["resumed_updates"]]
    assert resumed["extra_state"]["val_loss"] == pytest.approx(old.expected["resumed_valid_loss"], abs=2e-3)


@pytest.mark.slow
def test_an_encoder_is_fine_tuned(old, tmp_path, fairseq_train):
    glue = write_toy_glue(tmp_path / "glue", train=8, valid=4)
    start = old.folder / "checkpoint_last.pt"
    options = f"{old.options} --criterion glue --finetune-from-model {start} --max-update 1 --lr 0"
    tuned = fairseq_train(glue / "CoLA", options, tmp_path / "run", task="glue")
    assert updates_of(tuned) == 1
    for name, weight in torch.load(start)["model"].items():
        assert torch.equal(tuned["model"][name], weight), name


@pytest.mark.parametrize("kind", ["fine_tuned", "exported"])
def test_a_classification_head_predicts(kind):
    hub = LazyFormerModel.from_pretrained(OF_2026_11 / kind)
    assert_near(hub.predict("cola", *EXPECTED[OF_2026_11]["texts"]), EXPECTED[OF_2026_11]["logits"])


def test_a_language_model_is_used_and_evaluated(tmp_path):
    hub = CausalLanguageModel.from_pretrained(LANGUAGE_MODEL, "checkpoint_last.pt", str(LANGUAGE_MODEL / "data"))
    ids = torch.arange(4, 25)[None]
    with torch.no_grad():
        nats, _ = hub.models[0](ids[:, :-1], target=ids[:, 1:])
    assert_near(nats[0], EXPECTED[OF_2026_11]["nats_of_ids_5_to_24"])
    files = [LANGUAGE_MODEL / "checkpoint_last.pt", LANGUAGE_MODEL / "data", "--json", tmp_path / "result.json"]
    for split in ("valid", "test"):
        command = ["lm", "evaluate", *map(str, files), "--split", split, "--device", "cpu"]
        CliRunner().invoke(main, command, catch_exceptions=False)
        result = json.loads((tmp_path / "result.json").read_text())
        expected = EXPECTED[OF_2026_11][f"{split}_nats_per_token"]
        assert result["bits_per_token"] * math.log(2) == pytest.approx(expected, abs=1e-4)


def test_the_run_of_a_language_model_is_resumed_with_its_memory(tmp_path, fairseq_train):
    saved = torch.load(LANGUAGE_MODEL / "checkpoint_last.pt")["extra_state"]["stream_memory"]

    def resumed(updates: int) -> dict:
        folder = tmp_path / str(updates)
        folder.mkdir()
        shutil.copy(LANGUAGE_MODEL / "checkpoint_last.pt", folder)
        options = (
            "--arch lazy_par_transformer_tiny --sublayer-pattern 'sflf sf' --decoder-embed-dim 16 "
            "--decoder-ffn-embed-dim 32 --dropout 0 --attention-dropout 0 --activation-dropout 0 "
            "--adaptive-softmax-cutoff 10,20 --adaptive-softmax-factor 2 --mem-len 16 --criterion causal_lm "
            f"--batch-size 4 --lr 1e-2 --save-interval-updates 1000 --max-update {updates}"
        )
        return fairseq_train(LANGUAGE_MODEL / "data", options, folder, task="stream_language_modeling --tgt-len 12")

    # A segment of 12 tokens drives as many out of a memory of 16: the first 4 of what follows are the last 4 of before.
    one_more = resumed(EXPECTED[OF_2026_11]["updates"] + 1)["extra_state"]["stream_memory"]
    assert one_more["next_segment"] == saved["next_segment"] + 1
    assert len(one_more["states"]) == len(saved["states"]) == 3
    for after, before in zip(one_more["states"], saved["states"], strict=True):
        assert torch.equal(after[:, :4], before[:, 12:])

    state = resumed(EXPECTED[OF_2026_11]["resumed_updates"])
    expected = EXPECTED[OF_2026_11]["language_model_resumed_valid_loss"]
    assert state["extra_state"]["val_loss"] == pytest.approx(expected, abs=2e-3)


TEXTS = ("Anna sees Ben near the house.", "The garden.")


@pytest.fixture
def copy(exported, tmp_path) -> Path:
    """An exported model to do damage to."""
    return Path(shutil.copytree(exported, tmp_path / "copy"))


def test_the_same_outputs_to_the_last_bit_and_tied_weights_stored_once(trained, exported, tmp_path):
    before, after = LazyFormerModel.from_pretrained(trained), LazyFormerModel.from_pretrained(exported)
    assert torch.equal(before.extract_features(*TEXTS), after.extract_features(*TEXTS))
    assert before.fill_mask("Anna <mask> Ben.", topk=9) == after.fill_mask("Anna <mask> Ben.", topk=9)
    assert_equal_state(dict(after.model.state_dict()), dict(before.model.state_dict()))
    assert {**before.model.cfg, "_name": None} == dict(after.model.cfg)
    assert {path.name for path in exported.iterdir()} == {"model.safetensors", "config.json", "tokenizer"}
    embedding = after.model.encoder.sentence_encoder.embed_tokens.weight
    assert after.model.encoder.lm_head.weight is embedding
    weights = load_file(exported / "model.safetensors")
    assert sum(weight.shape == embedding.shape for weight in weights.values()) == 1
    with safe_open(exported / "model.safetensors", framework="pt") as file:
        metadata = file.metadata()
    assert (metadata["architecture"], metadata["sublayer_pattern"]) == ("lazyformer", "M2")

    outcome = CliRunner().invoke(main, ["export", str(trained / "checkpoint_last.pt"), str(tmp_path / "model")])
    assert outcome.exit_code == 0, outcome.output
    assert_equal_state(load_file(tmp_path / "model" / "model.safetensors"), weights)
    with pytest.raises(UserError, match="checkpoint_last.pt: is a file; other.pt can be chosen in a folder"):
        export(trained / "checkpoint_last.pt", tmp_path / "more", "other.pt")


@pytest.mark.slow
def test_fine_tuning_starts_from_it(trained, exported, tmp_path, fairseq_train):
    """The same weights after an update as from the checkpoint."""
    data = write_toy_glue(tmp_path / "glue", train=8, valid=4) / "CoLA"
    options = "--arch lazyformer_m2x6_s_tiny --sublayer-pattern M2 --criterion glue --batch-size 8 --max-update 1"
    runs = [
        fairseq_train(data, f"{options} --finetune-from-model {start}", tmp_path / name, task="glue")["model"]
        for name, start in (("a", trained / "checkpoint_last.pt"), ("b", exported / "model.safetensors"))
    ]
    assert all(torch.equal(weight, runs[1][name]) for name, weight in runs[0].items())
    (start,) = load_start_models({"m": exported / "model.safetensors"}, exported / "tokenizer")
    assert "M2" in start.options and start.max_positions == 512


def change_config(folder: Path, **changes) -> None:
    config = json.loads((folder / "config.json").read_text())
    options = config["model"] | changes.pop("model", {})
    (folder / "config.json").write_text(json.dumps(config | {"model": options} | changes))


def test_what_does_not_fit_is_said(copy, tmp_path):
    kept = (copy / "config.json").read_bytes()
    for changes, words in (
        ({"format_version": 2}, "config.json: format version 2, but this program reads 1"),
        ({"format": "other"}, "config.json: not the config of an exported model"),
        ({"architecture": "roberta"}, "must have the architecture lazyformer"),
        ({"model": {"layers": 3}}, "unknown option layers"),
        ({"model": {"dropout": "much"}}, "option dropout is 'much', must be float"),
        ({"model": {"encoder_embed_dim": True}}, "option encoder_embed_dim is True, must be int"),
        ({"model": {"sublayer_pattern": "M3"}}, "sublayer_pattern is 'M2', config.json speaks of 'M3'"),
        ({"model": {"encoder_ffn_embed_dim": 48}}, r"is \(64, 32\), the model's \(48, 32\)"),
        ({"model": {"encoder_embed_dim": 10**6, "encoder_attention_heads": 1}}, r"the model's \(160, 1000000\)"),
        ({"model": {"encoder_attention_heads": 5}}, "5 attention heads do not divide"),
        ({"model": {"activation_fn": "exec"}}, "model.safetensors: .*exec"),
    ):
        change_config(copy, **changes)
        with pytest.raises(UserError, match=words):
            LazyFormerModel.from_pretrained(copy)
        (copy / "config.json").write_bytes(kept)
    config = json.loads(kept)
    del config["model"]["relative_position_max_distance"]  # an option of a later version has its default
    (copy / "config.json").write_text(json.dumps(config))
    assert LazyFormerModel.from_pretrained(copy).model.cfg.relative_position_max_distance == 128


def test_damage_and_another_dictionary_are_named(copy, tmp_path):
    path = copy / "model.safetensors"
    content, weights = path.read_bytes(), load_file(path)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    less = {name: weight for name, weight in weights.items() if name != "encoder.lm_head.bias"}
    damaged = "model.safetensors: truncated, damaged or no safetensors"
    for damage, words in (
        (lambda: path.write_bytes(content[:-10]), damaged),
        (lambda: path.write_bytes(content[:9] + b"!" + content[10:]), damaged),
        (lambda: path.write_bytes(b""), damaged),
        (lambda: save_file(less, path, metadata), "model.safetensors: the checkpoint has no weight encoder.lm_head.b"),
        (lambda: save_file(weights, path), "model.safetensors: its architecture is None"),
        (lambda: (copy / "config.json").rename(tmp_path / "kept"), "config.json: cannot be read as JSON"),
    ):
        damage()
        with pytest.raises(UserError, match=words):
            LazyFormerModel.from_pretrained(copy)
        path.write_bytes(content)
    (tmp_path / "kept").rename(copy / "config.json")
    build_toy_corpus(tmp_path / "corpus", 160, seed=7)
    shutil.copytree(tmp_path / "corpus" / "tokenizer", copy / "tokenizer", dirs_exist_ok=True)
    with pytest.raises(UserError, match=r"model.safetensors: .*another dictionary, of the same size"):
        LazyFormerModel.from_pretrained(copy)
