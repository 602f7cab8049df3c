"""Old checkpoints stay good for all that they were good for; tests/fixtures/README.md says what they are."""

import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from helpers import ROOT, updates_of, write_toy_glue

from lazyformer_fairseq.cli import main
from lazyformer_fairseq.fairseq_plugin.models import CausalLanguageModel, LazyFormerModel

FIXTURES = ROOT / "tests" / "fixtures"
OF_0_1_0, OF_2026_11 = FIXTURES / "checkpoint_of_0.1.0", FIXTURES / "checkpoints_of_2026_11"
LANGUAGE_MODEL = OF_2026_11 / "language_model"
EXPECTED = {folder: json.loads((folder / "expected.json").read_text()) for folder in (OF_0_1_0, OF_2026_11)}
SIZES = (
    "--encoder-embed-dim 16 --encoder-ffn-embed-dim 32 --max-positions 64 --dropout 0 --attention-dropout 0 "
    "--batch-size 4 --arch lazyformer_m2x6_s_tiny"
)


@dataclass(frozen=True)
class OldEncoder:
    """A masked language model's checkpoint, what it was trained with, and what it gave when it was new."""

    folder: Path
    options: str
    expected: dict


@pytest.fixture(params=["0.1.0", "2026-11"])
def old(request) -> OldEncoder:
    if request.param == "0.1.0":
        return OldEncoder(OF_0_1_0, f"{SIZES} --sublayer-pattern M2x2", EXPECTED[OF_0_1_0])
    options = f"{SIZES} --sublayer-pattern 'sflf sf' --encoder-normalize-before"
    return OldEncoder(OF_2026_11 / "encoder", options, EXPECTED[OF_2026_11])


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
