"""Tasks of fairseq's own are as they are, whether the plugin is loaded or not."""

import argparse
import os
import re
import subprocess
import sys

import pytest
import torch
from helpers import ROOT

DATA = ROOT / "tests" / "fixtures" / "checkpoint_of_0.1.0" / "data"
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
    plugin = ("--user-dir", str(ROOT / "lazyformer_fairseq"))
    ours, loaded, file = train(warm_python / "python", tmp_path / "loaded", *plugin)
    assert len(losses) > 6 and ours == losses
    assert loaded["extra_state"]["val_loss"] == stock["extra_state"]["val_loss"]
    assert loaded["model"].keys() == stock["model"].keys()
    assert all(torch.equal(loaded["model"][name], weight) for name, weight in stock["model"].items())
    assert loaded["extra_state"].keys() == stock["extra_state"].keys()
    assert b"lazyformer_fairseq sha256" not in file, "fairseq itself has written it"


@pytest.mark.slow
def test_a_mistake_of_a_stock_task_is_what_it_was(tmp_path):
    """No hook of ours prints it, and no option of ours is looked at."""
    command = [*"--write-checkpoints-asynchronously --bf16".split(), "--user-dir", str(ROOT / "lazyformer_fairseq")]
    code = (
        "import sys; from fairseq import options\n"
        f"parsed = options.parse_args_and_arch(options.get_training_parser(), {[str(DATA), *OPTIONS, *command]!r})\n"
        "from lazyformer_fairseq.fairseq_plugin import replacements\n"
        "print(parsed.tpu, sys.excepthook is sys.__excepthook__, {row.stage.name for row in replacements._before})"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, "--user-dir", str(ROOT / "lazyformer_fairseq")],
        **{"cwd": ROOT, "capture_output": True, "text": True, "timeout": 120},
    )
    assert run.stdout.splitlines()[-1] in (
        "True True {'NAME', 'REGISTRATION'}",
        "True True {'REGISTRATION', 'NAME'}",
    ), run.stderr
