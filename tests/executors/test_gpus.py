"""What GPUs a machine has, the precision that they train in, and which torch has kernels for them."""

import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import pytest
import torch
from fairseq import options
from fairseq.dataclass.initialize import add_defaults
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from helpers import ROOT, false_nvidia_smi
from packaging.version import Version

from lazyformer_fairseq import USER_DIR
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation.costs.machine import device_named
from lazyformer_fairseq.executors import nvidia_smi, torch_builds
from lazyformer_fairseq.executors.nvidia_smi import precision_here, precision_of, precision_on
from lazyformer_fairseq.executors.torch_builds import BUILDS, newest_for, torch_incompatibility


def read(capabilities: str) -> list[tuple[int, ...]]:
    return [tuple(map(int, each.split("."))) for each in re.split("[, ]+", capabilities) if each]


# NVIDIA's guide: "cubin generated for compute capability X.y executes on X.z with z >= y"; PTX on all later ones.
@pytest.mark.parametrize(
    ("capability", "architectures", "runs"),
    [
        ((8, 9), "sm_80 sm_90", True),
        ((8, 0), "sm_86", False),
        ((9, 0), "sm_80", False),
        ((9, 0), "sm_80 compute_80", True),
        ((7, 0), "sm_75 compute_75", False),
        ((12, 1), "sm_120", True),
        ((9, 0), "sm_90a", True),
        ((10, 3), "sm_100a", False),
        ((8, 0), "", False),
    ],
)
def test_binaries_and_what_the_driver_compiles(capability, architectures, runs):
    assert torch_builds.has_kernels(capability, architectures.split()) is runs


def test_the_table_is_in_order_and_the_page_has_what_is_chosen_of_it():
    versions = [Version(build.version) for build in BUILDS]
    assert versions == sorted(versions, reverse=True) and versions[-1] == Version("2.6.0")
    assert [torch_builds.can_run(550, build.cuda) for build in BUILDS] == [False] * 3 + [True] * 5
    page = (ROOT / "docs" / "training.md").read_text()
    rows = re.findall(r"^\| [^|]+ \| ([\d., ]+) \| torch ([\d.]+) \| torch ([\d.]+) \|$", page, re.MULTILINE)
    assert len(rows) == 3 and sum(len(read(listed)) for listed, *_ in rows) == 12
    for listed, *chosen in rows:
        for capability in read(listed):
            assert [newest_for([capability], driver).version for driver in (580, 579)] == chosen
            assert newest_for([capability], 525).version == chosen[1]


@pytest.mark.skipif(torch.version.cuda is None, reason="this torch is a build without CUDA")
def test_the_table_has_what_this_torch_says_of_itself():
    own = Version(torch.__version__)
    row = next((build for build in BUILDS if Version(build.version).release[:2] == own.release[:2]), None)
    if row is None or (own.local or "") not in ("", f"cu{row.cuda.replace('.', '')}"):
        pytest.skip(f"torch {own} is not one of PyPI's that the table has")
    assert (torch.version.cuda, tuple(torch._C._cuda_getArchFlags().split())) == (row.cuda, row.architectures)


TORCH_2_13 = ("13.0", "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120")
TORCH_2_10 = ("12.8", "sm_70 sm_75 sm_80 sm_86 sm_90 sm_100 sm_120")
WITHOUT_CUDA = (None, "")


@pytest.fixture
def gpus(tmp_path, monkeypatch) -> Callable:
    """``gpus("7.0", "7.0", driver="550.54")``: puts an nvidia-smi of such GPUs first on the PATH."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return partial(false_nvidia_smi, tmp_path, monkeypatch)


@pytest.fixture
def machine(gpus, monkeypatch) -> Callable:
    """``machine(TORCH_2_13, "7.0", driver="550.54")``: such a torch on a machine with such GPUs."""

    def make(built: tuple, capabilities: str, **more) -> None:
        cuda, architectures = built
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch._C, "_cuda_getArchFlags", lambda: architectures, raising=False)
        gpus(*capabilities.split(), **more)

    return make


@pytest.mark.parametrize(
    ("there", "precision"),
    [
        (["6.0"], "fp16"),
        (["7.0"] * 8, "fp16"),
        (["8.0"], "bf16"),
        (["12.0", "7.0"], "fp16"),  # the lowest decides
        ([], "fp32"),
    ],
)
def test_gpus_and_their_precision(gpus, monkeypatch, there, precision):
    gpus(*there)
    assert nvidia_smi.capabilities() == [tuple(map(int, each.split("."))) for each in there]
    assert nvidia_smi.visible_gpus() == [str(number) for number in range(len(there))]
    assert precision_here() == precision
    command = [sys.executable, "-m", "lazyformer_fairseq.executors.nvidia_smi"]
    assert subprocess.run(command, capture_output=True, text=True).stdout == f"{len(there)}\n", "scripts can ask"
    if there:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: nvidia_smi.capabilities()[-1])
        assert (precision_on("cpu"), precision_on("cuda")) == ("fp32", precision)


def test_what_cannot_tell(gpus, tmp_path, monkeypatch):
    gpus("7.0", driver="450.80.02", knows_capabilities=False)
    assert (nvidia_smi.count_gpus(), nvidia_smi.capabilities(), nvidia_smi.driver()) == (1, [], 450)
    assert precision_here() == precision_of([]) == "fp16"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert (nvidia_smi.visible_gpus(), nvidia_smi.capabilities(), nvidia_smi.driver()) == ([], [], None)


@pytest.mark.parametrize(
    ("chosen", "visible"), [("0, 2", ["0", "2"]), ("GPU-8a9b", ["GPU-8a9b"]), ("", []), ("-1", []), ("1,-1,2", ["1"])]
)
def test_gpus_that_torch_will_not_see_do_not_count(gpus, monkeypatch, chosen, visible):
    gpus("9.0", "9.0", "9.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert nvidia_smi.visible_gpus() == visible
    assert precision_here() == ("bf16" if visible else "fp32")


@pytest.mark.parametrize(
    ("built", "there", "driver", "words"),
    [
        (TORCH_2_13, "7.0 7.0", "580.65", r"no kernels for GPUs .* 7\.0, only for sm_75 .* torch===2\.10\.0, the"),
        (TORCH_2_13, "6.0", "580.65", r"compute capability 6\.0, .* pip install torch===2\.7\.1, the newest"),
        (
            TORCH_2_10,
            "3.5",
            "470.82",
            r"requires NVIDIA driver 525 or later, but this machine has 470: update the driver",
        ),
        (TORCH_2_10, "3.5", "535.10", r"compute capability 3\.5, .* no build of torch 2\.6 or later can use them"),
        (TORCH_2_13, "8.0", "550.54", r"CUDA 13\.0, which requires NVIDIA driver 580 .* torch===2\.10\.0"),
        (WITHOUT_CUDA, "9.0 9.0", "580.65", r"a build without CUDA, .* 2 GPU\(s\): pip install torch===2\.13\.0"),
        (TORCH_2_13, "7.0 6.0", "580.65", r"6\.0 and 7\.0, .* torch===2\.7\.1"),
    ],
)
def test_a_misfit_is_named_with_the_remedy(machine, built, there, driver, words):
    machine(built, there, driver=driver)
    assert re.search(words, torch_incompatibility())
    with pytest.raises(UserError, match="set CUDA_VISIBLE_DEVICES to an empty value"):
        torch_builds.refuse_unfit_torch()


def test_a_torch_that_fits_is_let_through(machine):
    for built, there, processes in (
        *((TORCH_2_13, "7.5", 1), (TORCH_2_13, "8.9", 1), (TORCH_2_10, "7.0 " * 8, 8)),
        (TORCH_2_13, "9.0 6.1", 1),  # one process, and one GPU that it may use
        *((TORCH_2_13, "", 4), (WITHOUT_CUDA, "", 4)),
    ):
        machine(built, there)
        assert torch_incompatibility(processes) is None, (built, there)
    machine(TORCH_2_10, "7.0", driver="530.1", knows_capabilities=False)
    assert torch_incompatibility() is None, "a driver that does not tell is believed"


# --- who asks


def test_fairseq_train_does_not_begin(machine):
    machine(TORCH_2_13, "7.0")
    task = "full_sentences_masked_lm --arch lazyformer_m2x6_s_tiny --criterion masked_lm_accuracy"
    command = f"data --user-dir {USER_DIR} --task {task} --optimizer adam --lr 1 --batch-size 4".split()
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
    assert "the CPU is used: torch" in caplog.text
    with pytest.raises(UserError, match=r"torch finds no GPU here: .* without CUDA"):
        device_named("cuda")


def test_a_launch_does_not_begin_and_set_up_can_ask(machine, tmp_path, warm_python):
    machine(TORCH_2_13, "3.5")  # no torch has kernels for it, whichever is installed
    (tmp_path / "dict.txt").touch()
    command = [warm_python / "python", "-m", "lazyformer_fairseq.cli", "pretrain", "bert_tiny", str(tmp_path)]
    launched = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert launched.returncode == 1 and "Traceback" not in launched.stderr
    assert re.search(r"error: torch \S+ (is a build without CUDA|has no kernels).* no build of torch ", launched.stderr)
    asked = subprocess.run([*command[:2], "lazyformer_fairseq.executors.torch_builds"], capture_output=True, text=True)
    assert re.match(r"torch \S+ (is|has) ", asked.stdout)
