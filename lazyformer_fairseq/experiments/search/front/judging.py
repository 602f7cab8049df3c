"""Judges patterns by the loss that they reach with the weights they inherit from a supernet; resumes."""

import itertools
import math
from dataclasses import dataclass, field
from pathlib import Path as File

import torch
from torch import Tensor

from lazyformer_fairseq.experiments.search.front.cost import FORWARD, Cost, Counting, clock_of
from lazyformer_fairseq.experiments.search.report.found_pattern import by_layer
from lazyformer_fairseq.experiments.search.settings import candidate_name
from lazyformer_fairseq.experiments.search.space import Path
from lazyformer_fairseq.experiments.search.supernet.data_parts import move_to
from lazyformer_fairseq.experiments.search.supernet.fairseq_model import FairseqSearch
from lazyformer_fairseq.experiments.search.supernet.single_path import SinglePath
from lazyformer_fairseq.patterns.grammar import read_sublayer, split_sublayers
from lazyformer_fairseq.storage.json_files import read_json, write_json


def path_of(text: str) -> Path:
    """The candidates of a pattern written out by layer, such as ``sf-f``."""
    return tuple(candidate_name(read_sublayer(part)) for part in split_sublayers(text))


@dataclass
class Inheritance:
    """Losses with inherited weights on the first batches of the held-apart data, always the same; kept in `file`.

    Attributes:
        single: a trained supernet.
        batches: how many.
        losses: in bits a prediction, of the patterns judged so far.
        seconds: what each took.
    """

    fairseq: FairseqSearch
    single: SinglePath
    counting: Counting
    batches: int
    file: File
    losses: dict[Path, float] = field(default_factory=dict)
    seconds: dict[Path, float] = field(default_factory=dict)

    def __post_init__(self):
        self.part = self.fairseq.parts()[1]
        if self.file.exists():
            kept = read_json(self.file)
            self.losses = {path_of(text): loss for text, loss in kept["losses"].items()}
            self.seconds = {path_of(text): taken for text, taken in kept["seconds"].items()}

    def __call__(self, path: Path) -> float:
        clock = clock_of(self.fairseq.settings.device)
        began = clock()
        self.losses[path] = self._loss(path)
        self.seconds[path] = clock() - began
        by_text = {name: {by_layer(each): value for each, value in getattr(self, name).items()} for name in _KEPT}
        write_json(self.file, by_text, durable=False)
        return self.losses[path]

    @torch.no_grad()
    def _loss(self, path: Path) -> float:
        self.single.take(path)
        self.single.eval()
        losses: list[Tensor] = []
        count = 0
        for batch in itertools.islice(self.part.batches(1, 0), self.batches):
            loss, predictions = self.fairseq.loss_of(self.single, move_to(batch, self.fairseq.settings.device))
            losses.append(loss.double())
            count += int(predictions)
        return float(sum(losses)) / count / math.log(2)

    def cost_of(self, paths: list[Path]) -> Cost:
        """What it cost to judge these."""
        batches = min(self.batches, len(self.part))
        counted = sum(FORWARD * batches * self.counting.path(path) for path in paths)
        return Cost(evaluations=len(paths), counted=counted, seconds=sum(self.seconds[path] for path in paths))


_KEPT = ("losses", "seconds")
