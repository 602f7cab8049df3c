"""The content of a results.json of `lazyformer compare`, made by hand: what its report reads."""

from typing import Any

SEEDS = ("1", "2", "3")
POINTS = (0, 50, 140, 260, 400)
TOKENS, FLOPS = 2048, 3_000_000_000  # of an update


def example_results() -> dict[str, Any]:
    """Masked language models: a baseline, one of ours with three lengths, one of fairseq."""
    models = {
        "bert": model("bert", "pattern", "(sf)x2", milliseconds=20.0, floor=6.0),
        "mine": model("mine", "pattern", "(sff)x1 f", milliseconds=15.0, floor=5.9),
        "mine@0.8": model("mine", "pattern", "(sff)x1 f", milliseconds=15.0, floor=5.95, share=0.8),
        "mine@0.7": model("mine", "pattern", "(sff)x1 f", milliseconds=15.0, floor=6.1, share=0.7),
        "roberta": model("roberta", "fairseq", None, milliseconds=24.0, floor=6.05),
    }
    return {
        "task": "masked-lm",
        "settings": {
            **{"task": "masked-lm", "data": "data", "seeds": [1, 2, 3], "updates": None, "budget": 8.0},
            **{"shares": [1.0, 0.8, 0.7], "rates": [1e-3, 2e-3], "rate_updates": None, "in_turn": True},
            **{"device": "cpu", "precision": "fp32", "threads": 1, "points": 4, "validation_tokens": 4096},
            **{"recipe": "adam", "warmup_ratio": 0.1, "normalize_before": True, "fairseq_options": []},
            "sizes": {
                **{"embed_dim": 32, "ffn_embed_dim": 128, "heads": 2, "dropout": 0.0, "batch_size": 16},
                **{"tokens_per_sample": 128, "max_positions": 128},
            },
        },
        "command": "lazyformer compare data out --task masked-lm --budget 8s",
        "machine": {"device": "a processor", "threads": 1},
        "versions": {"python": "3.11.0", "torch": "2.13.0", "fairseq-fixed": "0.12.3.1"},
        "data": {
            "folder": "data",
            "checksums": {"dict.txt": "00", "train.bin": "11", "train.idx": "22", "valid.bin": "33", "valid.idx": "44"},
            "unigram_bits": {"valid": 9.0},
            "validation": {"tokens": 4096, "predicted": 614, "seed": 0},
        },
        "baseline": "bert",
        "measure": {"name": "loss", "unit": "bits", "lower_is_better": True},
        "models": models,
    }


def model(of: str, what: str, pattern: str | None, milliseconds: float, floor: float, share: float = 1.0) -> dict:
    """An entry of `models`: its loss falls from 12 bits to about `floor`."""
    updates = round(400 * 20 * share / milliseconds)
    rate = 2e-3
    return {
        "what": what,
        "pattern": pattern,
        "of": of,
        "share": share,
        "sublayers": {"s": 2, "l": 0, "k": 0, "f": 2},
        "ffn_embed_dim": 128,
        "parameters": 300_000,
        "parameters_without_embeddings": 25_000,
        "flops_per_update": FLOPS,
        "tokens_per_update": TOKENS,
        "updates": updates,
        "rate": rate,
        "tries": [
            {"rate": 1e-3, "seed": 1, "loss": floor + 0.2, "updates": updates},
            {"rate": 2e-3, "seed": 1, "loss": floor, "updates": updates},
        ],
        "rate_is_at_an_edge": "highest",
        "peak_memory_bytes": 20_000_000,
        "milliseconds_per_update": spread(milliseconds),
        "runs": {seed: run(updates, milliseconds, floor + 0.02 * number, rate) for number, seed in enumerate(SEEDS)},
    }


def run(updates: int, milliseconds: float, final: float, rate: float) -> dict[str, Any]:
    """One seed: the curve's last point is the end; `final` is measured there too."""
    at = [round(point / POINTS[-1] * updates) for point in POINTS]
    loss = [final + (12 - final) * (1 - made / updates) ** 2 for made in at]
    curve = {
        "updates": at,
        "tokens": [made * TOKENS for made in at],
        "flops": [made * FLOPS for made in at],
        "seconds": [made * milliseconds / 1000 for made in at],
        "loss": loss,
        "accuracy": [100 * (12 - each) / 12 for each in loss],
    }
    return {
        "rate": rate,
        "curve": curve,
        "final": {"loss": loss[-1], "accuracy": curve["accuracy"][-1]},
        "seconds": curve["seconds"][-1],
    }


def spread(middle: float) -> dict[str, float]:
    """As :func:`lazyformer_fairseq.measure.costs.latency.spread`."""
    return {"n": 400, "median": middle, "low": 0.9 * middle, "high": 1.2 * middle}
