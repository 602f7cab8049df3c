"""Random inputs of an attention whose bias by distance learns; a lazy block's kernels as plain functions."""

from types import SimpleNamespace

import torch

from lazyformer_fairseq.modules.attention import attend
from lazyformer_fairseq.modules.attention.lazy_block import Implementation
from lazyformer_fairseq.modules.attention.scores import Scores
from lazyformer_fairseq.modules.networks.encoder import RelativePositionBias


class BiasedAttention:
    """With the gradients of all inputs."""

    def __init__(self, batch, heads, time, size, padded, seed=1, device="cpu", dtype=torch.double):
        torch.manual_seed(seed)
        like = {"device": device, "dtype": dtype, "requires_grad": True}
        self.q, self.k, self.v = (torch.randn(batch, heads, time, size, **like) for _ in range(3))
        self.table = torch.randn(8, heads, **like)
        self.weight = torch.randn(batch, heads, time, size, device=device, dtype=dtype)
        relative = RelativePositionBias(heads, 8, 6).to(device)(time)
        lengths = torch.randint(1, time + 1, (batch,), device=device) if padded else None
        self.scores = Scores(self.table, relative.bucket_by_distance, relative.far, lengths)

    def dense(self) -> torch.Tensor:
        self.scores._written.clear()  # what sublayers of one pass share
        return self.scores.dense(self.q.size(-2), self.k.size(-2), self.q)

    def with_gradients(self, *outputs: torch.Tensor) -> list[torch.Tensor]:
        loss = sum((output * self.weight).sum() for output in outputs)
        return [*outputs, *torch.autograd.grad(loss, [self.q, self.k, self.v, self.table])]

    def by(self, back_end: str, dropout: float = 0.0) -> list[torch.Tensor]:
        self.scores._written.clear()
        output, reusable = attend(self.q, self.k, self.v, self.scores, dropout, 1, back_end)
        return self.with_gradients(output, reusable.attend(self.v, dropout))


def as_plain_functions(implementation: Implementation) -> SimpleNamespace:
    """In place of operators: torch's counter of FLOPs then sees each product."""

    def plain(name: str):
        function = getattr(implementation, name)
        return lambda *given: function(*given[:-1], given[-1].scores())

    names = ("attend_forward", "reuse_forward", "value_gradient", "block_gradient")
    return SimpleNamespace(**{name: plain(name) for name in names})
