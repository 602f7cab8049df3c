"""README.md of an exported folder, in Markdown with the header that the Hub reads; the licence is left out."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lazyformer_fairseq.modules.networks.heads import SPAN

UNKNOWN = "unknown: the checkpoint does not say"
CARD = """\
---
library_name: transformers
pipeline_tag: {pipeline}
tags:
- lazyformer
- lazyformer_fairseq{tag}
---

# {name}

An encoder that lazyformer_fairseq trained, with the sublayer pattern `{pattern}`.

| | |
|---|---|
{rows}

## Load it

```python
from transformers import AutoTokenizer, {auto}

tokenizer = AutoTokenizer.from_pretrained("{name}"{trust})
model = {auto}.from_pretrained("{name}"{trust})
```

{code}

## Licence

Whoever publishes this model chooses its licence, and writes it here and in the header (`license:`). The data
it was trained on may bind them.
"""
PLAIN_BERT = """\
It is a plain BERT: transformers loads it without code of its own. Pad on the right, and pass an
attention mask, as the tokenizer does."""
OWN_CODE = """\
`modeling_lazyformer.py` is all its code; it needs torch and transformers. Where lazyformer_fairseq is
installed, `import lazyformer_fairseq.huggingface` first, and leave `trust_remote_code` out."""


def model_card(source: Any, has_code: bool, name: str) -> str:
    """Of the folder `name`.

    Args:
        source: the checkpoint, an ``export.Source``.
        has_code: whether the folder brings code of its own.
    """
    pipeline, auto = "fill-mask", "AutoModelForMaskedLM"
    if source.head is not None:
        is_span = source.head.kind == SPAN
        pipeline = "question-answering" if is_span else "text-classification"
        auto = "AutoModelForQuestionAnswering" if is_span else "AutoModelForSequenceClassification"
    return CARD.format(
        pipeline=pipeline,
        tag="" if has_code else "\n- bert",
        name=name,
        pattern=source.cfg.sublayer_pattern,
        rows="\n".join(f"| {title} | {value} |" for title, value in _rows(source).items()),
        auto=auto,
        trust=", trust_remote_code=True" if has_code else "",
        code=OWN_CODE if has_code else PLAIN_BERT,
    )


def _rows(source: Any) -> dict[str, str]:
    cfg, head = source.cfg, source.head
    buckets, distance = cfg.relative_position_buckets, cfg.relative_position_max_distance
    named = source.model.named_parameters()
    parameters = sum(weight.numel() for name, weight in named if not name.startswith("classification_heads."))
    rows = {
        "sublayers": f"`{cfg.sublayer_pattern}`, {'pre' if cfg.encoder_normalize_before else 'post'}-norm",
        "parameters": f"{parameters:,}, without classification heads",
        "width, feed-forward, heads": f"{cfg.encoder_embed_dim}, {cfg.encoder_ffn_embed_dim}, "
        f"{cfg.encoder_attention_heads}",
        "positions": f"{cfg.max_positions}",
        "relative position bias": f"{buckets} buckets up to {distance} tokens (T5)" if buckets else "none",
        "vocabulary": f"{len(source.tokenizer.dictionary):,} symbols",
        **source.training,
    }
    if head is not None and head.kind == SPAN:
        rows["span head"] = f"{head.name}: where an answer starts, and where it ends"
    elif head is not None:
        labels = ", ".join(head.labels) or ("a score" if head.outputs == 1 else "without names")
        rows["classification head"] = f"{head.name}: {labels}"
    return rows


def training_of(state: Mapping[str, Any]) -> dict[str, str]:
    """What a checkpoint's settings and meters know of its training, in words: data (without where it is), task,
    updates of each run, means of the last validation."""
    extra, task = state.get("extra_state") or {}, (state.get("cfg") or {}).get("task") or {}
    folders = [Path(folder).name for folder in str(task.get("data") or "").split(":") if folder]
    runs = [int(run.get("num_updates", 0)) for run in state.get("optimizer_history") or ()]
    meters = dict(extra.get("metrics") or {}).get("valid") or ()
    losses = [
        f"{name} {float(meter['sum']) / float(meter['count']):.4g}"
        for _, name, kind, meter in meters
        if kind == "AverageMeter" and name not in ("wpb", "bsz") and meter.get("count")
    ]
    return {
        "trained on": ", ".join(f"`{folder}`" for folder in folders) or UNKNOWN,
        "task": f"`{task['_name']}`" if task.get("_name") else UNKNOWN,
        "updates": " and then ".join(f"{updates:,}" for updates in runs if updates) or UNKNOWN,
        "last validation": ", ".join(losses) or UNKNOWN,
    }
