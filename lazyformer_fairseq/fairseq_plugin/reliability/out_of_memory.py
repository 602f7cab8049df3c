"""An error for want of memory ends a run with the numbers and what to change, in place of a traceback or of silence.

If one process trains, fairseq leaves a batch out that did not fit: where none fits, a run goes through its epochs
without an update. Of several processes, the others go on without this one's gradients. On a processor fairseq does not
know the error.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lazyformer_fairseq.devices.precision import precision_on
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.reliability.options import backend_of

# Of torch on a GPU and on a processor (c10/core/impl/alloc_cpu.cpp, on Linux and elsewhere), and of cuBLAS and cuDNN.
SIGNS = ("out of memory", "DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory",
         "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")  # fmt: skip
GIB = 2**30


class OutOfMemoryInTrainingError(UserError, RuntimeError):
    """A RuntimeError too: on any other error in an update fairseq first writes a whole checkpoint, crash.pt."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, in torch or in a library that it calls."""
    return isinstance(error, torch.OutOfMemoryError) or any(sign in str(error) for sign in SIGNS)


@contextmanager
def refused_in_words(words: Callable[[BaseException], str]) -> Iterator[None]:
    """Around an update, or a batch of validation; `words` are :func:`in_training` or :func:`in_validation`.

    Raises:
        OutOfMemoryInTrainingError: it did not fit.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, OutOfMemoryInTrainingError) or not is_out_of_memory(error):
            raise
        raise OutOfMemoryInTrainingError(words(error)) from error


def in_training(trainer: Any, samples: list[Any], error: BaseException) -> str:
    """What an update met, and which options make it fit."""
    advice = [_smaller_batches(trainer.cfg)]
    if backend_of(trainer.cfg.model) not in ("", "recompute", "fused"):
        advice.append("--attention-backend recompute keeps no distributions")
    if not (trainer.cfg.common.fp16 or trainer.cfg.common.bf16):
        precision = precision_on("cuda") if trainer.cuda else "bf16"
        advice.append(f"--{precision} halves activations")
    advice.append("`lazyformer plan` counts what fits")
    where = f"update {trainer.get_num_updates() + 1}: batches of {_sizes(samples)}"
    return f"out of memory in {where}. {_memory(trainer, error)}. {_KEPT} To fit: {'; '.join(advice)}"


def in_validation(trainer: Any, sample: Any, error: BaseException) -> str:
    """The same for a batch of validation."""
    dataset = trainer.cfg.dataset
    option, given = "--batch-size-valid", dataset.batch_size_valid
    if not given and dataset.max_tokens_valid:
        option, given = "--max-tokens-valid", dataset.max_tokens_valid
    smaller = f"give {option} {max(1, given // 2)} or less" if given else f"give {option}"
    where = f"validation after update {trainer.get_num_updates()}: a batch of {_sizes([sample])}"
    return f"out of memory in {where}. {_memory(trainer, error)}. {_KEPT} To fit: {smaller}"


def _sizes(samples: list[Any]) -> str:
    """As "16 x 512 and 3 x 512 tokens", each size once, the largest first."""
    inputs = [sample.get("net_input", {}).get("src_tokens") for sample in samples if isinstance(sample, dict)]
    found = {tuple(tokens.shape) for tokens in inputs if tokens is not None and tokens.dim() == 2}
    ordered = sorted(found, key=lambda shape: -shape[0] * shape[1])
    return f"{' and '.join(f'{rows:,} x {time:,}' for rows, time in ordered)} tokens" if ordered else "unknown size"


def _memory(trainer: Any, error: BaseException) -> str:
    """What was asked for, and what there is."""
    weights = sum(weight.numel() for weight in trainer.model.parameters())
    parts = [f"{weights:,} parameters"]
    if asked := re.search(r"[Tt]ried to allocate ([\d.]+ \w+)", str(error)):
        number, unit = asked[1].split()
        parts.append(f"{int(number) / GIB:.2f} GiB were asked for" if unit == "bytes" else f"{asked[1]} were asked for")
    if trainer.cuda:
        there = torch.cuda.get_device_properties(trainer.device).total_memory
        held, reserved = torch.cuda.max_memory_allocated(trainer.device), torch.cuda.memory_reserved(trainer.device)
        parts.append(
            f"tensors took {held / GIB:.2f} GiB at most, torch has reserved {reserved / GIB:.2f} of the GPU's "
            f"{there / GIB:.2f} GiB"
        )
    return "; ".join(parts)


def _smaller_batches(cfg: Any) -> str:
    """Half of the batch, and the update as large as before."""
    batch, tokens = cfg.dataset.batch_size, cfg.dataset.max_tokens
    if batch == 1:
        return "--tokens-per-sample, fewer than now: a batch is one sequence"
    given = f"--max-tokens {tokens // 2}" if tokens and not batch else f"--batch-size {(batch or 2) // 2}"
    if not cfg.task.get("sequences_per_update"):
        given += f" --update-freq {','.join(str(2 * each) for each in cfg.optimization.update_freq)}"
    return f"{given} (an update stays as large)"


_KEPT = "Nothing is saved now; what was saved before is whole, and a rerun resumes from it."
