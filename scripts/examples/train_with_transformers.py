"""Pre-train an encoder with transformers' Trainer, and save it for transformers.

    python scripts/examples/train_with_transformers.py DATA OUT [--pattern '(sflf)x2'] [--updates 100]

DATA is a corpus written by `lazyformer corpus`. The model is saved in OUT, and Trainer's checkpoints in OUT/trainer.
With the tests' toy corpus, tests/fixtures/checkpoints/m2x2/data, this takes about 15 seconds on one core.
docs/trainers.md explains the components, and shows how to write your own training loop.
"""

import argparse
from pathlib import Path

from transformers import TrainingArguments

from lazyformer_fairseq import LazyFormerConfig, LazyFormerForMaskedLM, open_masked_text
from lazyformer_fairseq.huggingface import MaskedTextCollator, ShardTrainer

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("data", type=Path)
parser.add_argument("out", type=Path)
parser.add_argument("--pattern", default="(sflf)x2", help="the model's pattern (default: %(default)s)")
parser.add_argument("--updates", type=int, default=100, help="number of updates (default: %(default)s)")
options = parser.parse_args()

text = open_masked_text(str(options.data), tokens_per_sample=64)
config = LazyFormerConfig(
    sublayer_pattern=options.pattern,
    vocab_size=len(text.dictionary),
    hidden_size=64,
    num_attention_heads=4,
    intermediate_size=256,
    max_position_embeddings=64,
)
arguments = TrainingArguments(
    str(options.out / "trainer"),
    max_steps=options.updates,
    per_device_train_batch_size=16,
    learning_rate=1e-3,
    report_to=[],
    remove_unused_columns=False,
)
trainer = ShardTrainer(
    LazyFormerForMaskedLM(config), arguments, MaskedTextCollator(text), text.split("train"), text.split("valid")
)
trainer.train()
found = trainer.evaluate()
print(f"{found['eval_loss']:.2f} nats or {found['eval_bits']:.2f} bits per masked token")
print(f"perplexity {found['eval_perplexity']:.1f}")
trainer.save_model(str(options.out))
