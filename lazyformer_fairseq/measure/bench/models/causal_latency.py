"""Causal language models beside Transformer-XL: parameters, FLOPs and latency, as in PAR Transformer's Table 6."""

from types import SimpleNamespace
from typing import Any, Optional

import torch
from fairseq.data import Dictionary

from lazyformer_fairseq.fairseq_plugin.models.causal_lm import CausalLanguageModel
from lazyformer_fairseq.fairseq_plugin.models.causal_lm_config import CausalLMConfig
from lazyformer_fairseq.measure.bench.models.contenders import a_dictionary
from lazyformer_fairseq.measure.bench.models.settings import BenchSettings
from lazyformer_fairseq.measure.costs.flops import count_flops
from lazyformer_fairseq.measure.costs.latency import Timing, measure
from lazyformer_fairseq.measure.costs.machine import PRECISIONS
from lazyformer_fairseq.measure.costs.matrix_peak import matrix_peak, matrix_products
from lazyformer_fairseq.measure.costs.model_latency import next_segment
from lazyformer_fairseq.patterns.architectures import CAUSAL_ARCHITECTURES

WORDS = 267_735  # of WikiText-103, with the special symbols
TRANSFORMER_XL = "transformer_xl_base"
FREQUENT = 19_997  # ids below are in the adaptive softmax's first band; the FLOPs count only that band


def measure_causal_models(settings: BenchSettings, precision: str, seconds: Optional[float]) -> list[dict[str, Any]]:
    """Rows of the causal archs at batch 1, with `against` Transformer-XL, which always takes part.

    `settings.tgt_len` tokens are scored, `settings.mem_len` are remembered; for `seconds` see :func:`measure`.
    """
    baseline = (
        TRANSFORMER_XL if not all(name.endswith("_tiny") for name in settings.causal_archs) else "transformer_xl_tiny"
    )
    names = list(dict.fromkeys([baseline, *settings.causal_archs]))
    dictionary = a_dictionary(WORDS if baseline == TRANSFORMER_XL else 1000)
    models = {name: _build(name, dictionary, settings, precision) for name in names}
    tokens_BT = torch.randint(5, min(FREQUENT, len(dictionary)), (1, settings.tgt_len), device=settings.device)
    things = {name: next_segment(model, tokens_BT, tokens_BT, settings.mem_len) for name, model in models.items()}
    things |= matrix_products(settings.device, PRECISIONS[precision])
    timings = measure(things, settings.rounds, 1, settings.device, description="causal models", seconds=seconds)
    peak = matrix_peak(timings)
    rows = [_describe(name, models[name], timings[name], settings, precision, peak) for name in names]
    for row in rows:
        row["against"] = {
            f"our {baseline}": {
                "speedup": rows[0]["seconds"]["median"] / row["seconds"]["median"],
                "limit": rows[0]["flops"] / row["flops"],
            }
        }
    return rows


def _build(name: str, dictionary: Dictionary, settings: BenchSettings, precision: str) -> CausalLanguageModel:
    options = {**CAUSAL_ARCHITECTURES[name].options(), "mem_len": settings.mem_len}
    model = CausalLanguageModel.build_model(CausalLMConfig(**options), SimpleNamespace(source_dictionary=dictionary))
    return model.to(settings.device, PRECISIONS[precision]).eval()


def _describe(
    name: str, model: CausalLanguageModel, timing: Timing, settings: BenchSettings, precision: str, peak: float
) -> dict[str, Any]:
    pattern = CAUSAL_ARCHITECTURES[name].sublayer_pattern
    flops = count_flops(pattern, model.decoder.sizes, settings.tgt_len, settings.mem_len)
    return {
        "model": name,
        "pattern": pattern,
        "precision": precision,
        "tgt_len": settings.tgt_len,
        "mem_len": settings.mem_len,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "flops": flops,
        "seconds": timing.as_json(),
        "share_of_peak": flops / timing.median / peak,
    }
