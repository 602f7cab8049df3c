"""Perplexity per word or bits per character over all tokens in a split (PAR Transformer, section 3).

The result is defined for batch size 1: one stream reads the split from the start in segments of `tgt_len` tokens, with
a memory of the `mem_len` tokens before each segment. Every token is predicted, the first one from ``</s>``, so the mean
is over all tokens in the split. (Transformer-XL's own code omits the first token. In WikiText-103's test split,
that token is one of 245,569, and it is the end of an empty line.)

With a larger batch, each stream evaluates a part of the split. It first reads the text before its part without counting
it, because with batch size 1 that text would be in memory: an attention sublayer looks back ceil(mem_len / tgt_len)
segments, where its inputs depend on as many earlier segments through the attention sublayer below, and so on. Reading
that many segments times the number of attention sublayers, on the same grid as with batch size 1, produces the same
memory up to rounding.
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Optional

import numpy as np
import torch
from torch import Tensor

from lazyformer_fairseq.data.batches import pad_right
from lazyformer_fairseq.data.datasets.token_streams import TokenStreams, check_memory_fits, item_length, make_streams
from lazyformer_fairseq.data.text.dictionary_file import Dictionary, load_dictionary
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation import checkpoints, loading
from lazyformer_fairseq.evaluation.costs.machine import PRECISIONS, device_named
from lazyformer_fairseq.modules.networks.causal_decoder import check_same_length_has_memory
from lazyformer_fairseq.modules.networks.causal_lm import CausalLM
from lazyformer_fairseq.modules.networks.stream_memory import StreamMemory
from lazyformer_fairseq.progress import Progress


@dataclass(frozen=True)
class Evaluation:
    """A model's result on a text.

    Attributes:
        tokens: number of predicted tokens, which are all tokens in the text.
        nats: mean negative log-likelihood per token.
        seconds: duration, including the streams' warm-up.
    """

    tokens: int
    nats: float
    seconds: float

    @property
    def bits(self) -> float:
        """The bits per token, or bits per character if tokens are characters."""
        return self.nats / math.log(2)

    @property
    def perplexity(self) -> float:
        """The perplexity per token; infinite if it exceeds the range of floats."""
        if self.nats < 700:
            return math.exp(self.nats)
        return math.inf

    def as_json(self) -> dict[str, Any]:
        """Return the metrics as a JSON-serializable dictionary."""
        return {
            "tokens": self.tokens,
            "bits_per_token": self.bits,
            "perplexity": self.perplexity,
            "seconds": round(self.seconds, 3),
            "tokens_per_second": round(self.tokens / self.seconds, 1),
        }


def in_words(result: Evaluation, unit: str, split: str) -> str:
    """Summarize the result in one line, starting with the metric that papers report for the unit."""
    numbers = [
        f"perplexity {result.perplexity:.2f} per {unit}",
        f"{result.bits:.4f} bits per {unit}",
    ]
    if unit != "word":
        numbers.reverse()
    speed = f"{result.tokens / max(result.seconds, math.ulp(1.0)):,.0f} tokens/s"
    return f"{split}: {numbers[0]} ({numbers[1]}) over {result.tokens:,} {unit}s; {speed}"


class Loaded(NamedTuple):
    """A language model, its data's dictionary, and the number of tokens per segment during training."""

    model: CausalLM
    dictionary: Dictionary
    tgt_len: int


def load_model(
    checkpoint: Path,
    data: Path,
    device: Optional[str] = "cpu",
    precision: str = "fp32",
) -> Loaded:
    """Load a checkpoint's language model for data with the same dictionary.

    Args:
        checkpoint: the checkpoint file.
        data: the folder of prepared data.
        device: the device name.
        precision: the model's numeric precision.

    Raises:
        UserError: the checkpoint is missing or damaged, contains a different type of model, or has a
            different dictionary; or there is no such device.
    """
    device = device_named(device)
    state = checkpoints.load(checkpoint)
    task = state["cfg"].get("task") or {}
    trained_on = task.get("_name")
    if trained_on != "stream_language_modeling":
        origin = "it names no task"
        if trained_on:
            origin = f"it was trained on the task {trained_on}"
        raise UserError(
            f"{checkpoint} is not a language model from this package; {origin}. Use a checkpoint written by "
            "scripts/train_language_model.sh or by fairseq-train --task stream_language_modeling"
        )
    dictionary = load_dictionary(data / "dict.txt")
    model = loading.build(state, dictionary, checkpoint)
    model = model.to(device, PRECISIONS[precision]).eval()
    return Loaded(model, dictionary, task["tgt_len"])


def refuse_other_images(loaded: Loaded, data: Path) -> None:
    """Raise a UserError if the images in `data` differ in size from those that the model was trained on."""
    item = item_length(data)
    if item not in (0, loaded.tgt_len):
        raise UserError(
            f"{data}: the images have {item} pixels, but the model was trained on images with {loaded.tgt_len}; "
            "prepare the data with the --side of the training images"
        )


def evaluate(model: CausalLM, tokens: np.ndarray, eos: int, **lengths: int) -> Evaluation:
    """Measure and time the loss of every token in a text; `lengths` are the other arguments of `token_losses`."""
    start = time.perf_counter()
    losses = token_losses(model, tokens, eos, **lengths)
    return Evaluation(
        tokens=len(losses),
        nats=float(losses.mean(dtype=np.float64)),
        seconds=time.perf_counter() - start,
    )


def token_losses(  # noqa: PLR0917  every length of the evaluation
    model: CausalLM,
    tokens: np.ndarray,
    eos: int,
    tgt_len: int,
    mem_len: int,
    clamp_len: int = 0,
    same_length: bool = False,
    batch_size: int = 1,
    item: int = 0,
) -> np.ndarray:
    """Return the negative log-likelihood of each token in a text, in nats, float32 (N,); see the module docstring.

    Args:
        model: the model, on any device and in any precision; dropout is disabled during the evaluation.
        tokens: token ids (N,).
        eos: id of ``</s>``, from which the first token is predicted.
        tgt_len: tokens per segment.
        mem_len: tokens in memory.
        clamp_len: maximum relative distance, to which larger ones are clamped; 0 for no limit.
        same_length: whether every query attends to itself and exactly the `mem_len` tokens before it.
        batch_size: number of streams.
        item: tokens per item, if the text consists of independent items such as images; 0 for a text.

    Raises:
        UserError: items are combined with a memory, segments are not items, or the model's attention variants do not
            support such a memory or mask.
    """
    check_same_length_has_memory(same_length, mem_len)
    if item:
        tokens = tokens[: len(tokens) - len(tokens) % item]
    text = make_streams(tokens, tgt_len, item, rows=1, eos=eos, pad=model.padding_idx, keeps_rest=True)
    if item:
        check_memory_fits(mem_len, text)
    attending = sum(sublayer.attends for sublayer in model.decoder.sublayers)
    lead = attending * math.ceil(mem_len / tgt_len)
    parts = Parts.of(len(text), batch_size, lead)

    device = next(model.parameters()).device
    losses = np.zeros(len(tokens), dtype=np.float32)
    memory = StreamMemory()
    bar = Progress(
        total=len(tokens),
        desc="evaluating",
        unit="token",
        unit_scale=True,
        leave=False,
    )
    with (
        _evaluating(model, mem_len=mem_len, clamp_len=clamp_len, same_length=same_length),
        bar,
    ):
        for step in range(parts.steps):
            segments = parts.segments(step)
            source, target = _batch(text, segments)
            nll, _ = model(source.to(device), memory=memory, target=target.to(device))
            nll = nll.float().cpu().numpy()
            for stream in parts.counted(step):
                start = segments[stream] * tgt_len
                place = losses[start : start + tgt_len]
                place[:] = nll[stream, : len(place)]
                bar.update(len(place))
    return losses


@dataclass(frozen=True)
class Parts:
    """The division of a text among streams: the segment that each stream reads at each step, and whether it counts.

    All streams start at the same step, without memory, `lead` segments before their parts. The first stream starts at
    the beginning of the text, so its lead counts; the other streams' parts follow one after another.

    Attributes:
        lead: number of warm-up segments per stream.
        first: index of each stream's first segment.
        lengths: number of segments per part; all are equal, or the first ones are longer by one.
        last: index of the text's last segment.
    """

    lead: int
    first: list[int]
    lengths: list[int]
    last: int

    @classmethod
    def of(cls, segments: int, streams: int, lead: int) -> "Parts":
        """Divide the segments after the first stream's lead among the streams; a short text gets fewer streams."""
        lead = min(lead, segments)
        streams = max(1, min(streams, segments - lead))
        each, more = divmod(segments - lead, streams)
        lengths = [each + (stream < more) for stream in range(streams)]
        return cls(
            lead=lead,
            first=[sum(lengths[:stream]) for stream in range(streams)],
            lengths=lengths,
            last=segments - 1,
        )

    @property
    def steps(self) -> int:
        """The number of forward passes."""
        return self.lead + self.lengths[0]

    def segments(self, step: int) -> list[int]:
        """Return each stream's segment at a step; a finished stream keeps reading, without effect."""
        return [min(first + step, self.last) for first in self.first]

    def counted(self, step: int) -> list[int]:
        """Return the streams whose segment counts at this step."""
        if step < self.lead:
            return [0]
        return [stream for stream, length in enumerate(self.lengths) if step < self.lead + length]


def _batch(text: TokenStreams, segments: list[int]) -> tuple[Tensor, Tensor]:
    """Return the sources and targets of these segments, (B, T); a short last segment is padded."""
    rows = [text[segment] for segment in segments]
    sources = [row["net_input"]["src_tokens"][0] for row in rows]
    targets = [row["target"][0] for row in rows]
    return pad_right(sources, text.pad), pad_right(targets, text.pad)


@contextmanager
def _evaluating(model: CausalLM, **lengths: int) -> Iterator[None]:
    """Disable dropout and gradients and set the decoder's lengths; restore everything afterwards."""
    was_training = model.training
    before = {name: getattr(model.decoder, name) for name in lengths}
    model.eval()
    try:
        for name, length in lengths.items():
            setattr(model.decoder, name, length)
        with torch.inference_mode():
            yield
    finally:
        for name, length in before.items():
            setattr(model.decoder, name, length)
        model.train(was_training)
