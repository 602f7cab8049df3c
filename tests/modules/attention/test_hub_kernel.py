"""The kernels as a folder for Hugging Face's `kernels`, loaded without this package, in Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT

pytest.importorskip("triton", reason="Triton is not installed")

LOADERS = {
    "kernels": """
from kernels import get_local_kernel

kernel = get_local_kernel(Path(sys.argv[1]))
""",
    # As `kernels` does it, where that library is not installed.
    "importlib": """
import importlib.util

path = Path(sys.argv[1]) / "build/torch-universal/__init__.py"
spec = importlib.util.spec_from_file_location("lazy_attention_1", path)
kernel = importlib.util.module_from_spec(spec)
sys.modules["lazy_attention_1"] = kernel
spec.loader.exec_module(kernel)
""",
}
CHECK = """
import sys
from pathlib import Path

import torch

sys.modules["lazyformer_fairseq"] = None  # from here on, importing the package is an error
{load}
torch.manual_seed(0)
B, N, T, D, R = 2, 2, 40, 16, 5
q, k, v, v_above = (torch.randn(B, N, T, D, requires_grad=True) for _ in range(4))
bias = torch.randn(N, 2 * R + 1, requires_grad=True)
lengths = torch.tensor([T, T - 7])
inputs = [q, k, v, v_above, bias]

output, shared = kernel.attention(q, k, v, bias, lengths, consumers=1)
outputs = [output, shared.attend(v_above, dropout=0.0)]

positions = torch.arange(T)
distances = (positions[None, :] - positions[:, None]).clamp(-R, R) + R
scores = q @ k.transpose(-1, -2) / D**0.5 + bias[:, distances]
is_padding = positions >= lengths[:, None]
P = scores.masked_fill(is_padding[:, None, None], float("-inf")).softmax(-1)
expected = [P @ v, P @ v_above]

gradients = [torch.randn(B, N, T, D) * ~is_padding[:, None, :, None] for _ in outputs]
found = outputs + list(torch.autograd.grad(outputs, inputs, gradients))
wanted = expected + list(torch.autograd.grad(expected, inputs, gradients))
for ours, theirs in zip(found, wanted, strict=True):
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)

for wrong in ((q, k[:, :1], v), (q.double(), k.double(), v.double()), (q, k, v, bias[:1]), (q, k, v, bias[:, 1:])):
    try:
        kernel.attention(*wrong)
    except ValueError:
        continue
    raise AssertionError("accepted")
print("equal")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("hub") / "lazy_attention"
    subprocess.run([sys.executable, str(ROOT / "scripts/hub_kernel/build.py"), str(out)], check=True)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("loader", LOADERS)
def test_outputs_and_gradients_equal_a_dense_computation(folder, loader, tmp_path):
    if loader == "kernels":
        pytest.importorskip("kernels", reason="`pip install kernels` runs this test with the library itself")
    done = subprocess.run(
        [sys.executable, "-c", CHECK.format(load=LOADERS[loader]), str(folder)],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "equal\n", done.stderr[-4000:]
