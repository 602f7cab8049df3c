"""A made task that needs attention early: the search finds that out."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lazyformer_fairseq.experiments.search import training
from lazyformer_fairseq.experiments.search.settings import SearchSettings
from lazyformer_fairseq.experiments.search.supernet import Architecture, Supernet, supernet_pattern
from lazyformer_fairseq.modules.networks.encoder import Encoder, init_bert_weights

SYMBOLS = 12
CANDIDATES = ("s", "f")
SEEDS = (1, 2, 3, 4)
# Any function of two symbols. A position must look at the first one, then work it out for itself, which a feed-forward
# sublayer does better than a second look.
ANSWERS = torch.randint(0, SYMBOLS, (SYMBOLS, SYMBOLS), generator=torch.Generator().manual_seed(3))


@dataclass
class Questions:
    """Random batches: each position's answer is a function of its own symbol and the first position's."""

    count: int
    seed: int

    def __len__(self) -> int:
        return self.count

    def batches(self, epoch: int, start: int) -> Iterator[list[dict[str, Any]]]:
        generator = torch.Generator().manual_seed(1000 * epoch + self.seed)
        for _ in range(start, self.count):
            symbols = torch.randint(0, SYMBOLS, (64, 6), generator=generator)
            yield [{"symbols": symbols, "answers": ANSWERS[symbols[:, :1], symbols]}]

    def state_dict(self) -> dict[str, Any]:
        return {}


class Answerer(nn.Module):
    def __init__(self, pattern: str):
        super().__init__()
        self.encoder = Encoder(
            pattern,
            SYMBOLS,
            16,
            128,
            1,
            max_positions=6,
            normalize_before=True,
            relative_position_buckets=0,
            attention_backend="eager",
        )
        self.head = nn.Linear(16, SYMBOLS)
        self.apply(init_bert_weights)
        for embedding in (self.encoder.embed_tokens, self.encoder.embed_positions):
            nn.init.normal_(embedding.weight)

    def forward(self, symbols):
        return self.head(self.encoder(symbols)[0])


def loss_of(model, batch):
    answers = batch["answers"]
    return F.cross_entropy(model(batch["symbols"]).flatten(0, 1), answers.flatten(), reduction="sum"), answers.numel()


def found(seed: int, folder: Path) -> torch.Tensor:
    """How probable the search finds attention in each of two layers, (2,)."""
    torch.manual_seed(seed)
    model = Answerer(supernet_pattern(CANDIDATES, 2))
    settings = SearchSettings(
        "", "", "", "sfsf", constant_updates=240, max_updates=240 + 36 * 8, weights_lr=2e-2, architecture_lr=5e-2
    )
    supernet = Supernet(model, model.encoder, Architecture(2, CANDIDATES))
    parts = (Questions(24, seed), Questions(12, seed + 500))
    search = training.SupernetTraining(supernet, settings, loss_of, parts)
    search.run_in(folder)
    return supernet.architecture.probabilities().detach()[:, CANDIDATES.index("s")]


@pytest.mark.slow
def test_where_attention_is_needed_early_the_search_keeps_it_early(tmp_path, monkeypatch):
    """In the mean over seeds: a single search amplifies the rounding of the processor until its end is another one.

    A search that learned nothing would answer 0.5 and 0.5. On one processor eight seeds gave 0.92 and 0.42 in the mean,
    with standard deviations of 0.09 and 0.24 a seed, and never less than 0.23 between the two.
    """
    monkeypatch.setattr(training, "FINAL_TEMPERATURE", 0.5)
    monkeypatch.setattr(training, "ARCHITECTURE_SHARE", 1 / 3)
    early, late = torch.stack([found(seed, tmp_path / str(seed)) for seed in SEEDS]).mean(dim=0)
    assert early > 0.65
    assert early > late + 0.1
