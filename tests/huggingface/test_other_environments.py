"""What was exported, by transformers of several versions, sentence-transformers and ONNX, without this package.

LAZYFORMER_HF_PYTHONS names interpreters that have them, divided by colons, as in
``LAZYFORMER_HF_PYTHONS=/envs/4.57/bin/python:/envs/5/bin/python``. Each does what it can.
"""

import os
import subprocess
from pathlib import Path

import pytest
import torch
from helpers import ROOT

from lazyformer_fairseq import load
from lazyformer_fairseq.huggingface.export import export_to_huggingface

PYTHONS = [python for python in os.environ.get("LAZYFORMER_HF_PYTHONS", "").split(":") if python]
SCRIPT = Path(__file__).with_name("in_other_environments.py")
CHECKPOINTS = ROOT / "tests/fixtures/checkpoints"
TEXTS = ["anna sees ben near the house.", "the old house"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHONS, reason="LAZYFORMER_HF_PYTHONS names no interpreters; see the head of this file"),
]
NEEDS = {"load": "transformers", "sentences": "sentence_transformers", "onnx": "onnxruntime, onnxscript"}


@pytest.fixture
def exported(tmp_path):
    """A fine-tuned model, pre-norm with a bias and an l, and what it computes."""
    export_to_huggingface(CHECKPOINTS / "fine_tuned", tmp_path / "exported")
    ours = load(CHECKPOINTS / "fine_tuned")
    with torch.no_grad():
        wanted = {
            "texts": TEXTS,
            "ids": ours.encode(*TEXTS),
            "features": ours.extract_features(*TEXTS),
            "classes": ours.predict("cola", *TEXTS),
        }
        wanted["logits"] = ours.model(wanted["ids"])[0]
    torch.save(wanted, tmp_path / "exported" / "wanted.pt")
    return tmp_path / "exported"


@pytest.mark.parametrize("python", PYTHONS or ["none"])
@pytest.mark.parametrize("what", NEEDS)
def test_it_computes_the_same_there(python, what, exported):
    has = subprocess.run([python, "-c", f"import {NEEDS[what]}"], capture_output=True, check=False)
    if has.returncode:
        pytest.skip(f"{python} has no {NEEDS[what]}")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(exported.parent / "home"), "PYTHONPATH": ""}
    command = [python, str(SCRIPT), what, str(exported)]
    found = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=exported, check=False)
    assert found.returncode == 0, found.stderr
