"""Times whole updates of our models and transformers' models alternately, and writes the results as JSON.

    python scripts/gpu/throughput.py throughput.json --budget 450

Updates are the same as in `lazyformer bench`. transformers' models use sdpa and, if it is installed, flash-attn. Their
heads, like our models', receive only the masked positions. No model has attention dropout.
"""

import argparse
import importlib.util
from itertools import product
from pathlib import Path

from lazyformer_fairseq.evaluation.bench import models
from lazyformer_fairseq.evaluation.bench.models import BenchModel, OnBackEnd, our_model
from lazyformer_fairseq.evaluation.bench.run import run_bench
from lazyformer_fairseq.evaluation.bench.settings import BenchSettings
from lazyformer_fairseq.evaluation.costs.machine import PRECISIONS
from lazyformer_fairseq.modules.networks.huggingface_bert import (
    HuggingFaceBert,
    HuggingFaceBertOptions,
    has_transformers,
)
from lazyformer_fairseq.modules.timing import SELECTOR
from lazyformer_fairseq.patterns.architectures import ARCHITECTURES
from lazyformer_fairseq.patterns.grammar import plan
from lazyformer_fairseq.patterns.kinds import DISTRIBUTION
from lazyformer_fairseq.storage.json_files import write_json

OURS = ("modernbert", "lazy_modernbert", "bert", "lazyformer_m2x6_s")
LENGTHS = (1024, 8192, 512)  # the first two have targets, so the last one is skipped if there is not enough time
TINY_LENGTHS = (16, 32, 8)
THEIRS = ("modernbert", "bert")  # transformers' names, and ours without _base


def theirs(name: str, like: BenchModel, longest: int, attention: str) -> BenchModel:
    """Return transformers' model with the same sizes and FLOPs as ours."""
    sizes = like.sizes
    options = HuggingFaceBertOptions(
        model_type=name,
        encoder_layers=sum(DISTRIBUTION in planned.kind.hands_on for planned in plan(like.pattern)),
        encoder_embed_dim=sizes.embed_dim,
        encoder_ffn_embed_dim=sizes.ffn_embed_dim,
        encoder_attention_heads=sizes.num_heads,
        dropout=like.model.cfg.dropout,
        max_positions=longest,
    )
    model = HuggingFaceBert(options, models.PIECES)
    model.bert.set_attn_implementation(attention)
    return BenchModel(model, like.pattern, sizes)


def build_all(settings: BenchSettings, precision: str) -> list[OnBackEnd]:
    """Return all models, transformers' first; if the lengths are tiny, return tiny (`_tiny`) versions instead."""
    longest = max(settings.lengths)
    ours = {}
    for name in OURS:
        arch = f"{name}_base" if f"{name}_base" in ARCHITECTURES else name
        if settings.lengths == TINY_LENGTHS:
            arch = f"{name}_tiny"
        ours[name] = our_model({**ARCHITECTURES[arch].options(), "attention_dropout": 0.0}, longest)
    found = []
    implementations = []
    if has_transformers():
        implementations.append("sdpa")
    if implementations and importlib.util.find_spec("flash_attn"):
        implementations.append("flash_attention_2")
    for name, attention in product(THEIRS, implementations):
        model = theirs(name, ours[name], longest, attention)
        found.append(OnBackEnd(f"transformers' {name}", model, attention, 0, None))
    for name, model in ours.items():
        found.append(OnBackEnd(name, model, "auto", model.sizes.relative_position_buckets, None))
    for each in found:
        each.model.model.to(settings.device, PRECISIONS[precision])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--budget", type=float, help="seconds after which no new round begins")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--tiny", action="store_true", help="use tiny models and few tokens")
    given = parser.parse_args()
    SELECTOR.time_at_once()
    lengths, tokens, rounds = (TINY_LENGTHS, 32, 2) if given.tiny else (LENGTHS, 32_768, 20)
    settings = BenchSettings(
        lengths=lengths,
        tokens=tokens,
        rounds=rounds,
        precisions=(given.precision,),
        workloads=("training",),
        device=given.device,
        budget=given.budget,
    )
    write_json(given.out, {"lengths": lengths, **run_bench(settings, build_all)})


if __name__ == "__main__":
    main()
