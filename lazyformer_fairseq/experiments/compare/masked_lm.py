"""Masked language modelling, on fixed blocks under fixed masks; and made tasks with long inputs, ListOps and pairs."""

import logging
import math
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Optional

import numpy as np
import torch
from fairseq import options, utils
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.tasks import FairseqTask, setup_task
from torch.nn import functional as F

from lazyformer_fairseq.data.prepared_folder import PreparedDiagnostic
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.compare.models import ModelSpec
from lazyformer_fairseq.experiments.compare.task import ComparedTask, CompareJob, unigram_bits
from lazyformer_fairseq.experiments.trainings import Job, Training
from lazyformer_fairseq.fairseq_plugin.tasks.full_sentences_masked_lm import data_folders
from lazyformer_fairseq.finetuning import fairseq_task
from lazyformer_fairseq.measure.costs.flops import count_flops
from lazyformer_fairseq.measure.stepwise import StepwiseTraining
from lazyformer_fairseq.patterns.architectures import ARCHITECTURES, PARTS
from lazyformer_fairseq.patterns.kinds import EncoderSizes, sizes_of

SEED = 0  # of the masks in validation, whatever the training's is
BATCH = 32  # blocks


class MaskedLM(ComparedTask):
    """Trains on FULL-SENTENCES blocks."""

    @property
    def longest(self) -> int:
        """Tokens of an input."""
        return self.settings.sizes["tokens_per_sample"]

    def task_words(self) -> list[str]:
        words = [self.settings.data, "--task", "full_sentences_masked_lm", "--criterion", "masked_lm_accuracy"]
        return [*words, "--tokens-per-sample", str(self.longest)]

    def model_words(self, spec: ModelSpec) -> list[str]:
        dropout = str(self.settings.sizes["dropout"])
        words = [
            *("--encoder-embed-dim", str(spec.embed_dim)),
            *("--encoder-ffn-embed-dim", str(spec.ffn_embed_dim)),
            *("--encoder-attention-heads", str(spec.heads), "--max-positions", str(self._positions(spec))),
            *("--dropout", dropout, *(["--encoder-normalize-before"] if self.settings.normalize_before else [])),
        ]
        if spec.what == "fairseq":
            without = ("--attention-dropout", "0", "--activation-dropout", "0")
            return ["--arch", spec.arch, "--encoder-layers", str(spec.layers), *without, *words]
        if spec.what == "huggingface":
            # A BERT has its norms behind sublayers, and no option for it.
            words = [word for word in words if word != "--encoder-normalize-before"]
            return ["--arch", spec.arch, "--encoder-layers", str(spec.layers), *words]
        attention = str(self._own_options(spec).get("attention_dropout", 0))
        return [
            *("--arch", "lazyformer", "--sublayer-pattern", spec.pattern, *words),
            *("--relative-position-buckets", str(self._buckets(spec)), "--attention-dropout", attention),
            *(word for name, value in self._parts(spec).items() for word in _words(name, value)),
        ]

    def sizes(self, spec: ModelSpec, vocab_size: int = 0) -> EncoderSizes:
        widths = {"embed_dim": spec.embed_dim, "ffn_embed_dim": spec.ffn_embed_dim, "attention_heads": spec.heads}
        options = {"max_positions": self._positions(spec), "relative_position_buckets": self._buckets(spec)}
        options |= {f"encoder_{name}": width for name, width in widths.items()}
        return sizes_of(options | self._parts(spec), vocab_size)

    def flops_of_update(self, spec: ModelSpec, vocab_size: int) -> int:
        """Of full blocks."""
        how = {"batch": self.settings.sizes["batch_size"], "predicted": self.predicted}
        return 3 * count_flops(spec.pattern, self.sizes(spec, vocab_size), self.longest, **how)

    @property
    def predicted(self) -> int:
        """Tokens of an input that the head sees."""
        return max(1, round(self.longest * self._task.cfg.mask_prob))

    def measure(self, training: StepwiseTraining) -> dict[str, float]:
        """`loss`, bits a masked piece, and `accuracy`, percent of these."""
        model = training.trainer.model
        nats = right = predicted = 0.0
        device, pad = next(model.parameters()).device, self._task.dictionary.pad()
        with utils.model_eval(model), torch.inference_mode():
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

    def describe_data(self) -> dict[str, Any]:
        """Unigram entropy of the words that are to be found in validation, and how many these are."""
        pad = self._task.dictionary.pad()
        targets = torch.cat([batch["target"].flatten() for batch in self._batches])
        targets = targets[targets.ne(pad)].numpy()
        return {
            "unigram_bits": {"valid": unigram_bits(targets)},
            "validation": {
                "tokens": sum(int(batch["ntokens"]) for batch in self._batches),
                "predicted": len(targets),
                "seed": SEED,
            },
        }

    @cached_property
    def _task(self) -> FairseqTask:
        """Apart from the trainings': it validates all of them."""
        any_model = next(iter(self.settings.specs.values()))
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

    def _positions(self, spec: ModelSpec) -> int:
        return self._own_options(spec).get("max_positions") or self.longest

    def _buckets(self, spec: ModelSpec) -> int:
        """Of T5's relative positions, which models from elsewhere have not."""
        given = 0 if spec.is_external else self.settings.sizes["relative_position_buckets"]
        return self._own_options(spec).get("relative_position_buckets", given)

    def _parts(self, spec: ModelSpec) -> dict[str, Any]:
        """What an arch's own sizes say of norms, biases, positions and head."""
        return {name: value for name, value in self._own_options(spec).items() if name in PARTS}

    def _own_options(self, spec: ModelSpec) -> dict[str, Any]:
        return ARCHITECTURES[spec.arch].options() if spec.own_sizes else {}

    def data_folders(self) -> list[Path]:
        return [Path(folder) for folder in data_folders(self.settings.data)]


PRETRAINING_RATE, MASKED = 1e-3, 0.15
VALIDATION = ("--batch-size-valid", "64")


class MaskFilling(Training):
    """Self-pretraining; `accuracy` is the per cent of masked symbols that it finds."""

    def measure(self) -> Mapping[str, float]:
        found = self.evaluate()
        return {"accuracy": float(found["accuracy"]), "loss": float(found["loss"])}


class Diagnostic(MaskedLM):
    """Trains on a folder of `lazyformer diagnostics`, which fairseq's task ``glue`` reads."""

    predicted = 0

    @cached_property
    def prepared(self) -> PreparedDiagnostic:
        found, asked = PreparedDiagnostic.load(self.settings.data), self.settings.task
        if (made := found.manifest["task"].lower()) != asked:
            raise UserError(f"{self.settings.data}: is of --task {made}, not {asked}")
        return found

    @property
    def longest(self) -> int:
        return max(counts["longest"] for counts in self.prepared.manifest["splits"].values())

    def task_words(self) -> list[str]:
        words = [self.settings.data, "--task", "glue", "--criterion", "glue"]
        return [*words, "--pooler-dropout", str(self.settings.sizes["dropout"]), *VALIDATION]

    def pretraining(self, spec: ModelSpec, seed: int, folder: Path) -> Optional[Job]:
        """Fills masks in the task's own training inputs (Amos et al., 2023), each of them a block."""
        if not spec.pretrain:
            return None
        words = [self.settings.data, "--task", "inputs_masked_lm", "--criterion", "masked_lm_accuracy"]
        words += ["--tokens-per-sample", str(self.longest), "--mask-prob", str(MASKED), *VALIDATION]
        command = self.command(spec, seed, PRETRAINING_RATE, spec.pretrain, words)
        return Job(f"{spec.name} masks", tuple(command), folder, spec.pretrain, group=seed)

    def open_training(self, job: Job) -> Training:
        logging.getLogger(fairseq_task.__name__).setLevel(logging.ERROR)  # that weights are random is meant here
        return super().open_training(job) if isinstance(job, CompareJob) else MaskFilling(job)

    def measure(self, training: StepwiseTraining) -> dict[str, float]:
        """`accuracy`, percent, and `loss` on all of the validation split."""
        found = training.evaluate()
        return {"accuracy": 100 * float(found["accuracy"]), "loss": float(found["loss"])}

    def final(self, training: StepwiseTraining) -> dict[str, float]:
        return {**self.measure(training), "test_accuracy": 100 * float(training.evaluate("test")["accuracy"])}

    def describe_data(self) -> dict[str, Any]:
        """What the data was made with, and what simple rules reach, which need no model."""
        return {name: self.prepared.manifest[name] for name in ("settings", "splits", "rules")}

    def data_folders(self) -> list[Path]:
        return [self.prepared.folder]


def _words(name: str, value: Any) -> list[str]:
    """An option of fairseq-train; a switch that is on is a word."""
    return [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
