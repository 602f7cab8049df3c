"""A checkpoint of version 0.1.0 stays good for all that it was good for; tests/fixtures/README.md says what it is."""

import json
import shutil

import pytest
import torch
from helpers import ROOT, write_toy_glue

from lazyformer_fairseq.models import LazyFormerModel

OLD = ROOT / "tests" / "fixtures" / "checkpoint_of_0.1.0"
EXPECTED = json.loads((OLD / "expected.json").read_text())
SIZES = (
    "--arch lazyformer_m2x6_s_tiny --sublayer-pattern M2x2 --encoder-embed-dim 16 --encoder-ffn-embed-dim 32 "
    "--max-positions 64 --dropout 0 --attention-dropout 0 --batch-size 4"
)


def test_it_is_used_from_raw_text():
    hub = LazyFormerModel.from_pretrained(OLD)
    features = hub.extract_features(*EXPECTED["texts"])[:, 0]
    torch.testing.assert_close(features, torch.tensor(EXPECTED["features"]), atol=1e-4, rtol=1e-4)
    answers = hub.fill_mask("Anna <mask> Ben near the river.", topk=3)
    assert [answer.word for answer in answers] == [word for word, _ in EXPECTED["filled"]]
    probabilities = [probability for _, probability in EXPECTED["filled"]]
    assert [answer.probability for answer in answers] == pytest.approx(probabilities, abs=1e-4)


def test_its_run_is_resumed(tmp_path, fairseq_train):
    shutil.copy(OLD / "checkpoint_last.pt", tmp_path)
    options = f"{SIZES} --criterion masked_lm_accuracy --lr 1e-2 --save-interval-updates 1000"
    resumed = fairseq_train(OLD / "data", f"{options} --max-update {EXPECTED['resumed_updates']}", tmp_path)
    history = [part["num_updates"] for part in resumed["optimizer_history"]]
    assert history == [EXPECTED["updates"], EXPECTED["resumed_updates"]]
    assert resumed["extra_state"]["val_loss"] == pytest.approx(EXPECTED["resumed_valid_loss"], abs=2e-3)


def test_it_is_fine_tuned(tmp_path, fairseq_train):
    glue = write_toy_glue(tmp_path / "glue", train=8, valid=4)
    options = f"{SIZES} --criterion glue --finetune-from-model {OLD / 'checkpoint_last.pt'} --max-update 1 --lr 0"
    tuned = fairseq_train(
        glue / "CoLA",
        f"{options} --best-checkpoint-metric matthews --maximize-best-checkpoint-metric",
        tmp_path / "run",
        task="glue",
    )
    assert tuned["optimizer_history"][-1]["num_updates"] == 1
    for name, weight in torch.load(OLD / "checkpoint_last.pt")["model"].items():
        assert torch.equal(tuned["model"][name], weight), name
