"""Masked language modelling: loss and accuracy on fixed blocks under fixed masks."""

import math
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fairseq import options, utils
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.tasks import FairseqTask, setup_task
from torch import nn
from torch.nn import functional as F

from lazyformer_fairseq.experiments.compare.contestants import Contestant
from lazyformer_fairseq.experiments.compare.tasks.interface import ComparedTask, evaluating
from lazyformer_fairseq.fairseq_plugin.tasks.full_sentences_masked_lm import data_folders
from lazyformer_fairseq.measure.costs.flops import count_flops
from lazyformer_fairseq.patterns.architectures import ARCHITECTURES
from lazyformer_fairseq.patterns.sizes import EncoderSizes

SEED = 0  # of the masks in validation, whatever the training's is
BATCH = 32  # blocks


class Compared(ComparedTask):
    """Trains on FULL-SENTENCES blocks."""

    def task_words(self) -> list[str]:
        words = [self.settings.data, "--task", "full_sentences_masked_lm", "--criterion", "masked_lm_accuracy"]
        return [*words, "--tokens-per-sample", str(self.settings.sizes["tokens_per_sample"])]

    def model_words(self, contestant: Contestant) -> list[str]:
        dropout = str(self.settings.sizes["dropout"])
        words = [
            *("--encoder-embed-dim", str(contestant.embed_dim)),
            *("--encoder-ffn-embed-dim", str(contestant.ffn_embed_dim)),
            *("--encoder-attention-heads", str(contestant.heads), "--max-positions", str(self._positions(contestant))),
            *("--dropout", dropout, *(["--encoder-normalize-before"] if self.settings.normalize_before else [])),
        ]
        if contestant.what == "fairseq":
            without = ("--attention-dropout", "0", "--activation-dropout", "0")
            return ["--arch", contestant.arch, "--encoder-layers", str(contestant.layers), *without, *words]
        if contestant.what == "huggingface":
            # A BERT has its norms behind sublayers, and no option for it.
            words = [word for word in words if word != "--encoder-normalize-before"]
            return ["--arch", contestant.arch, "--encoder-layers", str(contestant.layers), *words]
        attention = str(self._own_options(contestant).get("attention_dropout", 0))
        return [
            *("--arch", "lazyformer", "--sublayer-pattern", contestant.pattern, *words),
            *("--relative-position-buckets", str(self._buckets(contestant)), "--attention-dropout", attention),
        ]

    def sizes(self, contestant: Contestant, vocab_size: int = 0) -> EncoderSizes:
        of_all = (vocab_size, contestant.embed_dim, contestant.ffn_embed_dim, contestant.heads)
        positions, buckets = self._positions(contestant), self._buckets(contestant)
        return EncoderSizes(*of_all, max_positions=positions, relative_position_buckets=buckets)

    def flops_of_update(self, contestant: Contestant, vocab_size: int) -> int:
        """Of full blocks."""
        time, batch = self.settings.sizes["tokens_per_sample"], self.settings.sizes["batch_size"]
        predicted = max(1, round(time * self._task.cfg.mask_prob))
        sizes = self.sizes(contestant, vocab_size)
        return 3 * count_flops(contestant.pattern, sizes, time, batch=batch, predicted=predicted)

    def measure(self, model: nn.Module, task: FairseqTask) -> dict[str, float]:
        """`loss`, bits a masked piece, and `accuracy`, percent of these."""
        nats = right = predicted = 0.0
        device, pad = next(model.parameters()).device, self._task.dictionary.pad()
        with evaluating(model):
            for batch in self._batches:
                sample = utils.move_to_cuda(batch, device) if device.type == "cuda" else batch
                is_masked = sample["target"].ne(pad)
                targets = sample["target"][is_masked]
                # As in training: fairseq's own models take a mask, ours and those of transformers places.
                masked = sample["masked_positions"] if getattr(model, "takes_positions", False) else is_masked
                logits = model(**sample["net_input"], masked_tokens=masked)[0].float()
                nats += F.cross_entropy(logits, targets, reduction="sum").item()
                right += (logits.argmax(-1) == targets).sum().item()
                predicted += len(targets)
        return {"loss": nats / predicted / math.log(2), "accuracy": 100 * right / predicted}

    def final(self, model: nn.Module, task: FairseqTask) -> dict[str, float]:
        return self.measure(model, task)

    def describe_data(self) -> dict[str, Any]:
        """Unigram entropy of the words that are to be found in validation, and how many these are."""
        pad = self._task.dictionary.pad()
        targets = torch.cat([batch["target"].flatten() for batch in self._batches])
        _, counts = targets[targets.ne(pad)].unique(return_counts=True)
        shares = counts.double() / counts.sum()
        return {
            "unigram_bits": {"valid": float(-(shares * shares.log2()).sum())},
            "validation": {
                "tokens": sum(int(batch["ntokens"]) for batch in self._batches),
                "predicted": int(counts.sum()),
                "seed": SEED,
            },
        }

    @cached_property
    def _task(self) -> FairseqTask:
        """Apart from the trainings': it validates all of them."""
        any_model = next(iter(self.settings.contestants.values()))
        words = self.command(any_model, SEED, self.settings.rates[0], updates=1)
        words += ["--train-subset", "valid", "--no-save"]
        cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(options.get_training_parser(), words))
        return setup_task(cfg.task)

    @cached_property
    def _batches(self) -> list[dict]:
        """Blocks from all over the validation split, as many as hold `validation_tokens`; their masks never change."""
        self._task.load_dataset("valid")
        blocks = self._task.datasets["valid"]
        blocks.seed = SEED
        mean = blocks.sizes.sum() / len(blocks)
        count = min(len(blocks), max(1, round(self.settings.validation_tokens / mean)))
        chosen = np.linspace(0, len(blocks) - 1, count).round().astype(int)
        parts = [chosen[start : start + BATCH] for start in range(0, count, BATCH)]
        return [blocks.collater([blocks[int(index)] for index in part]) for part in parts]

    def _positions(self, contestant: Contestant) -> int:
        asked = self._own_options(contestant).get("max_positions") or self.settings.sizes["max_positions"]
        return asked or self.settings.sizes["tokens_per_sample"]

    def _buckets(self, contestant: Contestant) -> int:
        """Of T5's relative positions, which models from elsewhere have not."""
        given = 0 if contestant.is_external else self.settings.sizes["relative_position_buckets"]
        return self._own_options(contestant).get("relative_position_buckets", given)

    def _own_options(self, contestant: Contestant) -> dict[str, Any]:
        return ARCHITECTURES[contestant.arch].options() if contestant.own_sizes else {}

    def data_folders(self) -> list[Path]:
        return [Path(folder) for folder in data_folders(self.settings.data)]
