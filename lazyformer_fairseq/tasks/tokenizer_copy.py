"""Copies the tokenizer beside the checkpoints, so that their folder is all that a user needs."""

import logging
from pathlib import Path

import torch.distributed

from lazyformer_fairseq.data.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


def keep_tokenizer_with_checkpoints(tokenizer: Path, save_dir: Path) -> None:
    """Copies the folder `tokenizer` to `save_dir`/tokenizer, once, by the first process.

    Data that was binarised by other means has no tokenizer; the log says so.
    """
    if torch.distributed.is_initialized() and torch.distributed.get_rank() > 0:
        return
    if not tokenizer.is_dir():
        logger.warning("%s: no tokenizer beside the data, so none is kept with the checkpoints", tokenizer)
        return
    target = save_dir / "tokenizer"
    if not target.exists():
        Tokenizer.load(tokenizer).save(target)
        logger.info("tokenizer kept with the checkpoints: %s", target)
