"""The model of a run with the weights of its best epoch."""

from typing import Any

import torch
from fairseq import tasks
from omegaconf import DictConfig

from lazyformer_fairseq.finetuning.run.grid import Run

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def load_best(run: Run, cfg: DictConfig, best: dict[str, Any]) -> tuple[Any, torch.nn.Module]:
    """Its task, and the model in evaluation mode, on the GPU if there is one, in the precision it was trained in.

    Args:
        best: the content of the checkpoint.
    """
    task = tasks.setup_task(cfg.task)
    model = task.build_model(cfg.model)
    model.load_state_dict(best["model"])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return task, model.to(device=device, dtype=_DTYPES[run.precision]).eval()
