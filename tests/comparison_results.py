"""The content of a results.json as `lazyformer compare` writes it, without training anything."""

from collections.abc import Mapping
from typing import Any, Optional

import numpy as np


def a_run(
    losses: list[float], seconds_per_update: float = 0.5, every: int = 10, flops: float = 1e9, tokens: int = 4096
) -> dict[str, Any]:
    """A run that was evaluated every `every` updates, the first time after as many."""
    updates = [every * (number + 1) for number in range(len(losses))]
    curve = {
        "updates": updates,
        "tokens": [tokens * made for made in updates],
        "flops": [flops * made for made in updates],
        "seconds": [seconds_per_update * made for made in updates],
        "loss": list(losses),
        "accuracy": [100 - 10 * loss for loss in losses],
    }
    return {"rate": 1e-3, "curve": curve, "final": {"loss": losses[-1]}, "seconds": curve["seconds"][-1]}


def a_model(runs: Mapping[str, dict], of: str, share: float = 1.0, pattern: Optional[str] = "(sf)x2", **more) -> dict:
    """A model's entry; `more` replaces fields."""
    first = next(iter(runs.values()))
    milliseconds = 1000 * first["seconds"] / first["curve"]["updates"][-1]
    return {
        **{"what": "pattern", "pattern": pattern, "of": of, "share": share, "sublayers": {"s": 2, "f": 2}},
        **{"parameters": 402_656, "parameters_without_embeddings": 140_000, "flops_per_update": 1e9},
        **{"tokens_per_update": 4096, "updates": first["curve"]["updates"][-1], "rate": 1e-3},
        "tries": [{"rate": rate, "seed": 1, "loss": 8 - rate, "updates": 20} for rate in (5e-4, 1e-3, 2e-3)],
        "peak_memory_bytes": 96 * 2**20,
        "milliseconds_per_update": {"n": 40, "median": milliseconds, "low": 0.9 * milliseconds, "high": milliseconds},
        "runs": dict(runs),
        **more,
    }


def results_of(models: Mapping[str, dict], baseline: str, **more) -> dict[str, Any]:
    """The whole; `more` replaces fields."""
    return {
        "task": "masked-lm",
        "settings": {"tokens_per_sample": 512, "batch_size": 8, "seeds": [1, 2, 3]},
        "command": "lazyformer compare data out",
        "machine": {"device": "AMD EPYC, 2 cores"},
        "versions": {"torch": "2.13.0"},
        "data": {
            "folder": "data",
            "checksums": {"train.bin": "aa", "valid.bin": "bb"},
            "yardsticks": {"unigram": 9.0, "counts": 4.5, "context": "the two tokens on either side"},
        },
        "baseline": baseline,
        "measure": {"name": "loss", "unit": "bits", "lower_is_better": True},
        "models": dict(models),
        **more,
    }


def an_example() -> dict[str, Any]:
    """Three models and two shorter trainings, three seeds: one is faster than the baseline, one never gets there."""
    noise = {"1": 0.0, "2": 0.02, "3": -0.02}

    def family(end: float, seconds: float, updates: int = 100, flops: float = 1e9) -> dict[str, dict]:
        shares = np.arange(1, updates // 10 + 1) / (updates / 10)
        return {
            seed: a_run(
                [round(9 - (9 - end) * float(share) ** 0.5 + more, 4) for share in shares], seconds, flops=flops
            )
            for seed, more in noise.items()
        }

    models = {
        "bert": a_model(family(7.5, 0.5), "bert"),
        "lazy_50%": a_model(
            family(7.2, 0.4, flops=8e8), "lazy_50%", pattern="(sflf)x1", rate=2e-3, peak_memory_bytes=80 * 2**20
        ),
        "lazy_50%@0.7": a_model(family(7.4, 0.4, 70, 8e8), "lazy_50%", 0.7, "(sflf)x1", rate=2e-3),
        "lazy_50%@0.5": a_model(family(7.6, 0.4, 50, 8e8), "lazy_50%", 0.5, "(sflf)x1", rate=2e-3),
        "hf:bert": a_model(family(7.9, 0.7), "hf:bert", pattern=None, what="huggingface", parameters=403_000),
    }
    return results_of(models, "bert")
