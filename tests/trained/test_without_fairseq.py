"""Trained models are used, exported and imported where fairseq cannot be imported, to the bit as where it can."""

import json
import os
from argparse import Namespace

import pytest
import torch
from helpers import ROOT

from lazyformer_fairseq.data.text.dictionary_file import load_dictionary
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.storage import checkpoint_file
from lazyformer_fairseq.trained import checkpoints, hub

OF_2026_11 = ROOT / "tests" / "fixtures" / "checkpoints_of_2026_11"


def test_a_causal_language_model_is_built_from_its_checkpoint():
    path = OF_2026_11 / "language_model" / "checkpoint_last.pt"
    dictionary = load_dictionary(path.parent / "data" / "dict.txt")
    model = hub.build(checkpoints.load(path), dictionary, path).eval()
    ids = torch.arange(4, 25)[None]
    expected = json.loads((OF_2026_11 / "expected.json").read_text())["nats_of_ids_5_to_24"]
    with torch.no_grad():
        nats, _ = model(ids[:, :-1], target=ids[:, 1:])
    torch.testing.assert_close(nats[0], torch.tensor(expected), atol=1e-4, rtol=1e-4)


class Runs:
    def __reduce__(self):
        return os.mkdir, ("ran",)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"model": {}, "cfg": {"model": Runs()}}, "refused, nothing of it was run"),
        ({"model": {}, "cfg": None, "args": Namespace(arch="roberta")}, "it has no settings and weights"),
        ([1], "it has no settings and weights"),
        ({"model": {}, "cfg": {"model": {"_name": "mine"}}}, "its model 'mine' is unknown here"),
        ({"model": {}, "cfg": {"model": {"layers": 3}}}, "or of a later version: no setting layers"),
    ],
)
def test_what_is_no_checkpoint_of_ours_is_refused_and_not_run(content, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "checkpoint_last.pt"
    checkpoint_file.save(content, path)
    dictionary = load_dictionary(OF_2026_11 / "language_model" / "data" / "dict.txt")
    with pytest.raises(UserError, match=said):
        hub.build(checkpoints.load(path), dictionary, path)
    assert not (tmp_path / "ran").exists()
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(checkpoint_file.DamagedCheckpointError):
        checkpoints.load(path)
