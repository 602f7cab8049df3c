"""Times whole updates of models of ours and of transformers in turn, and writes them as JSON.

    python scripts/gpu/throughput.py throughput.json --budget 450

An update is that of `lazyformer bench`. transformers' models compute by sdpa and, where flash-attn can be imported, by
that; their heads get the masked positions alone, as ours. No model has dropout in attention.
"""

import argparse
import importlib.util
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lazyformer_fairseq.evaluation.bench import models
from lazyformer_fairseq.evaluation.bench.models import BenchModel, OnBackEnd, our_model
from lazyformer_fairseq.evaluation.bench.run import Cell, Update, describe
from lazyformer_fairseq.evaluation.costs import latency
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
LENGTHS = (1024, 8192, 512)  # the first two have bars, so the last is what a lack of time leaves out
TINY_LENGTHS = (16, 32, 8)
THEIRS = ("modernbert", "bert")  # transformers' names, and ours without _base


def theirs(name: str, like: BenchModel, longest: int, attention: str) -> BenchModel:
    """transformers' model in the sizes of ours, and with the FLOPs of ours."""
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


def build_all(longest: int, is_tiny: bool) -> list[OnBackEnd]:
    """All models, those of transformers first."""
    ours = {}
    for name in OURS:
        arch = f"{name}_base" if f"{name}_base" in ARCHITECTURES else name
        if is_tiny:
            arch = f"{name}_tiny"
        ours[name] = our_model({**ARCHITECTURES[arch].options(), "attention_dropout": 0.0}, longest)
    found = []
    implementations = []
    if has_transformers():
        implementations.append("sdpa")
    if implementations and importlib.util.find_spec("flash_attn"):
        implementations.append("flash_attention_2")
    for name in THEIRS:
        for attention in implementations:
            model = theirs(name, ours[name], longest, attention)
            found.append(OnBackEnd(f"transformers' {name}", model, attention, 0, None))
    for name, model in ours.items():
        found.append(OnBackEnd(name, model, "auto", model.sizes.relative_position_buckets, None))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds; no round begins after them")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--tiny", action="store_true", help="tiny twins on few tokens")
    given = parser.parse_args()
    SELECTOR.time_at_once()
    lengths, tokens, rounds = (TINY_LENGTHS, 32, 2) if given.tiny else (LENGTHS, 32_768, 20)
    compared = build_all(max(lengths), given.tiny)
    for each in compared:
        each.model.model.to(given.device, PRECISIONS[given.precision])
    cells = [Cell("training", given.precision, length, max(1, tokens // length)) for length in lengths]
    tried = latency.Tried({}, {}, {})

    def things_of(cell: Cell) -> latency.Things:
        nonlocal tried
        updates = {each: Update(each.model, cell.batch, cell.time) for each in compared}
        seconds = given.budget / len(cells) / 2
        tried = latency.try_out({each.name: each.prepared(updates[each]) for each in compared}, given.device, seconds)
        for each in compared:
            if each.name in tried.memory:
                tried.memory[each.name] += updates[each].held_bytes()
        return tried.things | latency.matrix_products(given.device, PRECISIONS[given.precision])

    found: list[dict[str, Any]] = []
    for cell, timings in latency.measure_in_turn(cells, things_of, given.device, rounds, given.budget):
        peak = latency.matrix_peak(timings)
        rows = [
            describe(each, cell, timings[each.name], tried.memory[each.name], peak)
            for each in compared
            if each.name in tried.things
        ]
        found.append({**asdict(cell), "rows": rows, "left_out": tried.left_out})
        write_json(given.out, {"lengths": lengths, "cells": found})


if __name__ == "__main__":
    main()
