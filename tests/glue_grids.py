"""Grids on GLUE's toy tasks."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Optional

from lazyformer_fairseq.data.prepared_folder import PreparedTask
from lazyformer_fairseq.finetuning.benchmark import head_settings
from lazyformer_fairseq.finetuning.grid import Grid, load_start_models
from lazyformer_fairseq.finetuning.tasks.glue import BENCHMARK as GLUE


def glue_grid(
    output: Path,
    checkpoint: Path,
    prepared: Mapping[str, PreparedTask],
    tasks: Sequence[str],
    epochs: int = 1,
    head: Optional[str] = None,
    batch_size: int = 32,
    **more: Any,
) -> Grid:
    """A grid of the model ``m`` on prepared tasks."""
    return Grid(
        benchmark=GLUE,
        output=output,
        models=load_start_models({"m": checkpoint}, next(iter(prepared.values())).tokenizer_folder),
        tasks={name: prepared[name] for name in tasks},
        epochs=dict.fromkeys(tasks, epochs),
        own=head_settings(head),
        batch_size=batch_size,
        warmup_ratio=0.06,
        **more,
    )
