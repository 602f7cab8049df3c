"""``kernels benchmark``: attention with a learned bias, compared with torch's ``scaled_dot_product_attention``."""

import torch
from kernels.benchmark import Benchmark
from torch.nn import functional as F

REACH = 128


class LearnedBiasBenchmark(Benchmark):
    """The forward and backward pass of one layer with 12 heads of size 64, in bf16, on 16 sequences of 1,024 tokens."""

    seed = 0

    def setup(self) -> None:
        """Draw the inputs."""
        shape = (16, 12, 1024, 64)
        self.inputs = [
            torch.randn(shape, device=self.device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
        ]
        self.bias = torch.randn(shape[1], 2 * REACH + 1, device=self.device, requires_grad=True)

    def benchmark_learned_bias(self) -> None:
        """Time the fused kernels."""
        self.out, _ = self.kernel.attention(*self.inputs, self.bias)
        self.out.sum().backward()

    def verify_learned_bias(self) -> torch.Tensor:
        """Return the output of torch's kernels with the bias written out as a matrix."""
        time = self.inputs[0].size(2)
        positions = torch.arange(time, device=self.device)
        distances = (positions[None, :] - positions[:, None]).clamp(-REACH, REACH) + REACH
        mask = self.bias[:, distances].to(torch.bfloat16)
        return F.scaled_dot_product_attention(*self.inputs, attn_mask=mask[None])
