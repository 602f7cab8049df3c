"""Does the work of ``lazyformer lm evaluate``: loads, evaluates, reports."""

import math
from pathlib import Path
from typing import Any, Optional

import torch

from lazyformer_fairseq.data.datasets.token_streams import open_tokens
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.files.json_files import write_json
from lazyformer_fairseq.language_modeling.evaluation.evaluate import Evaluation, evaluate, load_model
from lazyformer_fairseq.language_modeling.text.prepare import read_manifest


def run(
    checkpoint: Path,
    data: Path,
    split: str,
    lengths: dict[str, Optional[int]],
    batch_size: int,
    device: Optional[str],
    precision: str,
    json_file: Optional[Path],
) -> str:
    """Evaluates a checkpoint.

    Args:
        lengths: tgt_len, mem_len and clamp_len; None for the training's.
        device: None for a GPU where there is one.
        json_file: for the result, or None.

    Returns:
        The result in words.

    Raises:
        UserError: an argument does not exist, is damaged or does not fit the others.
    """
    manifest = read_manifest(data)
    unit = manifest["unit"]
    if split not in manifest["splits"]:
        raise UserError(f"--split {split}: {data} has {', '.join(manifest['splits'])}")
    tokens = open_tokens(data / split)
    model, task = load_model(checkpoint, data, device or ("cuda" if torch.cuda.is_available() else "cpu"), precision)
    trained_with = {"tgt_len": task.cfg.tgt_len, "mem_len": model.cfg.mem_len, "clamp_len": model.cfg.clamp_len}
    used = {name: trained_with[name] if value is None else value for name, value in lengths.items()}
    result = evaluate(model, tokens, task.dictionary.eos(), **used, batch_size=batch_size)
    if json_file is not None:
        settings: dict[str, Any] = {"checkpoint": str(checkpoint), "data": str(data), "split": split, "unit": unit}
        settings |= {**used, "batch_size": batch_size, "precision": precision}
        write_json(json_file, {**settings, **result.as_json()})
    return in_words(result, unit, split)


def in_words(result: Evaluation, unit: str, split: str) -> str:
    """The number that the papers give for the unit, and the other one."""
    numbers = [f"perplexity {result.perplexity:.2f} per {unit}", f"{result.bits:.4f} bits per {unit}"]
    if unit == "character":
        numbers.reverse()
    speed = f"{result.tokens / max(result.seconds, math.ulp(1.0)):,.0f} tokens/s"
    return f"{split}: {numbers[0]} ({numbers[1]}) over {result.tokens:,} {unit}s; {speed}"
