"""Each task trains in fp16 as it does in fp32: what a GPU without bfloat16 does, and on a processor the same steps."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import write_toy_glue

from lazyformer_fairseq import USER_DIR

LAZY = "--arch lazyformer_m2x6_s_tiny --sublayer-pattern M2 --dropout 0"
SETTINGS = {
    "full_sentences_masked_lm": f"{LAZY} --tokens-per-sample 32 --criterion masked_lm_accuracy --batch-size 4",
    "glue": f"{LAZY} --criterion glue --batch-size 16 --pooler-dropout 0",
    "stream_language_modeling": (
        "--arch lazy_par_transformer_tiny --sublayer-pattern sflf --tgt-len 6 --mem-len 9 --dropout 0 "
        "--adaptive-softmax-cutoff 20,40 --criterion causal_lm --batch-size 16"
    ),
}
UPDATES = "--max-update 8 --disable-validation"


@pytest.fixture(scope="session")
def data(data_folder, lm_data, tmp_path_factory) -> dict[str, tuple[Path, str]]:
    """By task, the data and what else its command needs."""
    glue = write_toy_glue(tmp_path_factory.mktemp("glue"))
    return {
        "full_sentences_masked_lm": (data_folder, ""),
        "glue": (glue / "CoLA", f"--tokenizer-folder {data_folder / 'tokenizer'}"),
        "stream_language_modeling": (lm_data, ""),
    }


def assert_close(half: dict, full: dict, start: dict, updates: int = 8) -> None:
    """The fp16 run ends near the fp32 run, compared with how far that came; both made all updates."""
    for state in (half, full):
        assert state["optimizer_history"][-1]["num_updates"] == updates
    names = [name for name, weight in full["model"].items() if weight.is_floating_point() and weight.numel() > 1]
    assert "loss_scale" in half["last_optimizer_state"]
    moved, apart = (
        torch.cat([(one["model"][name].double() - two["model"][name].double()).flatten() for name in names]).norm()
        for one, two in ((full, start), (half, full))
    )
    assert 0 < apart < 0.1 * moved


@pytest.mark.slow
@pytest.mark.parametrize("task", SETTINGS)
def test_fp16_trains_close_to_fp32(task, data, tmp_path, fairseq_train):
    folder, more = data[task]

    def train(name: str, options: str) -> dict:
        return fairseq_train(folder, f"{SETTINGS[task]} {UPDATES} {more} {options}", tmp_path / name, task=task)

    full, half = train("full", ""), train("half", "--fp16")
    assert_close(half, full, train("start", "--lr 0"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize("flat", ["", "--fp16-no-flatten-grads"], ids=["one vector", "apart"])
@pytest.mark.parametrize("task", SETTINGS)
def test_fp16_trains_close_to_fp32_on_a_gpu(task, flat, data, tmp_path):
    folder, more = data[task]

    def train(name: str, options: str) -> dict:
        words = f"{more} --user-dir {USER_DIR} --task {task} {SETTINGS[task]} {UPDATES} --optimizer fused_adam "
        words += f"--lr-scheduler linear_warmup --lr 1e-3 --num-workers 0 --save-dir {tmp_path / name} "
        words += f"--distributed-world-size 1 {options}"
        command = [sys.executable, "-m", "fairseq_cli.train", str(folder), *words.split()]
        run = subprocess.run(command, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr[-2000:]
        return torch.load(tmp_path / name / "checkpoint_last.pt", map_location="cpu")

    full, half = train("full", ""), train("half", f"--fp16 {flat}")
    assert_close(half, full, train("start", "--lr 0"))
