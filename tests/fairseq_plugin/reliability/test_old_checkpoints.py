"""Old checkpoints stay good for all that they were good for; tests/fixtures/README.md says what they are."""

import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from helpers import ROOT, write_toy_glue

from lazyformer_fairseq.cli import main
from lazyformer_fairseq.fairseq_plugin.models import CausalLanguageModel, LazyFormerModel

FIXTURES = ROOT / "tests" / "fixtures"
DATA_OF_ENCODERS = FIXTURES / "checkpoint_of_0.1.0" / "data"
OF_2026_11 = FIXTURES / "checkpoints_of_2026_11"
EXPECTED_OF_2026_11 = json.loads((OF_2026_11 / "expected.json").read_text())
LANGUAGE_MODEL = OF_2026_11 / "language_model"


@dataclass(frozen=True)
class OldEncoder:
    """A masked language model's checkpoint, what it was trained with, and what it gave when it was new."""

    folder: Path
    pattern: str
    expected: dict

    @property
    def options(self) -> str:
        return (
            f"--arch lazyformer_m2x6_s_tiny {self.pattern} --encoder-embed-dim 16 --encoder-ffn-embed-dim 32 "
            "--max-positions 64 --dropout 0 --attention-dropout 0 --batch-size 4"
        )


ENCODERS = {
    "0.1.0": OldEncoder(
        FIXTURES / "checkpoint_of_0.1.0",
        "--sublayer-pattern M2x2",
        json.loads((FIXTURES / "checkpoint_of_0.1.0" / "expected.json").read_text()),
    ),
    "2026-11": OldEncoder(
        OF_2026_11 / "encoder", "--sublayer-pattern 'sflf sf' --encoder-normalize-before", EXPECTED_OF_2026_11
    ),
}


@pytest.fixture(params=ENCODERS)
def old(request) -> OldEncoder:
    return ENCODERS[request.param]


def test_an_encoder_is_used_from_raw_text(old):
    hub = LazyFormerModel.from_pretrained(old.folder)
    features = hub.extract_features(*old.expected["texts"])[:, 0]
    torch.testing.assert_close(features, torch.tensor(old.expected["features"]), atol=1e-4, rtol=1e-4)
    answers = hub.fill_mask("Anna <mask> Ben near the river.", topk=3)
    assert [answer.word for answer in answers] == [word for word, _ in old.expected["filled"]]
    probabilities = [probability for _, probability in old.expected["filled"]]
    assert [answer.probability for answer in answers] == pytest.approx(probabilities, abs=1e-4)


def test_the_run_of_an_encoder_is_resumed(old, tmp_path, fairseq_train):
    shutil.copy(old.folder / "checkpoint_last.pt", tmp_path)
    options = f"{old.options} --criterion masked_lm_accuracy --lr 1e-2 --save-interval-updates 1000"
    resumed = fairseq_train(DATA_OF_ENCODERS, f"{options} --max-update {old.expected['resumed_updates']}", tmp_path)
    history = [part["num_updates"] for part in resumed["optimizer_history"]]
    assert history == [old.expected["updates"], old.expected["resumed_updates"]]
    assert resumed["extra_state"]["val_loss"] == pytest.approx(old.expected["resumed_valid_loss"], abs=2e-3)


@pytest.mark.slow
def test_an_encoder_is_fine_tuned(old, tmp_path, fairseq_train):
    glue = write_toy_glue(tmp_path / "glue", train=8, valid=4)
    start = old.folder / "checkpoint_last.pt"
    options = f"{old.options} --criterion glue --finetune-from-model {start} --max-update 1 --lr 0"
    tuned = fairseq_train(
        glue / "CoLA",
        f"{options} --best-checkpoint-metric matthews --maximize-best-checkpoint-metric",
        tmp_path / "run",
        task="glue",
    )
    assert tuned["optimizer_history"][-1]["num_updates"] == 1
    for name, weight in torch.load(start)["model"].items():
        assert torch.equal(tuned["model"][name], weight), name


@pytest.mark.parametrize("kind", ["fine_tuned", "exported"])
def test_a_classification_head_predicts(kind):
    hub = LazyFormerModel.from_pretrained(OF_2026_11 / kind)
    logits = hub.predict("cola", *EXPECTED_OF_2026_11["texts"])
    torch.testing.assert_close(logits, torch.tensor(EXPECTED_OF_2026_11["logits"]), atol=1e-4, rtol=1e-4)


def test_a_language_model_is_used():
    hub = CausalLanguageModel.from_pretrained(LANGUAGE_MODEL, "checkpoint_last.pt", str(LANGUAGE_MODEL / "data"))
    ids = torch.arange(4, 25)[None]
    with torch.no_grad():
        nats, _ = hub.models[0](ids[:, :-1], target=ids[:, 1:])
    torch.testing.assert_close(nats[0], torch.tensor(EXPECTED_OF_2026_11["nats_of_ids_5_to_24"]), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("split", ["valid", "test"])
def test_a_language_model_is_evaluated(split, tmp_path):
    files = [LANGUAGE_MODEL / "checkpoint_last.pt", LANGUAGE_MODEL / "data", "--json", tmp_path / "result.json"]
    command = ["lm", "evaluate", *map(str, files), "--split", split, "--device", "cpu"]
    CliRunner().invoke(main, command, catch_exceptions=False)
    result = json.loads((tmp_path / "result.json").read_text())
    expected = EXPECTED_OF_2026_11[f"{split}_nats_per_token"]
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
    one_more = resumed(EXPECTED_OF_2026_11["updates"] + 1)["extra_state"]["stream_memory"]
    assert one_more["next_segment"] == saved["next_segment"] + 1
    assert len(one_more["states"]) == len(saved["states"]) == 3
    for after, before in zip(one_more["states"], saved["states"], strict=True):
        assert torch.equal(after[:, :4], before[:, 12:])

    state = resumed(EXPECTED_OF_2026_11["resumed_updates"])
    expected = EXPECTED_OF_2026_11["language_model_resumed_valid_loss"]
    assert state["extra_state"]["val_loss"] == pytest.approx(expected, abs=2e-3)
