"""A fine-tuned model and its task, from a run's checkpoint."""

from pathlib import Path
from typing import Any

import torch
from fairseq import checkpoint_utils

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.replacements import loading_safely


def load_finetuned(checkpoint: Path, state: dict[str, Any], data: Path) -> tuple[torch.nn.Module, Any]:
    """The model, in evaluation mode and on the GPU if there is one, and its task.

    Args:
        state: the checkpoint's content, whose settings of the task may have been changed.
        data: for messages, what the model is loaded for.

    Raises:
        UserError: the checkpoint does not fit the settings.
    """
    try:
        with loading_safely():  # the checkpoint says which of fairseq's models is built
            (model,), _, task = checkpoint_utils.load_model_ensemble_and_task([str(checkpoint)], state=state)
    except UserError as error:
        raise UserError(f"{checkpoint}, on {data}: {error}") from error
    return model.eval().to("cuda" if torch.cuda.is_available() else "cpu"), task
