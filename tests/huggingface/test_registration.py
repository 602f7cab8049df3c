"""Importing lazyformer_fairseq.huggingface makes the auto classes find ours, whichever is imported first."""

import os
import subprocess
import sys

import pytest
import transformers
from exports import export_custom, tiny_model
from helpers import ROOT

from lazyformer_fairseq import huggingface
from lazyformer_fairseq.huggingface.exported import heads, modelling

OURS, THEIRS = "import lazyformer_fairseq.huggingface", "from transformers import AutoConfig, AutoModel"
LOAD = "model = AutoModel.from_pretrained({folder!r}); print(type(model).__module__)"


def test_all_auto_classes_know_ours():
    huggingface.register_when_transformers_is_loaded()  # it is
    for auto, name in modelling.AUTO_CLASSES.items():
        if auto != "AutoConfig":
            model = getattr(transformers, auto).from_config(modelling.LazyFormerConfig(vocab_size=9, hidden_size=12))
            assert type(model) is getattr(heads, name)
    assert isinstance(transformers.AutoConfig.for_model("lazyformer"), modelling.LazyFormerConfig)


@pytest.mark.slow
@pytest.mark.parametrize("first", [(OURS, THEIRS), (THEIRS, OURS)], ids=["ours first", "theirs first"])
def test_auto_classes_find_ours_without_trust(first, tmp_path):
    folder = export_custom(tiny_model(), tmp_path / "export")
    code = "; ".join([*first, LOAD.format(folder=str(folder))])
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert found.stdout.strip() == "lazyformer_fairseq.huggingface.exported.modelling", found.stderr


def test_the_package_loads_transformers_no_sooner_than_needed():
    code = f"{OURS}; import sys; print('transformers' in sys.modules, 'torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert found.stdout.strip() == "False False"
