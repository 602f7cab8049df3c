"""What is exported: a checkpoint's model, the head that goes along, what its model card says."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional, Union

from lazyformer_fairseq.arguments import checkpoint_at
from lazyformer_fairseq.data.glue import TASKS
from lazyformer_fairseq.errors import UserError, nearest
from lazyformer_fairseq.fairseq_plugin.models import hub
from lazyformer_fairseq.fairseq_plugin.models.checkpoint_match import PREFIX, heads_in_checkpoint
from lazyformer_fairseq.fairseq_plugin.models.lazyformer import LazyFormerModel
from lazyformer_fairseq.fairseq_plugin.reliability.checkpoint_loading import load_safely
from lazyformer_fairseq.modules.networks.heads import NEXT_SENTENCE, SPAN

CAUSAL_WEIGHT = "decoder.embedding."  # what names of a language model's weights begin with


@dataclass(frozen=True)
class Head:
    """A head: its name in the checkpoint, how many outputs, "dense", "linear" or "span", and the names of classes."""

    name: str
    outputs: int
    kind: str
    labels: tuple[str, ...] = ()

    @property
    def is_regression(self) -> bool:
        return self.outputs == 1

    @property
    def is_of_spans(self) -> bool:
        """Whether it gives each token the logits of a start and an end, and not classes to a text."""
        return self.kind == SPAN


@dataclass(frozen=True)
class Training:
    """What a checkpoint knows of its training; None and empty where it does not.

    Attributes:
        data: names of folders, without where they are.
        updates: of each run, the last one's last.
        loss: value and name of what the last validation minimised or maximised.
    """

    name: str
    task: str = ""
    data: tuple[str, ...] = ()
    updates: tuple[int, ...] = ()
    tokens: Optional[int] = None
    losses: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Source:
    """A checkpoint to export.

    Attributes:
        model: the fairseq model, in evaluation mode.
        weights: of it, by name, each once.
    """

    model: LazyFormerModel
    tokenizer: Any
    head: Optional[Head]
    training: Training

    @property
    def cfg(self) -> Any:
        return self.model.cfg

    @property
    def weights(self) -> dict[str, Any]:
        return self.model.state_dict()


def read_source(folder: Union[str, Path], checkpoint_file: Optional[str] = None, head: Optional[str] = None) -> Source:
    """Reads a checkpoint and its tokenizer.

    Args:
        head: name of a classification head; None for the only one, if there is one.

    Raises:
        UserError: what `load` raises; a language model; no such head, or several.
    """
    path = checkpoint_at(Path(folder), checkpoint_file)
    state = load_safely(path)
    if any(str(name).startswith(CAUSAL_WEIGHT) for name in state.get("model", ())):
        raise UserError(
            f"{path}: is a causal language model; transformers gets encoders alone. It has no model that remembers the "
            "segments before as Transformer-XL does (its own was removed), so use it by lazyformer_fairseq"
        )
    loaded = hub.load_state(LazyFormerModel, state, path)
    return Source(loaded.model, loaded.tokenizer, choose_head(state["model"], head, path), training_of(state, path))


def choose_head(weights: Mapping[str, Any], name: Optional[str], path: Path) -> Optional[Head]:
    """The classification or span head of this name, or the only one; that of pre-training must be named."""
    heads = heads_in_checkpoint(dict(weights))
    fine_tuned = [head for head in heads if head != NEXT_SENTENCE]
    if name is None and len(fine_tuned) > 1:
        raise UserError(
            f"{path}: has classification heads {', '.join(heads)}, the folder gets one: choose it by --head"
        )
    if name is not None and name not in heads:
        known = ", ".join(heads) or "none"
        raise UserError(f"{path}: has no classification head {name!r}, but {known}{nearest(name, heads)}")
    chosen = name or next(iter(fine_tuned), None)
    if chosen is None:
        return None
    outputs, kind = heads[chosen]
    task = next((task for task in TASKS.values() if task.head_name == chosen and not task.model_of), None)
    labels = task.labels if task is not None and len(task.labels) == outputs else ()
    return Head(chosen, outputs, kind, labels)


def head_weights(weights: Mapping[str, Any], head: Head) -> dict[str, Any]:
    """By names within the head."""
    prefix = f"{PREFIX}{head.name}."
    return {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}


def training_of(state: Mapping[str, Any], path: Path) -> Training:
    """From a checkpoint's settings and meters; what is not there stays unknown."""
    cfg, extra = state.get("cfg") or {}, state.get("extra_state") or {}
    task = cfg.get("task") or {}
    data = tuple(Path(folder).name for folder in str(task.get("data") or "").split(":") if folder)
    updates = tuple(int(run.get("num_updates", 0)) for run in state.get("optimizer_history") or ())
    return Training(path.parent.name, str(task.get("_name") or ""), data, updates, losses=_losses(extra))


def _losses(extra: Mapping[str, Any]) -> dict[str, float]:
    """Means of the last validation, by name."""
    meters = dict(extra.get("metrics") or {}).get("valid") or ()
    found = {}
    for _, name, kind, meter in meters:
        if kind == "AverageMeter" and name not in ("wpb", "bsz") and meter.get("count"):
            found[name] = float(meter["sum"]) / float(meter["count"])
    return found


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
