"""Which torch has kernels for which GPUs, and which one a machine gets."""

import re

import pytest
import torch
from helpers import ROOT
from hypothesis import strategies as st
from packaging.version import Version

from lazyformer_fairseq.devices.torch_builds import BUILDS, can_run, has_kernels, newest_for

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
