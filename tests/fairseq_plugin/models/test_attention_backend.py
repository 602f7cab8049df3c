"""``--attention-backend`` was lazy_backend in 0.1.0: on command lines, in YAML and in checkpoints it still is."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from helpers import ROOT

from lazyformer_fairseq.fairseq_plugin.models import LazyFormerModel
from lazyformer_fairseq.fairseq_plugin.models.export import export
from lazyformer_fairseq.fairseq_plugin.reliability.options import backend_of

OLD = ROOT / "tests" / "fixtures" / "checkpoint_of_0.1.0"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ""),
        ({"attention_backend": "auto", "lazy_backend": None}, "auto"),
        ({"attention_backend": "auto", "lazy_backend": "eager"}, "eager"),
        ({"attention_backend": "fused", "lazy_backend": "eager"}, "fused"),
        ({"lazy_backend": "recompute"}, "recompute"),
    ],
)
def test_the_new_name_comes_first(given, expected):
    assert backend_of(SimpleNamespace(**given)) == expected


@pytest.mark.parametrize("name", ["--attention-backend", "--lazy-backend"])
def test_both_names_are_options(name):
    parser = options.get_training_parser("full_sentences_masked_lm")
    arguments = ["data", "--task", "full_sentences_masked_lm", "--arch", "lazyformer_m2x6_s_tiny", name, "recompute"]
    given = options.parse_args_and_arch(parser, arguments)
    assert backend_of(convert_namespace_to_omegaconf(given).model) == "recompute"


def test_a_checkpoint_with_the_old_name_is_loaded(tmp_path):
    shutil.copytree(OLD, tmp_path / "old")
    path = tmp_path / "old" / "checkpoint_last.pt"
    checkpoint = torch.load(path, weights_only=False)
    checkpoint["cfg"]["model"]["lazy_backend"] = "recompute"
    torch.save(checkpoint, path)
    hub = LazyFormerModel.from_pretrained(tmp_path / "old")
    assert hub.model.encoder.sentence_encoder.attention_backend == "recompute"


def test_an_export_has_the_new_name_and_one_with_the_old_is_read(tmp_path):
    exported = tmp_path / "exported"
    export(OLD, exported)
    config = json.loads((exported / "config.json").read_text())
    assert config["model"]["attention_backend"] == "auto" and "lazy_backend" not in config["model"]
    del config["model"]["attention_backend"]
    config["model"]["lazy_backend"] = "eager"
    (exported / "config.json").write_text(json.dumps(config))
    assert LazyFormerModel.from_pretrained(exported).model.encoder.sentence_encoder.attention_backend == "eager"
