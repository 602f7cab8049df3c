"""The report of a run that stopped because its numbers went wrong."""

import math
from pathlib import Path
from typing import Any

import torch

from lazyformer_fairseq.storage.json_files import write_json

REPORT = "bad_updates.json"

WHAT_TO_TRY = (
    "Read 'samples': a few batches alone point to bad data, ever new ones to the settings",
    "Lower --lr, lengthen --warmup-ratio, or set --clip-norm",
    "Train in bf16 (--bf16) rather than fp16, or in full precision, which has room for larger numbers",
    "Give --max-rollbacks a larger number and run the same command again: it resumes from the last checkpoint",
    "Copy an older checkpoint over checkpoint_last.pt; where losses rise before the first bad update, one from before",
    "Raise or leave out --loss-spike if the reason is a spike and the loss came down again by itself",
)


def write_report(guard) -> Path:
    """Writes ``bad_updates.json`` into the folder of checkpoints, which it returns. Every process must call it."""
    trainer = guard.trainer
    folder = Path(trainer.cfg.checkpoint.save_dir)
    bad_of_processes = _of_all_processes(list(guard.bad), trainer.data_parallel_world_size)
    if trainer.is_data_parallel_master:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / REPORT, _without_nan(_report(guard, bad_of_processes)))
    return folder


def _report(guard, bad_of_processes: list[list[dict]]) -> dict[str, Any]:
    """Losses: per unit of sample size, as bits per masked token. Samples: dataset indices, by process and batch."""
    updates = [
        {**same_update[0], "samples": [of_process["samples"] for of_process in same_update]}
        for same_update in zip(*bad_of_processes, strict=True)
    ]
    return {
        "stopped_at_update": guard.trainer.get_num_updates() + 1,
        "reason": updates[-1]["reason"],
        "skipped": guard.skipped,
        "skipped_in_a_row": guard.skipped_in_a_row,
        "rollbacks": guard.rollbacks,
        "max_skipped_updates": guard.max_in_a_row,
        "max_rollbacks": guard.max_rollbacks,
        "loss_spike": guard.history.spike,
        "bad_updates": updates,
        "unit_of_losses": guard.unit,
        "losses_of_last_good_updates": [guard.in_unit(loss) for loss in guard.history.losses],
        "what_to_try": WHAT_TO_TRY,
    }


def _of_all_processes(content: Any, processes: int) -> list:
    if processes == 1:
        return [content]
    gathered = [None] * processes
    torch.distributed.all_gather_object(gathered, content)
    return gathered


def _without_nan(content: Any) -> Any:
    """JSON has no NaN and no Inf: they become strings."""
    if isinstance(content, dict):
        return {key: _without_nan(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_without_nan(value) for value in content]
    if isinstance(content, float) and not math.isfinite(content):
        return str(content)
    return content
