"""What a benchmark measures of a model: an update, the encoder alone in training, and inference."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lazyformer_fairseq.measure.bench.models.contenders import Contender, random_batch, random_tokens
from lazyformer_fairseq.modules.compiled import compiled

# By name: a description, and whether it trains.
WORKLOADS = {
    "training": ("training step: forward, masked-LM loss, backward, AdamW", True),
    "encoder": ("encoder alone: forward and backward", True),
    "inference": ("encoder alone: inference", False),
}


@dataclass(frozen=True)
class Cell:
    """The conditions at which all models take turns; workload and precision are keys of the tables."""

    workload: str
    precision: str
    time: int
    batch: int

    def __str__(self) -> str:
        return f"{self.workload}, n = {self.time}, batch {self.batch}, {self.precision}"


class Update:
    """Forward, cross-entropy at 15% of the positions, backward, and a step of torch's fused AdamW.

    In half precision the optimizer updates weights in single precision and copies them back, as fairseq does. fp16
    scales its loss by a constant: overflowing gradients do not change the time.
    """

    LOSS_SCALE = 128.0

    def __init__(self, contender: Contender, batch: int, time: int):
        self.contender = contender
        self.weights = [weight for weight in contender.model.parameters() if weight.requires_grad]
        device, dtype = self.weights[0].device, self.weights[0].dtype
        self.masters = self.weights if dtype == torch.float32 else [_master(weight) for weight in self.weights]
        # A tiny rate: the time must not depend on how far a model has learned random tokens.
        self.optimizer = torch.optim.AdamW(self.masters, lr=1e-9, fused=True)
        self.scale = self.LOSS_SCALE if dtype == torch.float16 else 1.0
        self.batch = random_batch(batch, time, device)

    def __call__(self) -> None:
        self.contender.model.train()
        logits = self.contender.masked_logits(self.batch)
        loss = (compiled(_loss) if self.contender.compiles else _loss)(logits, self.batch.targets_M)
        (loss * self.scale).backward()
        self._step()

    @torch.no_grad()
    def _step(self) -> None:
        trained = [(weight, master) for weight, master in zip(self.weights, self.masters, strict=True)
                   if weight.grad is not None]  # fmt: skip
        if self.masters is not self.weights:
            for weight, master in trained:
                master.grad = weight.grad.float().div_(self.scale)
        self.optimizer.step()
        if self.masters is not self.weights:
            torch._foreach_copy_([weight for weight, _ in trained], [master for _, master in trained])
        for weight, master in trained:
            weight.grad = master.grad = None

    def held_bytes(self) -> int:
        """Bytes of weights and of all that the optimizer keeps between updates."""
        kept = {id(tensor): tensor for tensor in [*self.weights, *self.masters]}
        states = (value for state in self.optimizer.state.values() for value in state.values())
        return bytes_of([*kept.values(), *(value for value in states if isinstance(value, Tensor))])


def encoder_training(contender: Contender, batch: int, time: int) -> Callable[[], None]:
    """Forward and backward of the encoder, from a given gradient."""
    weight = next(contender.model.parameters())
    tokens_BT = random_tokens(batch, time, weight.device)
    gradient_BTC = torch.randn(batch, time, contender.sizes.embed_dim, device=weight.device, dtype=weight.dtype)

    def forward_and_backward() -> None:
        contender.model.train()
        contender.features(tokens_BT).backward(gradient_BTC)
        contender.model.zero_grad(set_to_none=True)

    return forward_and_backward


def inference(contender: Contender, batch: int, time: int) -> Callable[[], Tensor]:
    """Features of a batch."""
    tokens_BT = random_tokens(batch, time, next(contender.model.parameters()).device)

    @torch.inference_mode()
    def encode() -> Tensor:
        contender.model.eval()
        return contender.features(tokens_BT)

    return encode


def bytes_of(tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _loss(logits_MV: Tensor, targets_M: Tensor) -> Tensor:
    return F.cross_entropy(logits_MV.float(), targets_M)


def _master(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight.detach().float())
