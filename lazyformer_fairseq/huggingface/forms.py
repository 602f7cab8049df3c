"""The forms of an exported model: transformers' BERT or ModernBERT, or a model with its own code.

For each form, there are functions that explain why a checkpoint cannot have the form, convert the checkpoint's weights,
and write the exported folder.
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
from lazyformer_fairseq.huggingface.models.saved_weights import hash_weights
from lazyformer_fairseq.huggingface.settings import settings_of
from lazyformer_fairseq.modules.attention.selection import AUTO
from lazyformer_fairseq.modules.networks.heads import CLASSIFICATION_HEADS, NEXT_SENTENCE, SPAN, TAGS
from lazyformer_fairseq.modules.networks.masked_lm import MaskedLM
from lazyformer_fairseq.modules.networks.options import CausalLMOptions, MaskedLMOptions, read_options
from lazyformer_fairseq.patterns.grammar import expand, plan
from lazyformer_fairseq.patterns.kinds import ENCODER, LAYER

BERT = "bert"
MODERN = families.MODERN
CUSTOM = "custom"
CAUSAL = "causal"
# Option values that every BERT or every ModernBERT must have.
BERT_OPTIONS = {
    "encoder_normalize_before": False,
    "norm": LAYER,
    "no_norm_bias": False,
    "no_linear_bias": False,
    "plain_lm_head": False,
    "untied_lm_head": False,
    "relative_position_buckets": 0,
    "no_token_positional_embeddings": False,
    "activation_dropout": 0.0,
    "reversible": False,
}
MODERN_OPTIONS = {
    "encoder_normalize_before": True,
    "embedding_norm": True,
    "norm": LAYER,
    "plain_lm_head": False,
    "untied_lm_head": False,
    "relative_position_buckets": 0,
    "no_token_positional_embeddings": True,
    "token_types": 0,
    "reversible": False,
}
MODERN_LAYER = re.compile(r"s\[(?:window=(\d+),)?rope=(\d+)\]f\[gate=(\w+)\]")
WEIGHTS_FILE = "model.safetensors"


class Head(NamedTuple):
    """A head that is exported with the encoder.

    Attributes:
        name: The name of the head in the checkpoint.
        outputs: The number of outputs.
        type: "dense", "linear", "span" or "tags".
        labels: The class names; empty if the classes are unnamed.
        is_multi_label: Whether a text may belong to several classes.
    """

    name: str
    outputs: int
    type: str
    labels: tuple[str, ...] = ()
    is_multi_label: bool = False


@dataclass(frozen=True)
class Source:
    """A checkpoint to export.

    Attributes:
        model: The model, in evaluation mode.
        tokenizer: The tokenizer.
        head: The head to export.
        training: The checkpoint's training record, as rows of the model card.
    """

    model: MaskedLM
    tokenizer: Any
    head: Optional[Head] = None
    training: Mapping[str, str] = field(default_factory=dict)

    @property
    def cfg(self) -> MaskedLMOptions:
        """The model's options."""
        return self.model.cfg

    @property
    def weights(self) -> dict[str, Any]:
        """The model's weights by name."""
        return self.model.state_dict()

    @property
    def num_layers(self) -> int:
        """The number of sublayer pairs."""
        return len(plan(self.cfg.sublayer_pattern, ENCODER)) // 2

    @property
    def has_lm_head(self) -> bool:
        """True if the masked-LM head is exported; a head that was never trained is not."""
        return not lm_head_never_trained(self.weights)

    @property
    def has_next_sentence(self) -> bool:
        """True if the next-sentence head is exported."""
        return self.head is None and NEXT_SENTENCE in self.model.classification_heads

    @property
    def use(self) -> "Use":
        """The exported model's use, which depends on its head."""
        if self.head is not None:
            name_of_type = {SPAN: "qa_outputs", TAGS: "token_classifier"}
            return USES[name_of_type.get(self.head.type, "classifier")]
        if self.has_lm_head:
            return USES["lm_head"]
        return USES[""]


def _settings(source: Source, keys: Mapping[str, str] = families.BERT_KEYS) -> dict[str, Any]:
    """Return the settings common to the configs of all forms.

    Args:
        source: The checkpoint.
        keys: The names of settings in the config, by our option names.
    """
    dictionary = source.tokenizer.dictionary
    found = {}
    for option, key in keys.items():
        if option != "layers":
            found[key] = getattr(source.cfg, option)
    found |= {
        keys["activation_fn"]: WRITTEN_ACTIVATIONS[str(source.cfg.activation_fn)],
        "vocab_size": len(dictionary),
        "max_position_embeddings": source.cfg.max_positions,
        "bos_token_id": dictionary.bos(),
        "pad_token_id": dictionary.pad(),
        "eos_token_id": dictionary.eos(),
        "mask_token_id": source.tokenizer.mask_index,
    }
    head = source.head
    if head is None or head.type == SPAN:
        return found
    names = head.labels or [f"LABEL_{number}" for number in range(head.outputs)]
    found["id2label"] = dict(enumerate(names))
    found["label2id"] = {name: number for number, name in enumerate(names)}
    found["problem_type"] = "single_label_classification"
    if head.outputs == 1:
        found["problem_type"] = "regression"
    elif head.is_multi_label:
        found["problem_type"] = families.MULTI_LABEL
    return found


def _save(config: Any, model_class: type, weights: Mapping[str, Tensor], folder: Path) -> type:
    """Write the config and the weights, in float32 and sorted by name; return `model_class`."""
    config.architectures = [model_class.__name__]
    config.dtype = "float32"
    config.save_pretrained(folder)
    exact = {name: weights[name].float().contiguous().clone() for name in sorted(weights)}
    save_file(exact, str(folder / WEIGHTS_FILE), {"format": "pt"})
    return model_class


# Our own models


class Use(NamedTuple):
    """A use of an encoder in transformers.

    Attributes:
        head: The name of the head in transformers; "" for none.
        pipeline: The pipeline's name.
        ending: The suffix of its class names, such as "ForMaskedLM".
    """

    head: str
    pipeline: str
    ending: str

    @property
    def model_class(self) -> type:
        """Our model class for this use."""
        if self.ending:
            return getattr(heads, f"LazyFormer{self.ending}")
        return LazyFormerModel


USES = {
    "lm_head": Use("lm_head", "fill-mask", "ForMaskedLM"),
    "classifier": Use("classifier", "text-classification", "ForSequenceClassification"),
    "qa_outputs": Use("qa_outputs", "question-answering", "ForQuestionAnswering"),
    "token_classifier": Use("token_classifier", "token-classification", "ForTokenClassification"),
    "": Use("", "feature-extraction", ""),
}


def write_custom(source: Source, folder: Path) -> type:
    """Write our model's config, weights and code; return the class that loads them."""
    settings = {**settings_of(source.cfg), **_settings(source), "attention_backend": AUTO}
    config = LazyFormerConfig(**settings, pooler=pooler_in_checkpoint(source.weights) is not None)
    if source.head is not None and source.head.type in CLASSIFICATION_HEADS:
        config.classifier = source.head.type
    config.auto_map = auto_map()
    weights = custom_weights(source)
    config.weights_sha256 = _hash(config, weights)
    write_code(source.cfg.sublayer_pattern, folder)
    return _save(config, source.use.model_class, weights, folder)


def custom_weights(source: Source) -> dict[str, Tensor]:
    """Return our model's weights by their names in transformers. Weights shared by sublayers appear once.

    Raises:
        UserError: A weight has no counterpart in transformers.
    """
    names = {f"{families.HEAD}{part}": f"lm_head.decoder.{part}" for part in ("bias", "weight")}
    prefixes = {families.ENCODER: "lazyformer.encoder.", families.HEAD: "lm_head."}
    pooler = pooler_in_checkpoint(source.weights)
    if pooler is not None:
        prefixes[f"{PREFIX}{pooler}.dense."] = "lazyformer.pooler.dense."
    found: dict[str, Tensor] = {}
    stored = dict(source.model.named_parameters()) | dict(source.model.named_buffers())  # lists a shared weight once
    for name, weight in stored.items():
        is_lm_head = name.startswith(families.HEAD)
        if name == "dictionary_sha256" or (is_lm_head and not source.has_lm_head):
            continue
        exported_name = names.get(name)
        for our_prefix, exported_prefix in prefixes.items():
            if exported_name is None and name.startswith(our_prefix):
                exported_name = f"{exported_prefix}{name.removeprefix(our_prefix)}"
        if exported_name is not None:
            found[exported_name] = weight.detach()
        elif not name.startswith(PREFIX):
            raise UserError(f"the weight {name} has no counterpart in the exported model")
    if source.head is not None:
        of_head = f"{PREFIX}{source.head.name}."
        for name, weight in source.weights.items():
            if name.startswith(of_head):
                own = re.sub(r"^(span|token)_proj\.", "", name.removeprefix(of_head))
                found[f"{source.use.head}.{own}"] = weight
    return found


def _hash(config: LazyFormerConfig, weights: Mapping[str, Tensor]) -> dict[str, dict[str, str]]:
    """Return `weights_sha256` for the config: the hashes for every transformers model that can load these weights."""
    found: dict[str, dict[str, str]] = {}
    there = []
    for head in USES:
        if head and any(name.startswith(f"{head}.") for name in weights):
            there.append(head)

    for head in there or [""]:
        model = USES[head].model_class(config)
        prefix = "lazyformer."
        if head:
            prefix = ""
        of_model = {name.removeprefix(prefix): weight for name, weight in weights.items()}
        # Not strict, because other heads are unexpected, and a shared weight is listed only once.
        model.load_state_dict(of_model, strict=False)
        found |= hash_weights(model.state_dict())
    return found


# Our causal models


def causal_options(state: Mapping[str, Any]) -> CausalLMOptions:
    """Return the options of a checkpoint's causal model."""
    options = {name: value for name, value in state["cfg"]["model"].items() if name != "_name"}
    return read_options(CausalLMOptions, options)


def write_causal(state: Mapping[str, Any], path: Path, folder: Path) -> None:
    """Write the config and the weights of a LazyFormerForCausalLM, without code.

    Args:
        state: The content of the checkpoint.
        path: The checkpoint file, for messages.
        folder: An existing folder.

    Raises:
        UserError: The weights do not match the settings in the checkpoint.
    """
    weights = {name: weight for name, weight in state["model"].items() if name != "dictionary_sha256"}
    settings = {**settings_of(causal_options(state)), "attention_backend": AUTO}
    try:
        model = LazyFormerForCausalLM(LazyFormerCausalConfig(**settings, vocab_size=weights["softmax.bias"].size(0)))
        model.load_state_dict(weights)
    except (KeyError, RuntimeError) as error:
        raise UserError(f"{path}: the weights do not match the settings ({error})") from error
    model.float().save_pretrained(folder)
    again = LazyFormerForCausalLM.from_pretrained(folder).state_dict()
    assert all(torch.equal(weight.float(), again[name]) for name, weight in weights.items())


# BERT


def _difference_from(source: Source, needed: Mapping[str, Any], name: str) -> str:
    """Return a message about the first option that differs from `needed`; "" if none does.

    Args:
        source: The checkpoint.
        needed: The option values of a transformers model.
        name: The name of that model.
    """
    for option, value in needed.items():
        ours = getattr(source.cfg, option)
        if ours != value and str(ours) != str(value):
            flag = option.replace("_", "-")
            return f"--{flag} is {ours}, whereas a {name} has {value}"
    return ""


def why_not_bert(source: Source) -> str:
    """Return the reason a checkpoint is not a BERT; "" if it is one."""
    pattern = expand(source.cfg.sublayer_pattern)
    if pattern != "sf" * (len(pattern) // 2):
        return f"its pattern is {source.cfg.sublayer_pattern}, whereas BERT's is (sf)xN without settings"
    if source.head is not None and source.head.type == "linear":
        return f"its classification head {source.head.name} is {source.head.type}, whereas BERT's is dense (a pooler)"
    needed = {**BERT_OPTIONS, "head_activation_fn": source.cfg.activation_fn}
    return _difference_from(source, needed, "BERT")


def write_bert(source: Source, folder: Path) -> type:
    """Write the config and weights of a BERT with the exported heads; return its class."""
    config = transformers.BertConfig(
        num_hidden_layers=source.num_layers,
        type_vocab_size=source.cfg.token_types or 2,
        **_settings(source),
    )
    ending = source.use.ending or "Model"
    if source.has_next_sentence:
        ending = "ForPreTraining" if source.has_lm_head else "ForNextSentencePrediction"
    model_class = getattr(transformers, f"Bert{ending}")
    weights = weights_of(source, families.FAMILIES[BERT])
    return _save(config, model_class, weights, folder)


def weights_of(source: Source, family: families.Family) -> dict[str, Tensor]:
    """Return the weights by a family's names. If the model has no token types, the token type embeddings are zeros."""
    weights = source.weights
    found = {}
    for our_name, table in family.tables.items():
        name = f"{family.prefix}{table}.weight"
        if our_name in weights:
            found[name] = weights[our_name]
        else:
            found[name] = torch.zeros(2, source.cfg.encoder_embed_dim)

    maps = {}
    for our_name, stacked in family.maps(source.num_layers):
        maps[our_name] = [f"{family.prefix}{name}" for name in stacked]
    if source.has_lm_head:
        dense, norm, bias, _ = family.head
        found[bias] = weights[f"{families.HEAD}bias"]
        maps[f"{families.HEAD}dense"] = [dense]
        maps[f"{families.HEAD}layer_norm"] = [norm]
    if family.pooler:
        pooler = f"{family.prefix}{family.pooler}"
        name = pooler_in_checkpoint(weights)
        if name is not None:
            maps[f"{PREFIX}{name}.dense"] = [pooler]
        if source.has_next_sentence:
            maps[f"{PREFIX}{NEXT_SENTENCE}.out_proj"] = ["cls.seq_relationship"]
        if source.head is not None:
            head = f"{PREFIX}{source.head.name}"
            maps |= {
                f"{head}.span_proj": ["qa_outputs"],
                f"{head}.token_proj": ["classifier"],
                f"{head}.dense": [pooler],
                f"{head}.out_proj": ["classifier"],
            }

    for our_name, names in maps.items():
        for part in families.PARTS:
            weight = weights.get(f"{our_name}.{part}")
            if weight is not None:
                chunks = weight.chunk(len(names))
                found |= {f"{name}.{part}": chunk for name, chunk in zip(names, chunks, strict=True)}
    return found


# ModernBERT


def why_not_modernbert(source: Source) -> str:
    """Return the reason a checkpoint is not a ModernBERT; "" if it is one."""
    if not _modern_layers(source.cfg.sublayer_pattern):
        wanted = "s[rope=B]f[gate=G] and s[window=W,rope=B]f[gate=G], each with the same values everywhere"
        return f"its pattern is {source.cfg.sublayer_pattern}, whereas ModernBERT's consists of {wanted}"
    if source.head is not None:
        return f"ModernBERT has no counterpart to its head {source.head.name}"
    return _difference_from(source, MODERN_OPTIONS, "ModernBERT")


def _modern_layers(pattern: str) -> list[tuple[str, str, str]]:
    """Return each layer's window ("" for none), rotary base and gate, as strings.

    The list is empty if the pattern is not a ModernBERT's.
    """
    text = expand(pattern)
    layers = MODERN_LAYER.findall(text)
    distinct = set(layers)
    have_one_base_each = len({bool(window) for window, _, _ in distinct}) == len(distinct)
    have_one_gate = len({gate for _, _, gate in distinct}) == 1
    if have_one_base_each and have_one_gate and not MODERN_LAYER.sub("", text):
        return layers
    return []


def write_modernbert(source: Source, folder: Path) -> type:
    """Write the config and weights of a ModernBERT; return its class.

    Dropout on sublayer outputs is lost, because ModernBERT has none.
    """
    family = families.FAMILIES[MODERN]
    settings = _settings(source, family.keys)
    layers = _modern_layers(source.cfg.sublayer_pattern)
    layer_types = []
    ropes = {}
    window = 0
    for of_layer, base, gate in layers:
        layer_type = families.FULL
        if of_layer:
            layer_type = families.SLIDING
            window = int(of_layer)
        layer_types.append(layer_type)
        ropes[layer_type] = {"rope_type": "default", "rope_theta": float(base)}
        settings["hidden_activation"] = gate
    settings |= dict.fromkeys(("attention_bias", "mlp_bias", "classifier_bias"), not source.cfg.no_linear_bias)
    settings |= {
        "num_hidden_layers": len(layers),
        "layer_types": layer_types,
        "rope_parameters": ropes,
        "local_attention": 2 * window or 128,
        "classifier_activation": WRITTEN_ACTIVATIONS[str(source.cfg.head_activation_fn)],
        "norm_bias": not source.cfg.no_norm_bias,
        "cls_token_id": settings["bos_token_id"],
        "sep_token_id": settings["eos_token_id"],
    }
    config = transformers.ModernBertConfig(**settings)
    if source.has_lm_head:
        model_class = transformers.ModernBertForMaskedLM
    else:
        model_class = transformers.ModernBertModel
    return _save(config, model_class, weights_of(source, family), folder)
