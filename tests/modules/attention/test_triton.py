"""The Triton kernels, in Triton's interpreter and in its compiler; ``test_on_gpu.py`` has the rest."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed")


def run_alone(script: str, *options: str, **environment: str) -> str:
    """Runs pytest on a file beside this one in a process of its own: what it sets up holds for a whole process."""
    command = [sys.executable, "-m", "pytest", "--noconftest", "-p", "no:cacheprovider", "-n0"]
    done = subprocess.run(
        [*command, *options, str(Path(__file__).with_name(script))],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_kernels_in_the_interpreter():
    """Before Triton 3.7 the interpreter cannot read a number with the numpy that we require."""
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7):
        pytest.skip(f"the interpreter of Triton {triton.__version__} does not know this numpy")
    assert " passed" in run_alone("triton_in_interpreter.py", TRITON_INTERPRET="1")


@pytest.fixture
def compiler() -> None:
    """Skips a test where Triton cannot compile for NVIDIA's GPUs."""
    if not (Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas").exists():
        pytest.skip("this Triton has no compiler for NVIDIA's GPUs")


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("tests", ["front_end", pytest.param("fits or without_a_bias", marks=pytest.mark.slow)])
def test_kernels_compile_for_gpus(tests, tmp_path):
    """With a cache of its own: what is there already is not compiled."""
    environment = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    assert " passed" in run_alone("triton_in_compiler.py", "-k", tests, **environment)
