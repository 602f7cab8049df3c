"""Real text for a warm start, masked once: blocks that match heads, and others that measure losses."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from fairseq.data import Dictionary

from lazyformer_fairseq.data.datasets.full_sentences import FullSentencesDataset
from lazyformer_fairseq.data.text.interface import TextTokenizer
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.models.checkpoint_match import dictionary_hash
from lazyformer_fairseq.fairseq_plugin.tasks.full_sentences_masked_lm import (
    FullSentencesMaskedLMConfig,
    FullSentencesMaskedLMTask,
)

SPLIT = "valid"
MOST_BYTES = 16 << 20  # of raw text; far more than is looked at
FOR_HEADS, FOR_LOSSES = 8_192, 65_536  # tokens
TOKENS_OF_BATCH = 4096


class Text(NamedTuple):
    """Batches as a masked-LM dataset makes them.

    Attributes:
        for_heads, for_losses: no block is in both.
    """

    for_heads: list[dict[str, Any]]
    for_losses: list[dict[str, Any]]


def read_text(
    source: Path, tokenizer: TextTokenizer, longest: int, for_heads: int = FOR_HEADS, for_losses: int = FOR_LOSSES
) -> Text:
    """Blocks drawn from text by a fixed seed, the same at each call.

    Args:
        source: a file of raw text, or a folder that ``lazyformer corpus`` wrote, whose split `valid` is read.
        longest: tokens of a block.
        for_heads, for_losses: tokens, some more or fewer, as blocks are whole; fewer in the same proportion where
            there are fewer.

    Raises:
        UserError: it cannot be read, has another dictionary than the model, or fewer than two blocks.
    """
    cfg = FullSentencesMaskedLMConfig(
        data=str(source), tokens_per_sample=longest, seed=1, save_dir="", no_save=True, verify="quick"
    )
    dataset = _of_folder(source, cfg, tokenizer.dictionary) if source.is_dir() else _of_file(source, cfg, tokenizer)
    blocks = np.random.default_rng(1).permutation(len(dataset))
    if len(blocks) < 2:
        raise UserError(f"{source}: one block of {longest} tokens, too few to match heads and to measure losses")
    border = -(-for_heads // longest)
    border = min(border, max(1, len(blocks) * for_heads // (for_heads + for_losses)))
    end = border + -(-for_losses // longest)
    return Text(_batches(dataset, blocks[:border], longest), _batches(dataset, blocks[border:end], longest))


def _of_folder(source: Path, cfg: FullSentencesMaskedLMConfig, dictionary: Dictionary) -> FullSentencesDataset:
    task = FullSentencesMaskedLMTask.setup_task(cfg)
    if not torch.equal(dictionary_hash(task.dictionary), dictionary_hash(dictionary)):
        raise UserError(
            f"{source}: has another dictionary than the model; prepare the text with the model's tokenizer, or give "
            "raw text"
        )
    task.load_dataset(SPLIT)
    return task.dataset(SPLIT)


def _of_file(source: Path, cfg: FullSentencesMaskedLMConfig, tokenizer: TextTokenizer) -> FullSentencesDataset:
    """A line is a sentence; where there is an empty line, another document begins."""
    dictionary = tokenizer.dictionary
    try:
        with source.open("rb") as file:
            text = file.read(MOST_BYTES).decode("utf-8", errors="ignore")
    except OSError as error:
        raise UserError(f"{source}: cannot be read ({error.strerror})") from None
    lines = [tokenizer.encode(line) for line in text.splitlines()]
    if not any(lines):
        raise UserError(f"{source}: holds no text")
    items = [torch.tensor([*ids, dictionary.eos()]) for number, ids in enumerate(lines) if ids or any(lines[:number])]
    task = FullSentencesMaskedLMTask(cfg, dictionary)
    return FullSentencesDataset(
        items,
        np.array([len(item) for item in items]),
        cfg.tokens_per_sample,
        bos=dictionary.bos(),
        eos=dictionary.eos(),
        masking=task.masking,
        shuffle=False,
        name=str(source),
    )


def _batches(dataset: FullSentencesDataset, blocks: Sequence[int], longest: int) -> list[dict[str, Any]]:
    at_once = max(1, TOKENS_OF_BATCH // longest)
    samples = [dataset[int(block)] for block in sorted(blocks)]
    return [dataset.collater(samples[start : start + at_once]) for start in range(0, len(samples), at_once)]
