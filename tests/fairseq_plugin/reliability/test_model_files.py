"""Models in files: trained models compute what they computed when they were made; safetensors hold the same model; a
mistake in a file or a text is reported in one line.

tests/fixtures/make_checkpoints.py makes the trained models.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from helpers import ROOT, assert_equal_state, build_toy_corpus, head_logits, updates_of, write_toy_glue
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from lazyformer_fairseq.cli import main
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation.export import export
from lazyformer_fairseq.evaluation.inference import TrainedModel
from lazyformer_fairseq.fairseq_plugin.models import CausalLanguageModel, LazyFormerModel
from lazyformer_fairseq.finetuning.grid import load_start_models

FIXTURES = ROOT / "tests" / "fixtures"
TRAINED_MODELS = FIXTURES / "checkpoints"
ENCODER = TRAINED_MODELS / "encoder"
LANGUAGE_MODEL = TRAINED_MODELS / "language_model"
EXPECTED = json.loads((TRAINED_MODELS / "expected.json").read_text())
SIZES = (
    "--encoder-embed-dim 16 --encoder-ffn-embed-dim 32 --max-positions 64 --dropout 0 --attention-dropout 0 "
    "--batch-size 4 --arch lazyformer_m2x6_s_tiny"
)
ENCODER_SIZES = f"{SIZES} --sublayer-pattern 'sflf sf' --encoder-normalize-before"


def assert_near(found: torch.Tensor, expected: list) -> None:
    torch.testing.assert_close(found, torch.tensor(expected), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["m2x2", "encoder"])
def test_an_encoder_is_used_from_raw_text(name):
    expected = EXPECTED[name]
    hub = LazyFormerModel.from_pretrained(TRAINED_MODELS / name)
    assert_near(hub.extract_features(*EXPECTED["texts"])[:, 0], expected["features"])
    answers = hub.fill_mask(EXPECTED["masked"], topk=3)
    assert [answer.word for answer in answers] == [word for word, _ in expected["filled"]]
    probabilities = [probability for _, probability in expected["filled"]]
    assert [answer.probability for answer in answers] == pytest.approx(probabilities, abs=1e-4)
    assert answers[0].text == f"anna {answers[0].word} ben near the river."
    everything = hub.fill_mask(EXPECTED["masked"], topk=len(hub.tokenizer.dictionary))
    assert sum(answer.probability for answer in everything) == pytest.approx(1, abs=1e-4)


@pytest.mark.slow
def test_an_encoder_is_fine_tuned_and_so_is_the_model_that_it_is_exported_to(tmp_path, fairseq_train):
    cola, checkpoint = write_toy_glue(tmp_path / "glue", train=8, valid=4) / "CoLA", ENCODER / "checkpoint_last.pt"
    export(ENCODER, tmp_path / "model")
    for start in (checkpoint, tmp_path / "model" / "model.safetensors"):
        options = f"{ENCODER_SIZES} --criterion glue --finetune-from-model {start} --max-update 1 --lr 0"
        tuned = fairseq_train(cola, options, tmp_path / start.stem, task="glue")
        assert updates_of(tuned) == 1
        for name, weight in torch.load(checkpoint)["model"].items():
            assert torch.equal(tuned["model"][name], weight), name
        (found,) = load_start_models({"m": start}, ENCODER / "tokenizer")
        assert (found.options.sublayer_pattern, found.options.max_positions) == ("sflf sf", 64)


@pytest.mark.parametrize("folder", ["fine_tuned", "exported"])
def test_a_classification_head_predicts(folder):
    hub = LazyFormerModel.from_pretrained(TRAINED_MODELS / folder)
    assert_near(head_logits(hub, "cola", *EXPECTED["texts"]), EXPECTED["fine_tuned"]["logits"])


def test_a_language_model_is_used():
    hub = CausalLanguageModel.from_pretrained(LANGUAGE_MODEL, "checkpoint_last.pt", str(LANGUAGE_MODEL / "data"))
    ids = torch.arange(4, 25)[None]
    with torch.no_grad():
        nats, _ = hub.models[0](ids[:, :-1], target=ids[:, 1:])
    assert_near(nats[0], EXPECTED["language_model"]["nats_of_ids_5_to_24"])


def test_the_run_of_a_language_model_is_resumed_with_its_memory(tmp_path, fairseq_train):
    before = torch.load(LANGUAGE_MODEL / "checkpoint_last.pt")
    saved = before["extra_state"]["stream_memory"]
    shutil.copy(LANGUAGE_MODEL / "checkpoint_last.pt", tmp_path)
    options = (
        "--arch lazy_par_transformer_tiny --sublayer-pattern 'sflf sf' --decoder-embed-dim 16 "
        "--decoder-ffn-embed-dim 32 --dropout 0 --attention-dropout 0 --activation-dropout 0 "
        "--adaptive-softmax-cutoff 10,20 --adaptive-softmax-factor 2 --mem-len 16 --criterion causal_lm "
        f"--batch-size 4 --lr 1e-2 --save-interval-updates 1000 --max-update {updates_of(before) + 1}"
    )
    after = fairseq_train(LANGUAGE_MODEL / "data", options, tmp_path, task="stream_language_modeling --tgt-len 12")

    # A segment of 12 tokens drives as many out of a memory of 16: the first 4 of what follows are the last 4 of before.
    one_more = after["extra_state"]["stream_memory"]
    assert one_more["next_segment"] == saved["next_segment"] + 1
    assert len(one_more["states"]) == len(saved["states"]) == 3
    for new, old in zip(one_more["states"], saved["states"], strict=True):
        assert torch.equal(new[:, :4], old[:, 12:])


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
    assert before.model.cfg == after.model.cfg
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


def change_config(folder: Path, **changes) -> None:
    config = json.loads((folder / "config.json").read_text())
    options = config["model"] | changes.pop("model", {})
    (folder / "config.json").write_text(json.dumps(config | {"model": options} | changes))


def test_what_does_not_fit_is_said(copy, tmp_path):
    kept = (copy / "config.json").read_bytes()
    for changes, words in (
        ({"format_version": 2}, "config.json: format version 2 is not supported, only 1"),
        ({"format": "other"}, "config.json is not the config of an exported model"),
        ({"architecture": "roberta"}, "must contain the architecture lazyformer"),
        ({"model": {"layers": 3}}, "unknown option layers; did you mean layer_norm_eps"),
        ({"model": {"dropout": "much"}}, "option dropout is 'much', but must be of type float"),
        ({"model": {"encoder_embed_dim": True}}, "option encoder_embed_dim is True, but must be of type int"),
        ({"model": {"sublayer_pattern": "M3"}}, "has the sublayer_pattern 'M2', but config.json says 'M3'"),
        ({"model": {"encoder_ffn_embed_dim": 48}}, r"has the shape \(64, 32\), but the model's has \(48, 32\)"),
        ({"model": {"encoder_embed_dim": 10**6, "encoder_attention_heads": 1}}, r"the model's has \(160, 1000000\)"),
        ({"model": {"encoder_attention_heads": 5}}, "is not divisible by 5 attention heads"),
        ({"model": {"activation_fn": "exec"}}, "config.json: --activation-fn exec: must be one of gelu"),
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
    damaged = "model.safetensors: truncated, damaged or not a safetensors"
    for damage, words in (
        (lambda: path.write_bytes(content[:-10]), damaged),
        (lambda: path.write_bytes(content[:9] + b"!" + content[10:]), damaged),
        (lambda: path.write_bytes(b""), damaged),
        (lambda: save_file(less, path, metadata), "model.safetensors: the checkpoint has no weight encoder.lm_head.b"),
        (lambda: save_file(weights, path), "model.safetensors has the architecture None"),
        (lambda: (copy / "config.json").rename(tmp_path / "kept"), "config.json: cannot be read as JSON"),
    ):
        damage()
        with pytest.raises(UserError, match=words):
            LazyFormerModel.from_pretrained(copy)
        path.write_bytes(content)
    (tmp_path / "kept").rename(copy / "config.json")
    build_toy_corpus(tmp_path / "corpus", 160, seed=7)
    shutil.copytree(tmp_path / "corpus" / "tokenizer", copy / "tokenizer", dirs_exist_ok=True)
    with pytest.raises(UserError, match=r"model.safetensors: .*a different dictionary of the same size"):
        LazyFormerModel.from_pretrained(copy)


# --- use from raw text, and what is refused ---------------------------------------------------------------------------


@pytest.fixture
def hub() -> TrainedModel:
    return LazyFormerModel.from_pretrained(ENCODER)


def test_padding_on_the_left_changes_nothing(hub):
    model = hub.model
    model.register_classification_head("cola", 2)
    ids, longer = hub.encode("Anna sees Ben."), hub.encode("Anna and Ben walk to the river together.")
    missing = longer.size(1) - ids.size(1)
    batch = torch.cat([torch.nn.functional.pad(ids, (missing, 0), value=hub.tokenizer.dictionary.pad()), longer])
    torch.testing.assert_close(model(batch)[0][:1, missing:], model(ids)[0])
    heads = {"classification_head_name": "cola"}
    torch.testing.assert_close(model(batch, **heads)[0], torch.cat([model(each, **heads)[0] for each in (ids, longer)]))


def test_texts_that_are_none_and_what_the_model_lacks_are_refused_in_a_line(hub):
    for wrong in ((), ([],)):
        with pytest.raises(UserError, match=r"expected at least one text, as in extract_features\('One"):
            hub.extract_features(*wrong)
    for wrong in (("Anna", 3), (["Anna", None],), (b"Anna",)):
        with pytest.raises(UserError, match="(3|None|b'Anna') is not a text; pass strings"):
            hub.extract_features(*wrong)
    for text in ("no mask at all", "<mask> and <mask>"):
        with pytest.raises(UserError, match="times in the text; <mask> must occur exactly once"):
            hub.fill_mask(text)
    with pytest.raises(UserError, match="expected a single text"):
        hub.fill_mask(["The <mask>.", "A <mask>."])
    assert hub.extract_features("Anna sees Ben. " * 400).size(1) == hub.model.max_positions() == 64, "it is cut"


def test_a_checkpoint_may_be_given_instead_of_its_folder_and_missing_and_foreign_files_are_named(tmp_path):
    by_name = LazyFormerModel.from_pretrained(str(ENCODER))
    by_file = LazyFormerModel.from_pretrained(str(ENCODER / "checkpoint_last.pt"))
    assert torch.equal(by_file.extract_features("The house."), by_name.extract_features("The house."))
    with pytest.raises(UserError, match=r"^\S*absent.pt: no such file or folder"):
        LazyFormerModel.from_pretrained(ENCODER / "absent.pt")
    with pytest.raises(UserError, match="contains no checkpoint_best.pt or checkpoint_last.pt or model.pt"):
        LazyFormerModel.from_pretrained(tmp_path)
    torch.save({"model": {}}, tmp_path / "model.pt")
    with pytest.raises(UserError, match="tokenizer"):
        LazyFormerModel.from_pretrained(tmp_path)
    shutil.copytree(ENCODER / "tokenizer", tmp_path / "tokenizer")
    with pytest.raises(UserError, match=r"model\.pt: .*no(t a)? checkpoint"):
        LazyFormerModel.from_pretrained(tmp_path)


POSITIONS = "encoder.sentence_encoder.embed_positions.weight"


def changed(folder: Path, change: Callable[[dict], object]) -> Path:
    """Return a folder with the encoder's checkpoint in which something was changed."""
    folder.mkdir(exist_ok=True)
    shutil.copytree(ENCODER / "tokenizer", folder / "tokenizer", dirs_exist_ok=True)
    state = torch.load(ENCODER / "checkpoint_last.pt")
    change(state)
    torch.save(state, folder / "checkpoint_last.pt")
    return folder


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda state: state["model"][POSITIONS][3].fill_(torch.nan), "embed_positions.weight contains NaN or Inf"),
        (
            lambda state: state["model"].update({POSITIONS: state["model"][POSITIONS].int()}),
            "embed_positions.weight is torch.int32, but the model's is torch.float32",
        ),
        (
            lambda state: state["model"].update({POSITIONS: torch.zeros(1).expand(state["model"][POSITIONS].shape)}),
            "embed_positions.weight claims to be larger than the file",
        ),
        (lambda state: state["cfg"]["model"].update(_name="bert_huge"), "its model 'bert_huge' is unknown"),
        (lambda state: state["cfg"]["task"].update(_name="mine"), "its task 'mine' is unknown"),
        (lambda state: state["cfg"]["model"].update(rotary=True, alibi=2), "unknown option alibi, rotary"),
    ],
)
def test_what_cannot_be_right_is_refused(tmp_path, spoil, words):
    with pytest.raises(UserError, match=words):
        LazyFormerModel.from_pretrained(changed(tmp_path, spoil))
