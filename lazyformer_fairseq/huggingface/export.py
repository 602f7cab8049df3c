"""``lazyformer export --to huggingface``: a folder that transformers loads, as a model of ours or as a real BERT.

A plain ``(sf)xN`` becomes a BERT of transformers, without code of its own, and what is a ModernBERT one of these. BERT
counts positions from the left, padding included, and sees all tokens without an attention mask: so the two agree on
inputs that are padded on the right and have one. The model's `dense` classification head is BERT's pooler and
classifier, its head for next sentences BERT's pooler and ``cls.seq_relationship``, its span head ``qa_outputs``.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Optional, Union

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from lazyformer_fairseq.arguments import checkpoint_at
from lazyformer_fairseq.data.labelled_files import TaskDescription
from lazyformer_fairseq.errors import UserError, nearest
from lazyformer_fairseq.fairseq_plugin.models import hub
from lazyformer_fairseq.fairseq_plugin.models.checkpoint_match import (
    PREFIX,
    heads_in_checkpoint,
    lm_head_never_trained,
    pooler_in_checkpoint,
)
from lazyformer_fairseq.fairseq_plugin.models.lazyformer import LazyFormerModel, norms_and_biases
from lazyformer_fairseq.fairseq_plugin.reliability.checkpoints import load_safely
from lazyformer_fairseq.huggingface import families
from lazyformer_fairseq.huggingface.exported import heads, modelling
from lazyformer_fairseq.huggingface.merge import merged_code, plan_as_json
from lazyformer_fairseq.huggingface.tokenizer import write_tokenizer
from lazyformer_fairseq.modules.networks.heads import NEXT_SENTENCE, SPAN
from lazyformer_fairseq.patterns.grammar import expand
from lazyformer_fairseq.patterns.kinds import RMS
from lazyformer_fairseq.storage.atomic import atomic_folder, refuse_filled_folder

AUTO, BERT, MODERN, CUSTOM = FORMS = ("auto", "bert", families.MODERN, "custom")
NAMES = {BERT: "BERT", MODERN: "ModernBERT"}  # of those that transformers has
MODERN_LAYER = re.compile(r"s\[(?:window=(\d+),)?rope=(\d+)\]f\[gate=(\w+)\]")
WEIGHTS_FILE, CARD_FILE = "model.safetensors", "README.md"
CLOSE = 1e-6  # of numbers around 1, between two ways to compute the same in double precision


class Head(NamedTuple):
    """A head: its name in the checkpoint, how many outputs, "dense", "linear" or "span", and the names of classes."""

    name: str
    outputs: int
    kind: str
    labels: tuple[str, ...] = ()


@dataclass(frozen=True)
class Source:
    """A checkpoint to export.

    Attributes:
        model: the fairseq model, in evaluation mode.
        head: the one that goes along.
        training: what the checkpoint knows of its training, in words, for the card.
        weights: of the model, by name, each once.
    """

    model: LazyFormerModel
    tokenizer: Any
    head: Optional[Head] = None
    training: Mapping[str, str] = field(default_factory=dict)

    @property
    def cfg(self) -> Any:
        return self.model.cfg

    @property
    def weights(self) -> dict[str, Any]:
        return self.model.state_dict()

    @property
    def has_lm_head(self) -> bool:
        """Whether its masked-LM head goes along: one that never trained stays behind."""
        return not lm_head_never_trained(self.weights)

    @property
    def use(self) -> "Use":
        if self.head is None:
            return USES["lm_head" if self.has_lm_head else ""]
        return USES["qa_outputs" if self.head.kind == SPAN else "classifier"]


def export_to_huggingface(
    folder: Union[str, Path],
    out: Union[str, Path],
    checkpoint_file: Optional[str] = None,
    form: str = AUTO,
    head: Optional[str] = None,
) -> str:
    """Writes a folder that transformers loads, whole or not at all.

    Before it takes its name, the model is read back from it and compared with the checkpoint's.

    Args:
        folder: of checkpoints; see :func:`lazyformer_fairseq.fairseq_plugin.models.hub.load`.
        out: must not exist yet, or be empty.
        form: "bert" or "modernbert" for one of transformers, "custom" for a model with code of its own, "auto" for the
            first that is possible.
        head: the classification or span head to take along; None for the only one, if there is one.

    Returns:
        The form that was chosen.

    Raises:
        UserError: what `load` raises; a language model; no such head, or several; the model is no BERT; a kind whose
            code cannot be exported; `out` exists.
    """
    refuse_filled_folder(out)
    path = checkpoint_at(Path(folder), checkpoint_file)
    state = load_safely(path)
    if hub.is_causal(state):
        raise UserError(
            f"{path}: is a causal language model; transformers gets encoders alone. It has no model that remembers the "
            "segments before as Transformer-XL does (its own was removed), so use it by lazyformer_fairseq"
        )
    loaded = hub.load_state(LazyFormerModel, state, path)
    chosen = choose_head(state["model"], head, path, loaded.tasks)
    source = Source(loaded.model, loaded.tokenizer, chosen, training_of(state))
    form = choose_form(source, form)
    with atomic_folder(Path(out)) as unfinished:
        write = {BERT: write_bert, MODERN: write_modernbert, CUSTOM: write_custom}[form]
        model_class = write(source, unfinished)
        write_tokenizer(source.tokenizer, unfinished, source.cfg.max_positions, source.cfg.token_types > 0)
        card = model_card(source, form, Path(out).name)
        (unfinished / CARD_FILE).write_text(card, encoding="utf-8")
        check_same_outputs(source, model_class.from_pretrained(str(unfinished)))
    return form


def choose_head(
    weights: Mapping[str, Any], name: Optional[str], path: Path, tasks: Mapping[str, TaskDescription]
) -> Optional[Head]:
    """The classification or span head of this name, or the only one; that of pre-training must be named.

    Args:
        tasks: what heads were trained on.
    """
    there = heads_in_checkpoint(dict(weights))
    fine_tuned = [head for head in there if head != NEXT_SENTENCE]
    if name is None and len(fine_tuned) > 1:
        raise UserError(
            f"{path}: has classification heads {', '.join(there)}, the folder gets one: choose it by --head"
        )
    if name is not None and name not in there:
        known = ", ".join(there) or "none"
        raise UserError(f"{path}: has no classification head {name!r}, but {known}{nearest(name, there)}")
    chosen = name or next(iter(fine_tuned), None)
    if chosen is None:
        return None
    outputs, kind = there[chosen]
    return Head(chosen, outputs, kind, tasks[chosen].labels if chosen in tasks and tasks[chosen].splits else ())


def choose_form(source: Source, form: str) -> str:
    """Any but "auto"."""
    why_not = {BERT: why_not_bert, MODERN: why_not_modernbert}
    if form == AUTO:
        return next((plain for plain, why in why_not.items() if not why(source)), CUSTOM)
    if form in why_not and (why := why_not[form](source)):
        raise UserError(
            f"--as {form}: this model is no {NAMES[form]}: {why}; --as custom takes it, with code of its own"
        )
    return form


def _settings(source: Source, keys: Mapping[str, str] = families.BERT_KEYS) -> dict[str, Any]:
    """What the configs of all forms have, by BERT's names or others."""
    cfg, dictionary, head = source.cfg, source.tokenizer.dictionary, source.head
    found = {theirs: getattr(cfg, ours) for ours, theirs in keys.items() if ours not in ("layers", "activation_fn")}
    found |= {
        keys["activation_fn"]: families.WRITTEN_ACTIVATIONS[str(cfg.activation_fn)],
        "vocab_size": len(dictionary),
        "max_position_embeddings": cfg.max_positions,
        "bos_token_id": dictionary.bos(),
        "pad_token_id": dictionary.pad(),
        "eos_token_id": dictionary.eos(),
        "mask_token_id": source.tokenizer.mask_index,
    }
    if head is None or head.kind == SPAN:
        return found
    names = head.labels or [f"LABEL_{number}" for number in range(head.outputs)]
    return found | {
        "id2label": dict(enumerate(names)),
        "label2id": {name: number for number, name in enumerate(names)},
        "problem_type": "regression" if head.outputs == 1 else "single_label_classification",
    }


def _save(config: Any, model_class: type, weights: Mapping[str, Tensor], folder: Path) -> type:
    config.architectures = [model_class.__name__]
    config.dtype = "float32"
    config.save_pretrained(folder)
    save_file(dict(weights), str(folder / WEIGHTS_FILE), {"format": "pt"})
    return model_class


# A model of ours


class Use(NamedTuple):
    """What a model is for: its head's name in transformers, its pipeline, how names of its classes end."""

    head: str
    pipeline: str
    ending: str

    @property
    def model_class(self) -> type:
        return getattr(heads, f"LazyFormer{self.ending or 'Model'}")


USES = {
    use.head: use
    for use in (
        Use("lm_head", "fill-mask", "ForMaskedLM"),
        Use("classifier", "text-classification", "ForSequenceClassification"),
        Use("qa_outputs", "question-answering", "ForQuestionAnswering"),
        Use("", "feature-extraction", ""),
    )
}


def write_custom(source: Source, folder: Path) -> Any:
    """Config, weights and code; returns the class of the package that reads them."""
    cfg = source.cfg
    config = modelling.LazyFormerConfig(
        sublayer_pattern=cfg.sublayer_pattern,
        plan=plan_as_json(cfg.sublayer_pattern),
        head_act=families.WRITTEN_ACTIVATIONS[str(cfg.head_activation_fn)],
        activation_dropout=cfg.activation_dropout,
        normalize_before=cfg.encoder_normalize_before,
        embedding_norm=cfg.embedding_norm,
        plain_lm_head=cfg.plain_lm_head,
        tie_word_embeddings=not cfg.untied_lm_head,
        **norms_and_biases(cfg),
        type_vocab_size=cfg.token_types,
        position_embeddings=not cfg.no_token_positional_embeddings,
        pooler=pooler_in_checkpoint(source.weights) is not None,
        relative_position_buckets=cfg.relative_position_buckets,
        relative_position_max_distance=cfg.relative_position_max_distance,
        **_settings(source),
    )
    if source.head is not None and source.head.kind != SPAN:
        config.classifier = source.head.kind
    config.auto_map = modelling.auto_map()
    weights = custom_weights(source)
    config.weights_sha256 = _hash(config, weights)
    (folder / modelling.CODE_FILE).write_text(merged_code(config.plan), encoding="utf-8")
    return _save(config, source.use.model_class, weights, folder)


def custom_weights(source: Source) -> dict[str, Tensor]:
    """By names in transformers, each weight once.

    Raises:
        UserError: a weight has no name there.
    """
    found: dict[str, Tensor] = {}
    weights = source.weights
    named = {name for name, _ in (*source.model.named_parameters(), *source.model.named_buffers())}
    for name in named - {"dictionary_sha256"}:
        if name.startswith(families.ENCODER):
            found[f"lazyformer.{name.removeprefix(families.ENCODER)}"] = weights[name]
        elif name.startswith(families.HEAD) and not source.has_lm_head:
            continue
        elif name in (f"{families.HEAD}bias", f"{families.HEAD}weight"):  # this where it is untied
            found[f"lm_head.decoder.{name.removeprefix(families.HEAD)}"] = weights[name]
        elif name.startswith((f"{families.HEAD}dense.", f"{families.HEAD}layer_norm.")):
            found[f"lm_head.{name.removeprefix(families.HEAD)}"] = weights[name]
        elif not name.startswith(PREFIX):
            raise UserError(f"weight {name} has no place in a model of transformers")
    if (pooler := pooler_in_checkpoint(weights)) is not None:
        for part in families.PARTS:
            found[f"lazyformer.pooler.dense.{part}"] = weights[f"{PREFIX}{pooler}.dense.{part}"]
    if source.head is not None:
        of_head = f"{PREFIX}{source.head.name}."
        for name in (name for name in weights if name.startswith(of_head)):
            found[f"{source.use.head}.{name.removeprefix(of_head).removeprefix('span_proj.')}"] = weights[name]
    return {name: found[name].float().contiguous() for name in sorted(found)}


def _hash(config: modelling.LazyFormerConfig, weights: Mapping[str, Tensor]) -> dict[str, dict[str, str]]:
    """What `weights_sha256` of the config is to be: of the models of transformers that have these weights.

    Raises:
        UserError: names or shapes are not those of the models.
    """
    found: dict[str, dict[str, str]] = {}
    there = [head for head in USES if head and any(name.startswith(f"{head}.") for name in weights)]
    for head in there or [""]:
        model = USES[head].model_class(config)
        base, prefix = (model.lazyformer, "") if head else (model, "lazyformer.")
        others = tuple(f"{each}." for each in modelling.HEADS if each != head)
        own = {name.removeprefix(prefix): weight for name, weight in weights.items() if not name.startswith(others)}
        try:
            missing, unexpected = model.load_state_dict(own, strict=False)
        except RuntimeError as error:
            raise UserError(f"the exported model has other weights than the checkpoint: {error}") from error
        again = {"lm_head.decoder.weight", *(f"lazyformer.{name}".removeprefix(prefix) for name in base.same_weights)}
        if wrong := sorted({*missing} - again | {*unexpected}):
            raise UserError(f"the exported model and the checkpoint differ in weights {', '.join(wrong)}")
        found |= modelling.hash_weights(model.state_dict())
    return found


# A BERT


def why_not_bert(source: Source) -> str:
    """What BERT lacks of this model; "" if it is one."""
    cfg = source.cfg
    plan = plan_as_json(cfg.sublayer_pattern)
    letters = expand(cfg.sublayer_pattern)
    activation, head_activation = str(cfg.activation_fn), str(cfg.head_activation_fn)
    if letters != "sf" * (len(plan) // 2):
        return f"its pattern is {cfg.sublayer_pattern}, BERT's (sf)xN without settings"
    if cfg.encoder_normalize_before:
        return "it normalises before each sublayer (--encoder-normalize-before), BERT after it"
    if str(cfg.norm) == RMS or cfg.no_norm_bias or cfg.no_linear_bias:
        lacks = "RMSNorm" if str(cfg.norm) == RMS else "no biases (--no-norm-bias, --no-linear-bias)"
        return f"it has {lacks}, BERT LayerNorm and biases"
    if cfg.plain_lm_head or cfg.untied_lm_head:
        return "its masked-LM head is plain or untied (--plain-lm-head, --untied-lm-head), BERT's neither"
    if cfg.relative_position_buckets:
        return f"it has a relative position bias ({cfg.relative_position_buckets} buckets), BERT none"
    if cfg.no_token_positional_embeddings:
        return "it has no learned positions (--no-token-positional-embeddings), BERT has"
    if activation != head_activation:
        return f"its sublayers have {activation} and its masked-LM head {head_activation}, BERT one activation for both"
    if cfg.activation_dropout:
        return f"it has dropout {cfg.activation_dropout:g} within feed-forward sublayers, BERT none"
    if source.head is not None and source.head.kind == "linear":
        return f"its classification head {source.head.name} is {source.head.kind}, BERT's has a pooler (dense)"
    return ""


def write_bert(source: Source, folder: Path) -> Any:
    """Config and weights of a BERT with all heads that go along; returns its class."""
    config = transformers.BertConfig(
        num_hidden_layers=len(plan_as_json(source.cfg.sublayer_pattern)) // 2,
        type_vocab_size=source.cfg.token_types or 2,
        **_settings(source),
    )
    ending = source.use.ending
    if source.head is None and NEXT_SENTENCE in source.model.classification_heads:
        ending = "ForPreTraining" if source.has_lm_head else "ForNextSentencePrediction"
    return _save(config, getattr(transformers, f"Bert{ending or 'Model'}"), weights_of(source, BERT), folder)


def weights_of(source: Source, form: str) -> dict[str, Tensor]:
    """By the names of BERT or ModernBERT; a BERT without token types has rows of zeros for them."""
    family, weights, head = families.FAMILIES[form], source.weights, source.head
    embeddings = zip((families.WORDS, families.POSITIONS, families.TYPES), family.embeddings[:3], strict=True)
    found = {f"{family.prefix}{theirs}.weight": weights[ours] for ours, theirs in embeddings if ours in weights}
    if types := family.embeddings[2]:
        width = weights[families.WORDS].size(1)
        found.setdefault(f"{family.prefix}{types}.weight", torch.zeros(2, width))
    layers = len(plan_as_json(source.cfg.sublayer_pattern)) // 2
    maps = {ours: [f"{family.prefix}{name}" for name in theirs] for ours, theirs in family.maps(layers)}
    if source.has_lm_head:
        dense, norm, bias, _ = family.head
        found[bias] = weights[f"{families.HEAD}bias"]
        maps |= {f"{families.HEAD}dense": [dense], f"{families.HEAD}layer_norm": [norm]}
    if family.pooler and (pooler := pooler_in_checkpoint(weights)) is not None:
        maps[f"{PREFIX}{pooler}.dense"] = ["bert.pooler.dense"]
    if family.pooler and head is None and NEXT_SENTENCE in source.model.classification_heads:
        maps[f"{PREFIX}{NEXT_SENTENCE}.out_proj"] = ["cls.seq_relationship"]
    elif head is not None and head.kind == SPAN:
        maps[f"{PREFIX}{head.name}.span_proj"] = ["qa_outputs"]
    elif head is not None:
        maps |= {f"{PREFIX}{head.name}.dense": ["bert.pooler.dense"], f"{PREFIX}{head.name}.out_proj": ["classifier"]}
    for ours, theirs in maps.items():
        for part in families.PARTS:
            if f"{ours}.{part}" not in weights:
                continue
            chunks = weights[f"{ours}.{part}"].chunk(len(theirs))
            found |= {f"{name}.{part}": chunk for name, chunk in zip(theirs, chunks, strict=True)}
    return {name: found[name].float().contiguous().clone() for name in sorted(found)}


# A ModernBERT


def why_not_modernbert(source: Source) -> str:
    """What ModernBERT lacks of this model; "" if it is one."""
    cfg = source.cfg
    if not _modern_layers(cfg.sublayer_pattern):
        wanted = "s[rope=B]f[gate=G] and s[window=W,rope=B]f[gate=G], each the same all over"
        return f"its pattern is {cfg.sublayer_pattern}, ModernBERT's is of {wanted}"
    if not (cfg.encoder_normalize_before and cfg.embedding_norm):
        return "ModernBERT normalises embeddings and before sublayers (--encoder-normalize-before, --embedding-norm)"
    if not cfg.no_token_positional_embeddings or cfg.relative_position_buckets or cfg.token_types:
        return "it has learned positions, a relative position bias or token types, ModernBERT none"
    if str(cfg.norm) == RMS:
        return "it has RMSNorm, ModernBERT LayerNorm"
    if cfg.plain_lm_head or cfg.untied_lm_head:
        return "its masked-LM head is plain or untied (--plain-lm-head, --untied-lm-head), ModernBERT's neither"
    return f"ModernBERT's heads are others than its head {source.head.name}" if source.head is not None else ""


def _modern_layers(pattern: str) -> list[tuple[str, str, str]]:
    """Of each layer the window ("" for none), the base of its rotary positions, the gate; none for other patterns."""
    text = expand(pattern)
    layers = MODERN_LAYER.findall(text)
    are_of_two_kinds = len({bool(window) for window, *_ in layers}) == len(set(layers))
    is_modern = are_of_two_kinds and len({gate for *_, gate in layers}) == 1 and not MODERN_LAYER.sub("", text)
    return layers if is_modern else []


def write_modernbert(source: Source, folder: Path) -> Any:
    """Config and weights of a ModernBERT; returns its class. Dropout of sublayers' outputs has no place there."""
    cfg, settings = source.cfg, _settings(source, families.FAMILIES[MODERN].keys)
    layers = _modern_layers(cfg.sublayer_pattern)
    kinds = [families.SLIDING if window else families.FULL for window, *_ in layers]
    bases = {kind: float(base) for kind, (_, base, _) in zip(kinds, layers, strict=True)}
    settings |= dict.fromkeys(("attention_bias", "mlp_bias", "classifier_bias"), not cfg.no_linear_bias)
    settings |= {
        "num_hidden_layers": len(layers),
        "layer_types": kinds,
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()},
        "local_attention": 2 * max(int(window or 0) for window, *_ in layers) or 128,
        "hidden_activation": layers[0][2],
        "classifier_activation": families.WRITTEN_ACTIVATIONS[str(cfg.head_activation_fn)],
        "norm_bias": not cfg.no_norm_bias,
        "cls_token_id": settings["bos_token_id"],
        "sep_token_id": settings["eos_token_id"],
    }
    config = transformers.ModernBertConfig(**settings)
    model_class = transformers.ModernBertForMaskedLM if source.has_lm_head else transformers.ModernBertModel
    return _save(config, model_class, weights_of(source, MODERN), folder)


# The comparison


@torch.no_grad()
def check_same_outputs(source: Source, model: Any) -> None:
    """Raises a UserError where the exported model computes something else than the checkpoint's, on padded texts.

    Both are in double precision from then on: in single precision deep models amplify rounding as far as small mistakes
    reach.
    """
    source.model.double().encoder.sentence_encoder.attention_backend = "eager"
    model = model.double()
    ids, marked = example(source)
    given = {} if marked is None else {"global_attention_mask": marked.long()}
    types = None
    if source.cfg.token_types:
        given["token_type_ids"] = types = torch.arange(ids.size(1)).expand_as(ids) % source.cfg.token_types
    is_text = ids.ne(source.tokenizer.dictionary.pad())
    for name, logits in _logits(model(ids, attention_mask=is_text.long(), **given)).items():
        of_task = NEXT_SENTENCE if source.head is None else source.head.name
        of_name = {"masked words": (False, None), "features": (True, None), "next sentence": (False, NEXT_SENTENCE)}
        features_only, head = of_name.get(name, (False, of_task))
        asked = {"features_only": features_only, "classification_head_name": head}
        wanted, _ = source.model(ids, global_positions=marked, token_types=types, **asked)
        if wanted.dim() == 3:  # of each token
            logits, wanted = logits[is_text], wanted[is_text]
        difference = float((logits - wanted).abs().max() / wanted.abs().max().clamp(min=1))
        if not difference < CLOSE:
            raise UserError(
                f"the exported model's logits of the {name} differ from the checkpoint's by {difference:.1g}: not "
                "written"
            )


def _logits(output: Any) -> dict[str, Tensor]:
    """What a model of transformers returned, by what it is of, in our order of numbers."""
    if "prediction_logits" in output:
        return {"masked words": output.prediction_logits, "next sentence": output.seq_relationship_logits}
    if "last_hidden_state" in output:
        return {"features": output.last_hidden_state}
    if "start_logits" in output:
        return {"head": torch.stack([output.start_logits, output.end_logits], -1)}
    return {"masked words" if output.logits.dim() == 3 else "head": output.logits}


def example(source: Source) -> tuple[Tensor, Optional[Tensor]]:
    """Ids (2, T), the second row padded on the right, and which tokens are marked, where the pattern asks for it."""
    dictionary, time = source.tokenizer.dictionary, min(24, source.cfg.max_positions)
    ids = torch.randint(len(dictionary), (2, time), generator=torch.Generator().manual_seed(0))
    ids[ids == dictionary.pad()] = dictionary.unk()
    ids[:, 0] = dictionary.bos()
    ids[1, time * 2 // 3 :] = dictionary.pad()
    asks = any(planned.values.get("global") == "given" for planned in source.model.encoder.sentence_encoder.plan)
    return ids, torch.zeros_like(ids, dtype=torch.bool).index_fill(1, torch.tensor([0]), True) if asks else None


# The card

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
PLAIN = """\
It is a plain {kind}: transformers loads it without code of its own. Pad on the right, and pass an
attention mask, as the tokenizer does."""
OWN_CODE = """\
`modeling_lazyformer.py` is all its code; it needs torch and transformers. Where lazyformer_fairseq is
installed, `import lazyformer_fairseq.huggingface` first, and leave `trust_remote_code` out."""


def model_card(source: Source, form: str, name: str) -> str:
    """README.md of the folder `name`, in Markdown with the header that the Hub reads; the licence is left out.

    Args:
        source: the checkpoint.
        form: of the folder.
    """
    has_code = form == CUSTOM
    return CARD.format(
        pipeline=source.use.pipeline,
        tag="" if has_code else f"\n- {form}",
        name=name,
        pattern=source.cfg.sublayer_pattern,
        rows="\n".join(f"| {title} | {value} |" for title, value in _rows(source).items()),
        auto=f"AutoModel{source.use.ending}",
        trust=", trust_remote_code=True" if has_code else "",
        code=OWN_CODE if has_code else PLAIN.format(kind=NAMES[form]),
    )


def _rows(source: Source) -> dict[str, str]:
    cfg, head = source.cfg, source.head
    buckets, distance = cfg.relative_position_buckets, cfg.relative_position_max_distance
    named = source.model.named_parameters()
    parameters = sum(weight.numel() for name, weight in named if not name.startswith("classification_heads."))
    norm = "RMSNorm" if str(cfg.norm) == RMS else "LayerNorm"
    without = [of for of in ("linear", "norm") if getattr(cfg, f"no_{of}_bias")]
    biases = f", without {' and '.join(without)} biases" if without else ""
    place = "pre" if cfg.encoder_normalize_before else "post"
    rows = {
        "sublayers": f"`{cfg.sublayer_pattern}`, {place}-norm, {norm}{biases}",
        "parameters": f"{parameters:,}, without classification heads",
        "width, feed-forward, heads": f"{cfg.encoder_embed_dim}, {cfg.encoder_ffn_embed_dim}, "
        f"{cfg.encoder_attention_heads}",
        "positions": f"{cfg.max_positions}{', none learned' * cfg.no_token_positional_embeddings}",
        "relative position bias": f"{buckets} buckets up to {distance} tokens (T5)" if buckets else "none",
        "vocabulary": f"{len(source.tokenizer.dictionary):,} symbols",
        **source.training,
    }
    if not source.has_lm_head:
        rows["masked-LM head"] = "none: the checkpoint's never trained, so that it cannot fill masks"
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
