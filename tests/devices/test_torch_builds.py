"""Which torch has kernels for which GPUs, and which one a machine gets."""

import re
import subprocess
from collections.abc import Callable

import pytest
import torch
from fairseq import options
from fairseq.dataclass.initialize import add_defaults
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from helpers import ROOT, false_nvidia_smi
from hypothesis import strategies as st
from packaging.version import Version

from lazyformer_fairseq import USER_DIR
from lazyformer_fairseq.devices.torch_builds import (
    BUILDS,
    can_run,
    has_kernels,
    misfit_of_torch,
    newest_for,
    refuse_unfit_torch,
)
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.measure.costs.machine import device_named

P100, GTX_1080, V100, T4, A100, L4, H100, B200, RTX_5090 = (
    *((6, 0), (6, 1), (7, 0), (7, 5), (8, 0)),
    *((8, 9), (9, 0), (10, 0), (12, 0)),
)
CAPABILITIES = st.sampled_from([(3, 5), (5, 2), P100, GTX_1080, V100, T4, A100, L4, H100, B200, (10, 3), RTX_5090])


@pytest.mark.parametrize(
    ("there", "driver", "version"),
    [
        ([P100], 580, "2.7.1"),
        ([GTX_1080], 580, "2.7.1"),
        ([V100] * 8, 580, "2.10.0"),
        ([V100] * 8, 535, "2.10.0"),
        ([T4], 580, "2.13.0"),
        ([A100], 580, "2.13.0"),
        ([A100], None, "2.13.0"),
        ([A100], 570, "2.10.0"),  # CUDA 13 needs 580
        ([H100], 580, "2.13.0"),
        ([RTX_5090], 580, "2.13.0"),
        ([RTX_5090, V100], 580, "2.10.0"),
        ([A100, P100], 580, "2.7.1"),
        ([RTX_5090, RTX_5090, P100], 580, "2.13.0"),  # no build has both: most of them count
        ([], 580, "2.13.0"),
        ([], 550, "2.10.0"),
        ([(3, 5)], 470, None),
        ([(3, 5)], 580, None),
        ([A100], 470, None),
    ],
)
def test_the_newest_that_the_gpus_and_the_driver_run(there, driver, version):
    found = newest_for(there, driver)
    assert (found and found.version) == version


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
        ((10, 3), "sm_100", True),
        ((9, 0), "sm_90a", True),
        ((10, 3), "sm_100a", False),
        ((8, 0), "", False),
    ],
)
def test_binaries_and_what_the_driver_compiles(capability, architectures, runs):
    assert has_kernels(capability, architectures.split()) is runs


def test_the_table_is_in_order():
    versions = [Version(build.version) for build in BUILDS]
    assert versions == sorted(versions, reverse=True) and versions[-1] == Version("2.6.0")
    assert [can_run(550, build.cuda) for build in BUILDS] == [False] * 3 + [True] * 5


@pytest.mark.skipif(torch.version.cuda is None, reason="this torch is a build without CUDA")
def test_the_table_has_what_this_torch_says_of_itself():
    own = Version(torch.__version__)
    row = next((build for build in BUILDS if Version(build.version).release[:2] == own.release[:2]), None)
    if row is None or (own.local or "") not in ("", f"cu{row.cuda.replace('.', '')}"):
        pytest.skip(f"torch {own} is not one of PyPI's that the table has")
    assert (torch.version.cuda, tuple(torch._C._cuda_getArchFlags().split())) == (row.cuda, row.architectures)


def test_the_page_has_what_is_chosen():
    page = (ROOT / "docs" / "training.md").read_text()
    rows = re.findall(r"^\| [^|]+ \| ([\d., ]+) \| torch ([\d.]+) \| torch ([\d.]+) \|$", page, re.MULTILINE)
    assert len(rows) == 7
    for listed, *versions in rows:
        for text in listed.split(", "):
            there = [tuple(map(int, text.split(".")))]
            assert [newest_for(there, driver).version for driver in (580, 579)] == versions
            assert newest_for(there, 525).version == versions[1]


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
    command = [warm_python / "python", "-m", "lazyformer_fairseq.devices.torch_builds"]
    assert re.match(r"torch \S+ (is|has) ", subprocess.run(command, capture_output=True, text=True).stdout)
