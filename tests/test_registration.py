"""Importing the package is light and leaves the process as it was; it registers as soon as fairseq is loaded."""

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import ROOT, assert_equal_state

import lazyformer_fairseq

REGISTERED = """
from fairseq.models import ARCH_MODEL_NAME_REGISTRY, MODEL_REGISTRY
from fairseq.optim import OPTIMIZER_REGISTRY
from fairseq.tasks import TASK_REGISTRY
print(ARCH_MODEL_NAME_REGISTRY["bert_base"], *sorted({
    each.__module__ for registry in (MODEL_REGISTRY, OPTIMIZER_REGISTRY, TASK_REGISTRY) for each in registry.values()
    if each.__module__.startswith("lazyformer_fairseq")
}))
"""
TRAINED = ROOT / "tests" / "fixtures" / "checkpoints" / "m2x2"
DATA = TRAINED / "data"
OURS = [
    "lazyformer",
    *(f"lazyformer_fairseq.fairseq_plugin.models.{name}" for name in ("huggingface_bert", "lazyformer")),
    "lazyformer_fairseq.fairseq_plugin.optim.optimizers",
    "lazyformer_fairseq.fairseq_plugin.tasks.finetuning",
    "lazyformer_fairseq.fairseq_plugin.tasks.full_sentences_masked_lm",
    "lazyformer_fairseq.fairseq_plugin.tasks.stream_language_modeling",
]


def output_of(code: str, python: str | Path = sys.executable) -> str:
    """What a fresh process prints; it must print nothing else."""
    run = subprocess.run([python, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_dir_shows_the_public_names_and_loads_none_of_them():
    light = "print(*sorted({'torch', 'transformers', 'fairseq'} & set(sys.modules)))"
    names = "assert set(m.__all__) <= set(dir(m)), dir(m)"
    code = f"import sys, lazyformer_fairseq as m; {names}; import lazyformer_fairseq.huggingface as m; {names}; {light}"
    assert output_of(code) == "\n"


@pytest.mark.parametrize(
    "code",
    [
        "import fairseq, lazyformer_fairseq",
        # And then what fairseq does with --user-dir, where the package has been imported before, and where not.
        pytest.param(
            "import lazyformer_fairseq, argparse, fairseq; from fairseq import utils;"
            "utils.import_user_module(argparse.Namespace(user_dir=str(lazyformer_fairseq.USER_DIR)))",
            marks=pytest.mark.slow,
        ),
        f"import argparse; from fairseq import utils;"
        f"utils.import_user_module(argparse.Namespace(user_dir={str(ROOT / 'lazyformer_fairseq')!r}))",
        pytest.param(
            "import lazyformer_fairseq; lazyformer_fairseq.register(); lazyformer_fairseq.register()",
            marks=pytest.mark.slow,
        ),
        "from lazyformer_fairseq import LazyFormerModel; assert LazyFormerModel.from_pretrained",
        # Imports fairseq itself, and is imported by what is registered: half loaded when fairseq is.
        "import lazyformer_fairseq.fairseq_plugin.tasks.encoder_task",
        # Which loads what takes fairseq's own bert_base away, and then what registers ours.
        pytest.param(
            "from lazyformer_fairseq.fairseq_plugin.replacements import start_run; start_run()", marks=pytest.mark.slow
        ),
    ],
)
def test_registered_whatever_comes_first(code, warm_python):
    assert output_of(code + REGISTERED, warm_python / "python").split() == OURS


def test_every_public_name_is_there():
    assert all(getattr(lazyformer_fairseq, name) for name in lazyformer_fairseq.__all__)
    with pytest.raises(AttributeError, match="module 'lazyformer_fairseq' has no attribute 'missing'"):
        _ = lazyformer_fairseq.missing


STATE = """
import json, logging, os, sys, warnings
logging.basicConfig(level=logging.ERROR)
def state():
    root = logging.getLogger()
    return [sys.excepthook is sys.__excepthook__, root.level, len(root.handlers), os.environ.get("HYDRA_FULL_ERROR")]
def filters():
    return [repr(one) for one in warnings.filters]
"""


@pytest.mark.slow
def test_a_notebook_keeps_its_excepthook_warnings_and_logging():
    """Also when it loads a model; what torch and fairseq add to the filters of warnings is theirs.

    What keeps files from running code is there with the registration, and stays.
    """
    code = f"""{STATE}
before, unfiltered = state(), filters()
import lazyformer_fairseq
print(json.dumps([state() == before, filters() == unfiltered, 'torch' in sys.modules]))
import fairseq_cli.train, fairseq.options
from fairseq import checkpoint_utils
load, before, unfiltered = checkpoint_utils.load_checkpoint_to_cpu, state(), filters()
lazyformer_fairseq.LazyFormerModel
print(json.dumps([state() == before, filters() == unfiltered]))
hub = lazyformer_fairseq.LazyFormerModel.from_pretrained({str(TRAINED)!r})
print(json.dumps([state() == before, load is checkpoint_utils.load_checkpoint_to_cpu, 'eval' in vars(fairseq.utils)]))
"""
    lines = output_of(code).splitlines()[-3:]
    assert [json.loads(line) for line in lines] == [[True, True, False], [True, True], [True, True, True]]


def test_patterns_are_of_use_without_torch():
    paths = sorted((ROOT / "lazyformer_fairseq" / "patterns").rglob("*.py"))
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths]
    assert len(names) > 2
    assert output_of(f"import {', '.join(names)}\nimport sys\nassert 'torch' not in sys.modules") == ""


# --- tasks of fairseq's own are as they are, whether the plugin is loaded or not

PLUGIN = ("--user-dir", str(ROOT / "lazyformer_fairseq"))
OPTIONS = (
    "--task masked_lm --arch roberta_base --encoder-layers 2 --encoder-embed-dim 32 --encoder-ffn-embed-dim 64 "
    "--encoder-attention-heads 4 --max-positions 64 --tokens-per-sample 32 --sample-break-mode complete "
    "--criterion masked_lm --optimizer adam --lr 1e-3 --clip-norm 1.0 --batch-size 4 --max-update 6 --cpu --seed 7 "
    "--num-workers 0 --log-format json --log-interval 1 --no-epoch-checkpoints"
).split()


def train(python, folder, *more: str) -> tuple[list[str], dict, bytes]:
    """What the log says of losses, the last checkpoint, and its file."""
    command = [python, "-m", "fairseq_cli.train", str(DATA), *OPTIONS, "--save-dir", str(folder), *more]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr[-3000:]
    file = folder / "checkpoint_last.pt"
    with torch.serialization.safe_globals([argparse.Namespace]):  # what fairseq saves of a model without a dataclass
        return re.findall(r'"(?:\w+_)?loss": "[^"]+"', run.stdout), torch.load(file), file.read_bytes()


@pytest.mark.slow
def test_masked_lm_with_roberta_base(tmp_path, warm_python):
    losses, stock, _ = train(warm_python / "python", tmp_path / "stock")
    ours, loaded, file = train(warm_python / "python", tmp_path / "loaded", *PLUGIN)
    assert len(losses) > 6 and ours == losses
    assert loaded["extra_state"]["val_loss"] == stock["extra_state"]["val_loss"]
    assert_equal_state(loaded["model"], stock["model"])
    assert loaded["extra_state"].keys() == stock["extra_state"].keys()
    assert b"lazyformer_fairseq sha256" not in file, "fairseq itself has written it"
