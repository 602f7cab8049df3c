"""What GPUs a machine has and the precision that they train in, by nvidia-smi's of our own."""

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from helpers import false_nvidia_smi

from lazyformer_fairseq.devices import nvidia_smi
from lazyformer_fairseq.devices.nvidia_smi import precision_here, precision_of, precision_on

P100, V100, T4, A100, H100, RTX_5090 = (6, 0), (7, 0), (7, 5), (8, 0), (9, 0), (12, 0)


@pytest.fixture
def machine(tmp_path, monkeypatch) -> Callable:
    """``machine("7.0", "7.0", driver="550.54")``: puts an nvidia-smi of such GPUs first on the PATH."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return lambda *capabilities, **more: false_nvidia_smi(tmp_path, monkeypatch, *capabilities, **more)


@pytest.mark.parametrize(
    ("there", "found", "precision"),
    [
        (["6.0"], [P100], "fp16"),
        (["7.0"] * 8, [V100] * 8, "fp16"),
        (["7.5"], [T4], "fp16"),
        (["8.0"], [A100], "bf16"),
        (["9.0"], [H100], "bf16"),
        (["12.0"], [RTX_5090], "bf16"),
        (["12.0", "7.0"], [RTX_5090, V100], "fp16"),  # the lowest decides
        ([], [], "fp32"),
    ],
)
def test_gpus_and_their_precision(machine, there, found, precision):
    machine(*there)
    assert nvidia_smi.capabilities() == found
    assert nvidia_smi.visible_gpus() == [str(number) for number in range(len(there))]
    assert precision_here() == precision


def test_a_driver_that_cannot_tell(machine):
    machine("7.0", driver="450.80.02", knows_capabilities=False)
    assert (nvidia_smi.count_gpus(), nvidia_smi.capabilities(), nvidia_smi.driver()) == (1, [], 450)
    assert precision_here() == "fp16"


def test_without_nvidia_smi(tmp_path, monkeypatch):
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


def test_a_graphics_processor_of_unknown_capability_gets_fp16():
    assert precision_of([]) == "fp16"


def test_precision_on_the_device_of_a_command(monkeypatch):
    assert precision_on("cpu") == "fp32"
    for capability, precision in ((V100, "fp16"), (T4, "fp16"), ((8, 6), "bf16"), (H100, "bf16")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        assert precision_on("cuda") == precision


def test_scripts_can_ask(machine):
    machine("7.0", "7.0")
    command = [sys.executable, "-m", "lazyformer_fairseq.devices.nvidia_smi"]
    assert subprocess.run(command, capture_output=True, text=True).stdout == "2\n"
