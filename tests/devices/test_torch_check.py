"""A torch that cannot use the GPUs is named before anything trains."""

import re
import subprocess
from collections.abc import Callable

import pytest
import torch
from fairseq import options
from fairseq.dataclass.initialize import add_defaults
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from helpers import false_nvidia_smi

from lazyformer_fairseq import USER_DIR
from lazyformer_fairseq.devices.torch_check import misfit_of_torch, refuse_unfit_torch
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.measure.costs.machine import device_named

TORCH_2_13 = ("13.0", "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120")
TORCH_2_10 = ("12.8", "sm_70 sm_75 sm_80 sm_86 sm_90 sm_100 sm_120")
WITHOUT_CUDA = (None, "")


@pytest.fixture
def machine(tmp_path, monkeypatch) -> Callable:
    """``machine(TORCH_2_13, "7.0", driver="550.54")``: such a torch on a machine with such GPUs."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def make(built: tuple, *capabilities: str, **more) -> None:
        cuda, architectures = built
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch._C, "_cuda_getArchFlags", lambda: architectures, raising=False)
        false_nvidia_smi(tmp_path, monkeypatch, *capabilities, **more)

    return make


@pytest.mark.parametrize(
    ("built", "there", "driver", "words"),
    [
        (
            TORCH_2_13,
            ["7.0"] * 8,
            "580.65.06",
            r"no kernels for GPUs of compute capability 7\.0, but for sm_75 .* pip install torch===2\.10\.0, the",
        ),
        (TORCH_2_13, ["6.0"], "580.65.06", r"compute capability 6\.0, .* pip install torch===2\.7\.1, the newest"),
        (TORCH_2_10, ["6.1"], "580.65.06", r"compute capability 6\.1, .* pip install torch===2\.7\.1, the newest"),
        (TORCH_2_10, ["3.5"], "470.82", r"needs NVIDIA's driver from 525 on, and here is 470: update the driver, or"),
        (TORCH_2_10, ["3.5"], "535.10", r"compute capability 3\.5, .* no torch from 2\.6 on can use them"),
        (TORCH_2_13, ["8.0"], "550.54", r"CUDA 13\.0, which needs NVIDIA's driver from 580 .* torch===2\.10\.0"),
        (WITHOUT_CUDA, ["9.0"] * 2, "580.65.06", r"a build without CUDA, .* 2 GPU\(s\): pip install torch===2\.13\.0"),
        (TORCH_2_13, ["7.0", "6.0"], "580.65.06", r"6\.0 and 7\.0, .* torch===2\.7\.1"),
    ],
)
def test_a_misfit_is_named_with_the_remedy(machine, built, there, driver, words):
    machine(built, *there, driver=driver)
    assert re.search(words, misfit_of_torch())
    with pytest.raises(UserError, match="set CUDA_VISIBLE_DEVICES to nothing"):
        refuse_unfit_torch()


@pytest.mark.parametrize(
    ("built", "there", "processes"),
    [
        (TORCH_2_13, ["7.5"], 1),
        (TORCH_2_13, ["8.9"], 1),
        (TORCH_2_10, ["7.0"] * 8, 8),
        (TORCH_2_13, ["9.0", "6.1"], 1),  # one process, and one GPU that it may use
        (TORCH_2_13, [], 4),
        (WITHOUT_CUDA, [], 4),
    ],
)
def test_a_torch_that_fits_is_let_through(machine, built, there, processes):
    machine(built, *there)
    assert misfit_of_torch(processes) is None


def test_a_driver_that_does_not_tell_is_believed(machine):
    machine(TORCH_2_10, "7.0", driver="530.1", knows_capabilities=False)
    assert misfit_of_torch() is None


# --- who asks


@pytest.mark.parametrize(
    ("task", "rest"),
    [
        ("full_sentences_masked_lm", "--arch lazyformer_m2x6_s_tiny --criterion masked_lm_accuracy"),
        ("glue", "--arch lazyformer_m2x6_s_tiny --criterion glue"),
        ("stream_language_modeling", "--arch lazyformer_lm --sublayer-pattern (sf)x2 --criterion causal_lm"),
    ],
)
def test_fairseq_train_does_not_begin(machine, task, rest):
    machine(TORCH_2_13, "7.0")
    command = f"data --user-dir {USER_DIR} --task {task} {rest} --optimizer adam --lr 1 --batch-size 4".split()
    with pytest.raises(UserError, match=r"torch===2\.10\.0"):
        options.parse_args_and_arch(options.get_training_parser(), command)
    on_cpu = options.parse_args_and_arch(options.get_training_parser(), [*command, "--cpu"])
    cfg = convert_namespace_to_omegaconf(on_cpu)
    cfg.common.cpu = False
    with pytest.raises(UserError, match=r"torch===2\.10\.0"):  # hydra, and the processes that fairseq starts
        add_defaults(cfg)


def test_commands_with_a_device(machine, monkeypatch, caplog):
    machine(TORCH_2_13, "7.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert device_named("cpu") == "cpu"
    for name in (None, "auto", "cuda"):
        with pytest.raises(UserError, match=r"torch===2\.10\.0"):
            device_named(name)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_named("auto") == "cpu"
    assert "the processor is used: torch" in caplog.text
    with pytest.raises(UserError, match=r"torch finds no GPU here: .* without CUDA"):
        device_named("cuda")


def test_a_launch_does_not_begin(machine, tmp_path, warm_python):
    machine(TORCH_2_13, "3.5")  # no torch has kernels for it, whichever is installed
    command = [warm_python / "python", "-m", "lazyformer_fairseq.cli", "pretrain", "bert_tiny", str(tmp_path)]
    launched = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert launched.returncode == 1 and "Traceback" not in launched.stderr
    assert re.search(r"error: torch \S+ (is a build without CUDA|has no kernels).* no torch from 2\.6", launched.stderr)


def test_set_up_can_ask(machine, warm_python):
    machine(TORCH_2_13, "3.5")
    command = [warm_python / "python", "-m", "lazyformer_fairseq.devices.torch_check"]
    assert re.match(r"torch \S+ (is|has) ", subprocess.run(command, capture_output=True, text=True).stdout)
