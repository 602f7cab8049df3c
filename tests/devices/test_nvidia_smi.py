"""What GPUs a machine has and the precision that they train in, by nvidia-smi's of our own."""

import subprocess
import sys
from collections.abc import Callable
from functools import partial

import pytest
import torch
from helpers import false_nvidia_smi

from lazyformer_fairseq.devices import nvidia_smi
from lazyformer_fairseq.devices.nvidia_smi import precision_here, precision_of, precision_on


@pytest.fixture
def machine(tmp_path, monkeypatch) -> Callable:
    """``machine("7.0", "7.0", driver="550.54")``: puts an nvidia-smi of such GPUs first on the PATH."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return partial(false_nvidia_smi, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("there", "precision"),
    [
        (["6.0"], "fp16"),
        (["7.0"] * 8, "fp16"),
        (["7.5"], "fp16"),
        (["8.0"], "bf16"),
        (["12.0"], "bf16"),
        (["12.0", "7.0"], "fp16"),  # the lowest decides
        ([], "fp32"),
    ],
)
def test_gpus_and_their_precision(machine, monkeypatch, there, precision):
    machine(*there)
    assert nvidia_smi.capabilities() == [tuple(map(int, each.split("."))) for each in there]
    assert nvidia_smi.visible_gpus() == [str(number) for number in range(len(there))]
    assert precision_here() == precision
    command = [sys.executable, "-m", "lazyformer_fairseq.devices.nvidia_smi"]
    assert subprocess.run(command, capture_output=True, text=True).stdout == f"{len(there)}\n", "scripts can ask"
    if there:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: nvidia_smi.capabilities()[-1])
        assert (precision_on("cpu"), precision_on("cuda")) == ("fp32", precision)


def test_what_cannot_tell(machine, tmp_path, monkeypatch):
    machine("7.0", driver="450.80.02", knows_capabilities=False)
    assert (nvidia_smi.count_gpus(), nvidia_smi.capabilities(), nvidia_smi.driver()) == (1, [], 450)
    assert precision_here() == precision_of([]) == "fp16"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert (nvidia_smi.visible_gpus(), nvidia_smi.capabilities(), nvidia_smi.driver()) == ([], [], None)


@pytest.mark.parametrize(
    ("chosen", "visible"), [("0, 2", ["0", "2"]), ("GPU-8a9b", ["GPU-8a9b"]), ("", []), ("-1", []), ("1,-1,2", ["1"])]
)
def test_gpus_that_torch_will_not_see_do_not_count(machine, monkeypatch, chosen, visible):
    machine("9.0", "9.0", "9.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert nvidia_smi.visible_gpus() == visible
    assert precision_here() == ("bf16" if visible else "fp32")
