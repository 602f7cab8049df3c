"""Times updates with transformers' Trainer, alternating between our models and BertForMaskedLM (sdpa).

    python scripts/bench_trainer.py --arch bert_tiny --arch bert_base

All models have the sizes of --arch, the same batch, the same dropout, and Trainer's AdamW. An update consists of
Trainer's training step, gradient clipping, optimizer and schedule. The forward and backward pass of the encoder is
measured separately, because our model computes logits only at masked positions. The target is that an update of our
(sf)xN takes no longer than one of BertForMaskedLM. Nothing else should run on the machine.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor
from transformers import BertConfig, BertForMaskedLM, BertModel, PreTrainedModel, Trainer, TrainingArguments

from lazyformer_fairseq import LazyFormerConfig, LazyFormerForMaskedLM, huggingface
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation.costs.latency import measure
from lazyformer_fairseq.evaluation.costs.machine import describe_machine, device_named
from lazyformer_fairseq.modules.timing import SELECTOR
from lazyformer_fairseq.patterns.grammar import plan

BERT, OURS, BAR = "BertForMaskedLM, sdpa", "ours, (sf)xN", 1.0


def update(model: PreTrainedModel, inputs: dict[str, Tensor], arguments: TrainingArguments) -> Callable[[], Any]:
    """Return a function that makes an update on one batch as Trainer does."""
    trainer = Trainer(model, arguments, train_dataset=[0])
    trainer.create_optimizer_and_scheduler(arguments.max_steps)
    trainer.model, trainer.optimizer = trainer.accelerator.prepare(trainer.model, trainer.optimizer)
    trainer.current_gradient_accumulation_steps = 1
    predicted = inputs["labels"].ne(-100).sum()

    def step() -> None:
        trainer.training_step(trainer.model, inputs, predicted)
        trainer.accelerator.clip_grad_norm_(trainer.model.parameters(), arguments.max_grad_norm)
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
        trainer.model.zero_grad()

    return step


def encode(model: PreTrainedModel, ids: Tensor) -> Callable[[], Any]:
    """Return a function that runs an encoder's forward and backward pass in training mode."""

    def step() -> None:
        found = model(ids).last_hidden_state
        found.backward(found.detach())
        model.zero_grad()

    model.train()
    return step


def models(arch: str, patterns: list[str], words: int, tokens: int) -> dict[str, tuple[Any, type, type]]:
    """Return for each model its config, the class of its masked LM and the class of its encoder, by name."""
    sizes = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": tokens}
    given = {**sizes, "relative_position_buckets": 0, "type_vocab_size": 2, "layer_norm_eps": 1e-12}
    ours = LazyFormerConfig.from_arch(arch, words, **given)
    layers = len(plan(ours.sublayer_pattern)) // 2
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
    theirs = BertConfig(**sizes, num_hidden_layers=layers, **{name: getattr(ours, name) for name in names})
    theirs._attn_implementation = "sdpa"
    found = {BERT: (theirs, BertForMaskedLM, BertModel)}
    for name, pattern in {OURS: f"(sf)x{layers}", **dict(zip(patterns, patterns, strict=True))}.items():
        config = LazyFormerConfig.from_arch(arch, words, **given, sublayer_pattern=pattern)
        found[name] = config, LazyFormerForMaskedLM, huggingface.LazyFormerModel
    return found


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form, allow_abbrev=False)
    parser.add_argument(
        "--arch", action="append", help="an (sf)xN arch that sets all models' sizes (default: bert_tiny, bert_base)"
    )
    parser.add_argument(
        "--sublayer-pattern", action="append", default=[], help="another pattern to measure at these sizes"
    )
    parser.add_argument("--vocab-size", type=int, default=32768, help="default: %(default)s")
    parser.add_argument("--tokens-per-sample", type=int, default=128, help="default: %(default)s")
    parser.add_argument("--batch-size", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=10, help="samples per measurement; the median is reported")
    parser.add_argument("--bf16", action="store_true", help="use Trainer's --bf16, and autocast for the encoder")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if available")
    given = parser.parse_args()
    device, tokens = device_named(given.device), given.tokens_per_sample
    SELECTOR.time_at_once()
    chance = torch.Generator().manual_seed(1)
    ids = torch.randint(4, given.vocab_size, (given.batch_size, tokens), generator=chance)
    labels = torch.where(torch.rand(ids.shape, generator=chance) < 0.15, ids, -100)
    inputs = {"input_ids": ids.to(device), "labels": labels.to(device)}
    print(*(f"{name}: {value}" for name, value in describe_machine(device).items()), sep="\n")
    for arch in given.arch or ["bert_tiny", "bert_base"]:
        with TemporaryDirectory() as folder:
            how = {"use_cpu": device == "cpu", "bf16": given.bf16, "report_to": [], "max_steps": 10**6}
            arguments = TrainingArguments(str(Path(folder)), **how)
            callables: dict[str, Callable[[], Any]] = {}
            rows = models(arch, given.sublayer_pattern, given.vocab_size, tokens)
            for name, (config, masked_lm, encoder) in rows.items():
                callables[f"{name}: update"] = update(masked_lm(config).to(device), inputs, arguments)
                alone = {"add_pooling_layer": False} if encoder is BertModel else {}
                callables[f"{name}: encoder"] = encode(encoder(config, **alone).to(device), inputs["input_ids"])
            with torch.autocast(device, torch.bfloat16, given.bf16):
                timings = measure(callables, rounds=given.rounds, device=device)
        table = []
        for name in rows:
            row = {f"{arch}, {given.batch_size} x {tokens}": name}
            for what in ("update", "encoder"):
                times = timings[f"{BERT}: {what}"].median / timings[f"{name}: {what}"].median
                row |= {
                    f"{what}, ms": f"{1e3 * timings[f'{name}: {what}'].median:.1f}",
                    f"{what}, speed-up": f"{times:.2f}",
                }
            table.append(row)
        print(f"\n{tabulate(table, 'keys', tablefmt='github', disable_numparse=True)}\n(target for an update: {BAR})")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(str(error))
