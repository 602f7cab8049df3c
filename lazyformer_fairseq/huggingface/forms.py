"""What an exported model is: a BERT or a ModernBERT of transformers, or a model with code of its own.

Each form says why a checkpoint is none, which weights it has, and writes its folder.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Optional

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation.match import (
    PREFIX,
    lm_head_never_trained,
    pooler_in_checkpoint,
)
from lazyformer_fairseq.huggingface import families
from lazyformer_fairseq.huggingface.activations import WRITTEN_ACTIVATIONS
from lazyformer_fairseq.huggingface.code import write_code
from lazyformer_fairseq.huggingface.models import heads
from lazyformer_fairseq.huggingface.models.causal import LazyFormerCausalConfig, LazyFormerForCausalLM
from lazyformer_fairseq.huggingface.models.configuration import LazyFormerConfig
from lazyformer_fairseq.huggingface.models.encoder import LazyFormerModel, auto_map
from lazyformer_fairseq.huggingface.models.saved_weights import HEADS, hash_weights
from lazyformer_fairseq.huggingface.settings import settings_of
from lazyformer_fairseq.modules.attention.selection import AUTO
from lazyformer_fairseq.modules.networks.heads import NEXT_SENTENCE, SPAN
from lazyformer_fairseq.modules.networks.masked_lm import MaskedLM
from lazyformer_fairseq.modules.networks.options import CausalLMOptions, read_options
from lazyformer_fairseq.patterns.grammar import expand, plan
from lazyformer_fairseq.patterns.kinds import ENCODER, RMS

BERT = "bert"
MODERN = families.MODERN
CUSTOM = "custom"
CAUSAL = "causal"
MODERN_LAYER = re.compile(r"s\[(?:window=(\d+),)?rope=(\d+)\]f\[gate=(\w+)\]")
WEIGHTS_FILE = "model.safetensors"


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
        model: in evaluation mode.
        head: the one that goes along.
        training: what the checkpoint knows of its training, in words, for the card.
        weights: of the model, by name, each once.
    """

    model: MaskedLM
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


def _settings(source: Source, keys: Mapping[str, str] = families.BERT_KEYS) -> dict[str, Any]:
    """What the configs of all forms have, by BERT's names or others."""
    cfg = source.cfg
    dictionary = source.tokenizer.dictionary
    head = source.head
    found = {theirs: getattr(cfg, ours) for ours, theirs in keys.items() if ours not in ("layers", "activation_fn")}
    found |= {
        keys["activation_fn"]: WRITTEN_ACTIVATIONS[str(cfg.activation_fn)],
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
        if self.ending:
            return getattr(heads, f"LazyFormer{self.ending}")
        return LazyFormerModel


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
    settings = {**settings_of(cfg), **_settings(source), "attention_backend": AUTO}
    config = LazyFormerConfig(**settings, pooler=pooler_in_checkpoint(source.weights) is not None)
    if source.head is not None and source.head.kind != SPAN:
        config.classifier = source.head.kind
    config.auto_map = auto_map()
    weights = custom_weights(source)
    config.weights_sha256 = _hash(config, weights)
    write_code(cfg.sublayer_pattern, folder)
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
            found[f"lazyformer.encoder.{name.removeprefix(families.ENCODER)}"] = weights[name]
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


def _hash(config: LazyFormerConfig, weights: Mapping[str, Tensor]) -> dict[str, dict[str, str]]:
    """What `weights_sha256` of the config is to be: of the models of transformers that have these weights.

    Raises:
        UserError: names or shapes are not those of the models.
    """
    found: dict[str, dict[str, str]] = {}
    there = [head for head in USES if head and any(name.startswith(f"{head}.") for name in weights)]
    for head in there or [""]:
        model = USES[head].model_class(config)
        base, prefix = (model.lazyformer, "") if head else (model, "lazyformer.")
        others = tuple(f"{each}." for each in HEADS if each != head)
        own = {name.removeprefix(prefix): weight for name, weight in weights.items() if not name.startswith(others)}
        try:
            missing, unexpected = model.load_state_dict(own, strict=False)
        except RuntimeError as error:
            raise UserError(f"the exported model has other weights than the checkpoint: {error}") from error
        again = {"lm_head.decoder.weight", *(f"lazyformer.{name}".removeprefix(prefix) for name in base.same_weights)}
        if wrong := sorted({*missing} - again | {*unexpected}):
            raise UserError(f"the exported model and the checkpoint differ in weights {', '.join(wrong)}")
        found |= hash_weights(model.state_dict())
    return found


# A causal model of ours


def causal_options(state: Mapping[str, Any]) -> CausalLMOptions:
    """Of a checkpoint's model."""
    options = {name: value for name, value in state["cfg"]["model"].items() if name != "_name"}
    return read_options(CausalLMOptions, options)


def write_causal(state: Mapping[str, Any], path: Path, folder: Path) -> None:
    """Config and weights of a LazyFormerForCausalLM, without code.

    Raises:
        UserError: the weights are not those that the settings describe.
    """
    weights = {name: weight for name, weight in state["model"].items() if name != "dictionary_sha256"}
    settings = {**settings_of(causal_options(state)), "attention_backend": AUTO}
    try:
        model = LazyFormerForCausalLM(LazyFormerCausalConfig(**settings, vocab_size=weights["softmax.bias"].size(0)))
        model.load_state_dict(weights)
    except (KeyError, RuntimeError) as error:
        raise UserError(f"{path}: its weights are not those of its settings: {error}") from error
    model.float().save_pretrained(folder)
    again = LazyFormerForCausalLM.from_pretrained(folder).state_dict()
    assert all(torch.equal(weight.float(), again[name]) for name, weight in weights.items())


# A BERT


def why_not_bert(source: Source) -> str:
    """What BERT lacks of this model; "" if it is one."""
    cfg = source.cfg
    letters = expand(cfg.sublayer_pattern)
    activation = str(cfg.activation_fn)
    head_activation = str(cfg.head_activation_fn)
    if letters != "sf" * (len(letters) // 2):
        return f"its pattern is {cfg.sublayer_pattern}, BERT's (sf)xN without settings"
    if cfg.encoder_normalize_before:
        return "it normalises before each sublayer (--encoder-normalize-before), BERT after it"
    if str(cfg.norm) == RMS or cfg.no_norm_bias or cfg.no_linear_bias:
        if str(cfg.norm) == RMS:
            lacks = "RMSNorm"
        else:
            lacks = "no biases (--no-norm-bias, --no-linear-bias)"
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
        num_hidden_layers=len(plan(source.cfg.sublayer_pattern, ENCODER)) // 2,
        type_vocab_size=source.cfg.token_types or 2,
        **_settings(source),
    )
    ending = source.use.ending
    if source.head is None and NEXT_SENTENCE in source.model.classification_heads:
        if source.has_lm_head:
            ending = "ForPreTraining"
        else:
            ending = "ForNextSentencePrediction"
    return _save(config, getattr(transformers, f"Bert{ending or 'Model'}"), weights_of(source, BERT), folder)


def weights_of(source: Source, form: str) -> dict[str, Tensor]:
    """By the names of BERT or ModernBERT; a BERT without token types has rows of zeros for them."""
    family = families.FAMILIES[form]
    weights = source.weights
    head = source.head
    embeddings = zip((families.WORDS, families.POSITIONS, families.TYPES), family.embeddings[:3], strict=True)
    found = {f"{family.prefix}{theirs}.weight": weights[ours] for ours, theirs in embeddings if ours in weights}
    if types := family.embeddings[2]:
        width = weights[families.WORDS].size(1)
        found.setdefault(f"{family.prefix}{types}.weight", torch.zeros(2, width))
    layers = len(plan(source.cfg.sublayer_pattern, ENCODER)) // 2
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
    if cfg.reversible:
        return "its layers are reversible (--reversible), ModernBERT's are not"
    if cfg.plain_lm_head or cfg.untied_lm_head:
        return "its masked-LM head is plain or untied (--plain-lm-head, --untied-lm-head), ModernBERT's neither"
    if source.head is not None:
        return f"ModernBERT's heads are others than its head {source.head.name}"
    return ""


def _modern_layers(pattern: str) -> list[tuple[str, str, str]]:
    """Of each layer the window ("" for none), the base of its rotary positions, the gate; none for other patterns."""
    text = expand(pattern)
    layers = MODERN_LAYER.findall(text)
    are_of_two_kinds = len({bool(window) for window, *_ in layers}) == len(set(layers))
    is_modern = are_of_two_kinds and len({gate for *_, gate in layers}) == 1 and not MODERN_LAYER.sub("", text)
    if is_modern:
        return layers
    return []


def write_modernbert(source: Source, folder: Path) -> Any:
    """Config and weights of a ModernBERT; returns its class. Dropout of sublayers' outputs has no place there."""
    cfg = source.cfg
    settings = _settings(source, families.FAMILIES[MODERN].keys)
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
        "classifier_activation": WRITTEN_ACTIVATIONS[str(cfg.head_activation_fn)],
        "norm_bias": not cfg.no_norm_bias,
        "cls_token_id": settings["bos_token_id"],
        "sep_token_id": settings["eos_token_id"],
    }
    config = transformers.ModernBertConfig(**settings)
    if source.has_lm_head:
        model_class = transformers.ModernBertForMaskedLM
    else:
        model_class = transformers.ModernBertModel
    return _save(config, model_class, weights_of(source, MODERN), folder)
