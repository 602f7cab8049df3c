"""Out-of-memory handling: the run ends with a message that lists the sizes and the options to change.

In a single process, stock fairseq skips batches that do not fit; if none fits, the run goes through its epochs without
an update. With several processes, the others continue without the gradients of the one that ran out of memory. On a
CPU, stock fairseq does not recognize the error.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch

from lazyformer_fairseq.evaluation.costs.flops import attention_calls
from lazyformer_fairseq.evaluation.planning.fit import RECOMPUTING, computes_all
from lazyformer_fairseq.executors.nvidia_smi import precision_on
from lazyformer_fairseq.modules.networks.stack import Stack
from lazyformer_fairseq.storage.checkpoint_file import first_line
from lazyformer_fairseq.training.out_of_memory import GIB, OutOfMemoryInTrainingError, is_out_of_memory

KEPT = "Nothing was saved now; earlier checkpoints are intact, and a rerun resumes from the last one."


@contextmanager
def explained(explain: Callable[[BaseException], str]) -> Iterator[None]:
    """Convert a failed memory allocation within a ``with`` block to an error that explains it.

    Args:
        explain: converts the error to a message; :func:`before_training`, :func:`in_training` or
            :func:`in_validation` with its other arguments bound.

    Raises:
        OutOfMemoryInTrainingError: an allocation failed.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemoryInTrainingError(explain(error)) from error


def before_training(model: torch.nn.Module, error: BaseException) -> str:
    """Explain running out of memory while moving weights, building the optimizer or loading a checkpoint."""
    weights = sum(weight.numel() for weight in model.parameters())
    advice = "choose a smaller model, or more GPUs with --zero-sharding os; `lazyformer plan` computes what fits"
    return f"out of memory before the first update: {weights:,} parameters; {first_line(error)}. Remedy: {advice}"


def in_training(trainer: Any, samples: list[Any], error: BaseException) -> str:
    """Explain running out of memory in an update, and suggest options that reduce memory use."""
    advice = [smaller_batches(trainer.cfg)]
    if would_recompute_help(trainer.get_model()):
        advice.append("--attention-backend recompute, which stores no attention distributions")
    if not (trainer.cfg.common.fp16 or trainer.cfg.common.bf16):
        precision = "bf16"
        if trainer.cuda:
            precision = precision_on("cuda")
        advice.append(f"--{precision}, which halves activation memory")
    advice.append("`lazyformer plan` computes what fits")
    where = f"update {trainer.get_num_updates() + 1}: batches of {describe_sizes(samples)}"
    return f"out of memory in {where}. {describe_memory(trainer, error)}. {KEPT} Remedies: {'; '.join(advice)}"


def in_validation(trainer: Any, sample: Any, error: BaseException) -> str:
    """Explain running out of memory in a validation batch."""
    dataset = trainer.cfg.dataset
    option = "--batch-size-valid"
    given = dataset.batch_size_valid
    if not given and dataset.max_tokens_valid:
        option = "--max-tokens-valid"
        given = dataset.max_tokens_valid
    smaller = f"set {option}"
    if given:
        smaller += f" {max(1, given // 2)} or less"
    where = f"validation after update {trainer.get_num_updates()}: a batch of {describe_sizes([sample])}"
    return f"out of memory in {where}. {describe_memory(trainer, error)}. {KEPT} Remedy: {smaller}"


def would_recompute_help(model: torch.nn.Module) -> bool:
    """Return whether the model stores attention distributions that the ``recompute`` back end would not store."""
    stacks = [module for module in model.modules() if isinstance(module, Stack)]
    for stack in stacks:
        makers = (each for each in stack.plan if each.kind.computes_scores)
        calls = chain.from_iterable(attention_calls(maker, stack.sizes, time=1) for maker in makers)
        if not computes_all(RECOMPUTING, calls, "cpu"):
            return False
    return any(stack.attention_backend not in ("recompute", "fused") for stack in stacks)


def describe_sizes(samples: list[Any]) -> str:
    """Describe the distinct batch sizes, largest first, such as "16 x 512 and 3 x 512 tokens"."""
    shapes = set()
    for sample in samples:
        if not isinstance(sample, dict):
            continue
        tokens = sample.get("net_input", {}).get("src_tokens")
        if tokens is not None and tokens.dim() == 2:
            shapes.add(tuple(tokens.shape))
    if not shapes:
        return "unknown size"
    ordered = sorted(shapes, key=lambda shape: -shape[0] * shape[1])
    return f"{' and '.join(f'{rows:,} x {time:,}' for rows, time in ordered)} tokens"


def describe_memory(trainer: Any, error: BaseException) -> str:
    """Describe the number of parameters, the requested memory and, on a GPU, the memory in use."""
    weights = sum(weight.numel() for weight in trainer.model.parameters())
    parts = [f"{weights:,} parameters"]
    if asked := re.search(r"[Tt]ried to allocate ([\d.]+) (\w+)", str(error)):
        amount, unit = asked.groups()
        if unit == "bytes":
            amount = f"{int(amount) / GIB:.2f}"
            unit = "GiB"
        parts.append(f"{amount} {unit} were requested")
    if trainer.cuda:
        there = torch.cuda.get_device_properties(trainer.device).total_memory
        held = torch.cuda.max_memory_allocated(trainer.device)
        reserved = torch.cuda.memory_reserved(trainer.device)
        parts.append(
            f"tensors used at most {held / GIB:.2f} GiB, and torch has reserved {reserved / GIB:.2f} GiB of the GPU's "
            f"{there / GIB:.2f} GiB"
        )
    return "; ".join(parts)


def smaller_batches(cfg: Any) -> str:
    """Return the options that halve the batches without changing the update size."""
    batch = cfg.dataset.batch_size
    tokens = cfg.dataset.max_tokens
    if batch == 1:
        option = "--tgt-len" if "tgt_len" in cfg.task else "--tokens-per-sample"
        return f"a lower {option}, because a batch is already a single sequence"
    if tokens and not batch:
        options = f"--max-tokens {tokens // 2}"
    else:
        options = f"--batch-size {(batch or 2) // 2}"
    if not cfg.task.get("sequences_per_update"):
        options += f" --update-freq {','.join(str(2 * each) for each in cfg.optimization.update_freq)}"
    return f"{options} (the update size stays the same)"
