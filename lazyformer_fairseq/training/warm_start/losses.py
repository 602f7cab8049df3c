"""A trained encoder's masked-LM loss on real text, before and after its pattern changes."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from lazyformer_fairseq.data.datasets.masked_blocks import MaskedBlocksDataset
from lazyformer_fairseq.data.masked_text import MaskedText, MaskedTextOptions, open_masked_text
from lazyformer_fairseq.data.text.interface import TextTokenizer
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation.match import dictionary_hash, lm_head_never_trained
from lazyformer_fairseq.modules.networks.encoder import Encoder
from lazyformer_fairseq.patterns.attention_variants import GIVEN
from lazyformer_fairseq.training.warm_start.start import Trained, WarmStart, start_from

SPLIT = "valid"
MOST_BYTES = 16 << 20  # maximum number of bytes of raw text to read; far more than the losses need
TOKENS = 65_536
TOKENS_OF_BATCH = 4096
Batches = Sequence[Mapping[str, Any]]  # batches from a masked-LM dataset


class BlockLosses(NamedTuple):
    """Per-block masked-LM losses, in order.

    Attributes:
        nats: each block's loss, summed over its masked tokens: (blocks,) in double precision.
        words: each block's number of masked tokens: (blocks,).
    """

    nats: np.ndarray
    words: np.ndarray

    @property
    def bits(self) -> float:
        """The mean loss over all masked tokens, in bits."""
        return float(self.nats.sum() / self.words.sum()) / math.log(2)


def masked_lm_bits(trained: Trained, batches: Batches) -> float:
    """Return the mean loss over all masked tokens, in bits."""
    return losses_by_block(trained, batches).bits


@torch.no_grad()
def losses_by_block(trained: Trained, batches: Batches) -> BlockLosses:
    """Compute each block's masked-LM loss."""
    model = trained.build()
    nats = []
    words = []
    device = model.dictionary_sha256.device
    for batch_on_cpu in batches:
        batch = tree_map_only(Tensor, lambda tensor: tensor.to(device), batch_on_cpu)
        tokens_BT = batch["net_input"]["src_tokens"]
        masked = batch["masked_positions"]
        positions = global_positions(model.encoder.sentence_encoder, tokens_BT)
        more = {"has_padding": batch["net_input"]["has_padding"], "global_positions": positions}
        logits, _ = model(tokens_BT, masked_tokens=masked, **more)

        targets = batch["target"].flatten()[masked]
        surprise = F.cross_entropy(logits.float(), targets, reduction="none").double()
        block = masked.div(tokens_BT.size(1), rounding_mode="floor")
        zeros = surprise.new_zeros(len(tokens_BT))
        nats.append(zeros.index_add(0, block, surprise).cpu())
        words.append(block.bincount(minlength=len(tokens_BT)).cpu())
    return BlockLosses(torch.cat(nats).numpy(), torch.cat(words).numpy())


def global_positions(encoder: Encoder, tokens_BT: Tensor) -> Optional[Tensor]:
    """Return the mask of global positions (B, T) for patterns with ``global=given``; None for other patterns.

    Only the first token of each text is global, as with ``global=1``, which has the same weights.
    """
    if not any(planned.values.get("global") == GIVEN for planned in encoder.plan):
        return None
    first = torch.zeros_like(tokens_BT, dtype=torch.bool)
    first[:, 0] = True
    return first


class Scorer:
    """A scorer for patterns: a pattern's score is a trained encoder's loss just after conversion to that pattern.

    All patterns are measured on the same masked text. The losses are cached.

    Args:
        old: the trained encoder.
        text: the masked text.
        seed: the seed for newly initialized weights.

    Raises:
        UserError: the encoder's masked-LM head was never trained, so its losses are meaningless.
    """

    def __init__(self, old: Trained, text: Batches, seed: int = 1):
        if lm_head_never_trained(old.weights):
            raise UserError(
                "this model's masked-LM head was never trained, so its losses are meaningless: first pre-train the "
                "model with fairseq-train --finetune-from-model, or run lazyformer import without --text"
            )
        self.old = old
        self.text = text
        self.seed = seed
        self._known: dict[tuple[str, Optional[tuple[str, ...]]], float] = {}

    def start(self, changes: Mapping[str, Any], from_sublayers: Optional[Sequence[str]] = None) -> WarmStart:
        """Build a new model from the old model's weights; see :func:`.start_from`."""
        return start_from(self.old, changes, from_sublayers, seed=self.seed)

    def bits(self, pattern: str, from_sublayers: Optional[Sequence[str]] = None) -> float:
        """Return the old model's masked-LM loss after conversion to a pattern, in bits per masked token.

        Args:
            pattern: the new model's pattern.
            from_sublayers: see :func:`~lazyformer_fairseq.training.warm_start.start.start_from`.
        """
        origins = None
        if from_sublayers:
            origins = tuple(from_sublayers)
        key = (pattern, origins)
        if key not in self._known:
            start = self.start({"sublayer_pattern": pattern}, from_sublayers)
            self._known[key] = masked_lm_bits(start.new, self.text)
        return self._known[key]

    def by_block(self, pattern: str, from_sublayers: Sequence[str]) -> BlockLosses:
        """Compute the old model's per-block losses after conversion to a pattern; the result is not cached."""
        start = self.start({"sublayer_pattern": pattern}, from_sublayers)
        return losses_by_block(start.new, self.text)


def measure_losses(scorer: Scorer, start: WarmStart) -> dict[str, Any]:
    """Return the `losses` entry of a warm start's record: the masked-LM loss before and after the change, in bits."""
    return {
        "unit": "bits",
        "tokens": sum(len(batch["masked_positions"]) for batch in scorer.text),
        "before": masked_lm_bits(scorer.old, scorer.text),
        "after": masked_lm_bits(start.new, scorer.text),
    }


def read_text(
    source: Path,
    tokenizer: TextTokenizer,
    longest: int,
    tokens: int = TOKENS,
) -> Batches:
    """Read text as masked blocks, and draw a random sample of them, which is the same in every call.

    Args:
        source: a raw text file, or a folder written by ``lazyformer corpus`` (its split `valid` is used).
        tokenizer: the model's tokenizer.
        longest: the maximum number of tokens per block.
        tokens: the approximate number of tokens to draw; if the text is shorter, all of it is used.

    Raises:
        UserError: the text cannot be read, has a different dictionary from the model, or fills fewer than two blocks.
    """
    if source.is_dir():
        dataset = _of_folder(source, longest, tokenizer)
    else:
        dataset = _of_file(source, longest, tokenizer)

    blocks = np.random.default_rng(1).permutation(len(dataset))
    if len(blocks) < 2:
        raise UserError(
            f"{source} is too short to measure losses; use text that fills at least two blocks of {longest} tokens"
        )
    count = math.ceil(tokens / longest)
    samples = [dataset[int(block)] for block in sorted(blocks[:count])]
    at_once = max(1, TOKENS_OF_BATCH // longest)
    starts = range(0, len(samples), at_once)
    return [dataset.collater(samples[start : start + at_once]) for start in starts]


def _of_folder(source: Path, longest: int, tokenizer: TextTokenizer) -> MaskedBlocksDataset:
    text = open_masked_text(str(source), tokens_per_sample=longest)
    if not torch.equal(dictionary_hash(text.dictionary), dictionary_hash(tokenizer.dictionary)):
        raise UserError(
            f"{source} has a different dictionary from the model; prepare the text with the model's tokenizer, or "
            "pass raw text"
        )
    return text.split(SPLIT).now


def _of_file(source: Path, longest: int, tokenizer: TextTokenizer) -> MaskedBlocksDataset:
    """Read raw text with one sentence per line and empty lines between documents."""
    eos = tokenizer.special.eos
    try:
        with source.open("rb") as file:
            text = file.read(MOST_BYTES).decode("utf-8", errors="ignore")
    except OSError as error:
        raise UserError(f"{source}: cannot be read ({error.strerror})") from None
    lines = [tokenizer.encode(line) for line in text.splitlines()]
    if not any(lines):
        raise UserError(f"{source} contains no text")
    first = next(number for number, ids in enumerate(lines) if ids)
    items = [torch.tensor([*ids, eos]) for ids in lines[first:]]
    how = MaskedText(str(source), MaskedTextOptions(tokens_per_sample=longest), tokenizer.dictionary)
    return how.blocks(items, str(source))
