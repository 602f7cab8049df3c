"""The model card: what is known of a checkpoint, and how to load what was written."""

from lazyformer_fairseq.huggingface.export.source import Source, Training
from lazyformer_fairseq.modules.networks.heads import SPAN

_TASKS = {  # by the kind of head
    None: ("fill-mask", "AutoModelForMaskedLM"),
    SPAN: ("question-answering", "AutoModelForQuestionAnswering"),
}
_CLASSES = ("text-classification", "AutoModelForSequenceClassification")


def model_card(source: Source, form: str, name: str) -> str:
    """README.md of the folder `name`, in Markdown with the header that the Hub reads; the licence is left out."""
    pipeline, auto_class = _TASKS.get(source.head and source.head.kind, _CLASSES)
    trust = "" if form == "bert" else ", trust_remote_code=True"
    lines = [
        "---",
        "library_name: transformers",
        f"pipeline_tag: {pipeline}",
        "tags:",
        *(f"- {tag}" for tag in ("lazyformer", "lazyformer_fairseq", *(() if form == "custom" else ("bert",)))),
        "---",
        "",
        f"# {name}",
        "",
        f"An encoder that lazyformer_fairseq trained, with the sublayer pattern `{source.cfg.sublayer_pattern}`.",
        "",
        *_table(source),
        "",
        "## Load it",
        "",
        "```python",
        f"from transformers import AutoTokenizer, {auto_class}",
        "",
        f'tokenizer = AutoTokenizer.from_pretrained("{name}"{trust})',
        f'model = {auto_class}.from_pretrained("{name}"{trust})',
        "```",
        "",
        *_about_code(form),
        "",
        "## Licence",
        "",
        "Whoever publishes this model chooses its licence, and writes it here and in the header (`license:`). The data",
        "it was trained on may bind them.",
        "",
    ]
    return "\n".join(lines)


def _table(source: Source) -> list[str]:
    cfg, training = source.cfg, source.training
    rows = {
        "sublayers": f"`{cfg.sublayer_pattern}`, {'pre' if cfg.encoder_normalize_before else 'post'}-norm",
        "parameters": f"{count_parameters(source):,}, without classification heads",
        "width, feed-forward, heads": f"{cfg.encoder_embed_dim}, {cfg.encoder_ffn_embed_dim}, "
        f"{cfg.encoder_attention_heads}",
        "positions": f"{cfg.max_positions}",
        "relative position bias": f"{cfg.relative_position_buckets} buckets up to {cfg.relative_position_max_distance} "
        "tokens (T5)"
        if cfg.relative_position_buckets
        else "none",
        "vocabulary": f"{len(source.tokenizer.dictionary):,} symbols",
        **_known(training),
    }
    if source.head is not None and source.head.is_of_spans:
        rows["span head"] = f"{source.head.name}: where an answer starts, and where it ends"
    elif source.head is not None:
        labels = ", ".join(source.head.labels) or ("a score" if source.head.is_regression else "without names")
        rows["classification head"] = f"{source.head.name}: {labels}"
    return ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())]


def _known(training: Training) -> dict[str, str]:
    """What there is to say about training."""
    unknown = "unknown: the checkpoint does not say"
    runs = [f"{updates:,}" for updates in training.updates if updates]
    losses = [f"{name} {value:.4g}" for name, value in training.losses.items()]
    return {
        "trained on": ", ".join(f"`{folder}`" for folder in training.data) or unknown,
        "task": f"`{training.task}`" if training.task else unknown,
        "updates": " and then ".join(runs) or unknown,
        "last validation": ", ".join(losses) or unknown,
    }


def _about_code(form: str) -> list[str]:
    if form == "bert":
        return [
            "It is a plain BERT: transformers loads it without code of its own. Pad on the right, and pass an",
            "attention mask, as the tokenizer does.",
        ]
    return [
        "`modeling_lazyformer.py` is all its code; it needs torch and transformers. Where lazyformer_fairseq is",
        "installed, `import lazyformer_fairseq.huggingface` first, and leave `trust_remote_code` out.",
    ]


def count_parameters(source: Source) -> int:
    """Each weight once."""
    named = source.model.named_parameters()
    return sum(weight.numel() for name, weight in named if not name.startswith("classification_heads."))
