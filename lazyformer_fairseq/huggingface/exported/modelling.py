"""The exported model: its configuration, the package's own sublayers by a plan, and weights that are what was saved.

What ``lazyformer export --to huggingface`` writes is this file, ``heads.py`` and all that they and the pattern's kinds
reach in the package, merged into one.
"""

import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Optional, Union

import torch
import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.utils import logging

from lazyformer_fairseq.huggingface.exported.plain import PlannedSublayer
from lazyformer_fairseq.modules.layer_norm import NormOptions
from lazyformer_fairseq.modules.networks.encoder import leave_out_first_norm
from lazyformer_fairseq.modules.sublayers.attention import AttentionSublayer
from lazyformer_fairseq.modules.sublayers.feed_forward import ResidualSublayer
from lazyformer_fairseq.modules.sublayers.interface import Context, SublayerOptions, build_sublayer
from lazyformer_fairseq.patterns.attention_kinds import chosen_kinds
from lazyformer_fairseq.patterns.kinds import DISTRIBUTION, ENCODER, find_kind

CODE_FILE = "modeling_lazyformer.py"
# Which weights are the same: from version 5 on by a table, before by a list.
TIES_BY_TABLE = int(transformers.__version__.partition(".")[0]) >= 5


DEFAULTS = {
    "vocab_size": 32768,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_attention_heads": 12,
    "max_position_embeddings": 512,
    "sublayer_pattern": "",
    "hidden_act": "gelu",
    "head_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.0,
    "activation_dropout": 0.0,
    "normalize_before": False,
    "layer_norm_eps": 1e-5,
    "norm": "layer",
    "norm_bias": True,
    "linear_bias": True,
    "embedding_norm": False,
    "plain_lm_head": False,
    "type_vocab_size": 0,
    "position_embeddings": True,
    "pooler": False,
    "relative_position_buckets": 0,
    "relative_position_max_distance": 128,
    "classifier": "dense",
    "classifier_dropout": 0.0,
    "reversible": False,
    "initializer_range": 0.02,
    "attention_backend": "auto",
    "sparse_prediction": None,
    "weights_sha256": None,
    "bos_token_id": 0,
    "pad_token_id": 1,
    "eos_token_id": 2,
    "mask_token_id": None,
    "tie_word_embeddings": True,
}


class LazyFormerConfig(PretrainedConfig):
    """Sizes, the pattern and its plan. Names are those of BertConfig where it has them.

    Args of ``__init__``, beside those of PretrainedConfig; :data:`DEFAULTS` has what they are where they are left out:
        sublayer_pattern: as it was trained; with lazyformer_fairseq M2x6 by default, the paper's LazyFormer.
        plan: the sublayers, lowest first; see :func:`read_plan`. ``lazyformer export`` writes it; where it is left out,
            lazyformer_fairseq makes it of the pattern.
        head_act: activation of the masked-LM head.
        normalize_before: LayerNorm before each sublayer (pre-norm) instead of after it.
        embedding_norm: pre-norm: of the embeddings, in place of the first sublayer's input.
        norm, norm_bias: "layer" or "rms", and whether LayerNorms have a bias.
        linear_bias: whether linear maps of sublayers, and of the masked-LM head, have biases.
        plain_lm_head: whether that head is the output map alone.
        reversible: whether sublayers change two streams in turn; without lazyformer_fairseq training keeps them all.
        activation_dropout: after the activation of the feed-forward sublayers.
        position_embeddings: whether there are learned positions.
        pooler: whether the encoder has BERT's, which a model has that was imported with one.
        relative_position_buckets: of T5's relative position bias; 0 for none.
        relative_position_max_distance: from this one on, all distances share a bucket.
        classifier: the classification head, "dense" (RoBERTa's) or "linear" (one map).
        classifier_dropout: in it.
        attention_backend: the one of lazyformer_fairseq's that computes, where that is installed;
            ``attn_implementation`` "eager" comes before it.
        sparse_prediction: whether masked-LM logits are those of predicted tokens alone, where there are labels; None
            for in training alone.
        weights_sha256: by part of the model and by precision, a hash of the weights.
        hidden_size, ..., layer_norm_eps: as BertConfig's. `type_vocab_size` is 0 where there are no token types.
    """

    model_type = "lazyformer"
    default_pattern = ""  # lazyformer_fairseq, which can read a pattern, puts one here

    @staticmethod
    def plan_of(pattern: str) -> list[dict[str, Any]]:
        """The plan of a pattern; this file alone cannot read one.

        Raises:
            ValueError: there is a pattern.
        """
        if pattern:
            raise ValueError(f"sublayer_pattern {pattern!r} without its plan: import lazyformer_fairseq.huggingface")
        return []

    def __init__(self, **given: Any):
        if not given.get("plan"):
            pattern = given.get("sublayer_pattern", self.default_pattern)
            given = {**given, "sublayer_pattern": pattern, "plan": self.plan_of(pattern)}
        super().__init__(**{**DEFAULTS, **given, "num_hidden_layers": len(given["plan"])})

    def to_diff_dict(self) -> dict[str, Any]:
        """Return what differs from the defaults, and the plan, for which the code in a folder has no default."""
        return {**super().to_diff_dict(), "sublayer_pattern": self.sublayer_pattern, "plan": self.plan}


def read_plan(plan: list[dict[str, Any]]) -> list[PlannedSublayer]:
    """The config's plan: for each sublayer its letter, its settings, the kinds of attention that these choose, what
    `readers` above read, and the number of the one that it reads from, the `giver`.

    Raises:
        ValueError: this file has no class for one of them.
    """
    planned: list[PlannedSublayer] = []
    for place in plan:
        lacking = [] if find_kind(place["letter"]) else [f"sublayers {place['letter']}"]
        there = {row.name for row in chosen_kinds(place["settings"])}
        lacking += [f"attention of kind {kind}" for kind in place["kinds"] if kind not in there]
        if lacking:
            raise ValueError(f"this file has no {', '.join(lacking)}: export the checkpoint again")
        producer = None if place["giver"] is None else planned[place["giver"]]
        planned.append(PlannedSublayer(place["letter"], place["settings"], tuple(place["readers"]), producer))
    return planned


def build_sublayers(config: LazyFormerConfig) -> nn.ModuleList:
    """Return one module per place of the config's plan.

    Raises:
        ValueError: there is no place.
    """
    if not config.plan:
        raise ValueError("this config has no plan, so there are no sublayers: give a sublayer_pattern, as in M2x6")
    options = SublayerOptions(
        config.hidden_size,
        config.intermediate_size,
        config.num_attention_heads,
        config.attention_probs_dropout_prob,
        config.activation_dropout,
        ACT2FN[config.hidden_act],
        config.max_position_embeddings,
        linear_bias=config.linear_bias,
    )
    around = (config.hidden_size, config.hidden_dropout_prob, config.normalize_before, norm_options(config))
    built = [build_sublayer(find_kind(each.letter).module(ENCODER), options, each) for each in read_plan(config.plan)]
    for module in (module for inner in built for module in inner.modules()):
        if hasattr(module, "set_longest"):  # nobody measures spans here: they may be as long as they can become
            module.set_longest(1.0)
    found = nn.ModuleList(ResidualSublayer(inner, *around) if inner.is_residual else inner for inner in built)
    if config.embedding_norm:
        leave_out_first_norm(found, config.normalize_before)
    return found


def norm_options(config: LazyFormerConfig) -> NormOptions:
    """Of all norms."""
    return NormOptions(config.layer_norm_eps, config.norm, config.norm_bias)


def eager(consumers: int, settings: Any) -> str:
    """The back end that writes distributions out."""
    return "eager"


def run_sublayers(
    sublayers: nn.ModuleList,
    x_BTC: Tensor,
    shared: Context,
    output_attentions: bool = False,
    checkpoint: Any = None,
    turns: Collection[int] = (),
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """The last output, the input and all outputs, and attention probabilities where they are asked for.

    Args:
        shared: of this pass.
        turns: of reversible layers, see :func:`turns_of`; what goes into the next sublayer then is an output.
        checkpoint: called with (function, x, below) in place of the function, as to save memory in training.
    """
    seen: list[Any] = []  # distributions
    shared = shared._replace(observe=seen.append if output_attentions else None)
    all_states, probabilities = [x_BTC], []
    below: dict[str, Any] = {}
    start = other = x_BTC  # of two streams, the one that is read, and the one that gets what is made of it
    for place, sublayer in enumerate(sublayers):
        if checkpoint is None:
            x_BTC, handed_on = sublayer(x_BTC, below, shared)
        else:
            x_BTC, handed_on = checkpoint(partial(_run_anew, sublayer, shared), x_BTC, below)
        if output_attentions and isinstance(getattr(sublayer, "inner", None), AttentionSublayer):
            distribution = seen.pop() if seen else below[DISTRIBUTION]  # an l attends with what it reads
            probabilities.append(distribution.probabilities.expand(x_BTC.size(0), -1, -1, -1))
        below = {**below, **handed_on}
        if place in turns:
            x_BTC, other = other + (x_BTC - start), start
            start = x_BTC
        all_states.append(x_BTC)
    return ((x_BTC + other) / 2 if turns else x_BTC), all_states, probabilities


def turns_of(config: LazyFormerConfig) -> list[int]:
    """Of reversible layers, behind which places the streams change their parts: where nothing above reads from below.

    None of a model without.
    """
    plan = config.plan if config.reversible else ()
    reads = [place if each["giver"] is None else each["giver"] for place, each in enumerate(plan)]
    return [place for place in range(len(reads)) if min(reads[place + 1 :], default=len(reads)) > place]


def source_code(config: LazyFormerConfig) -> str:
    """This file, which a saved model takes along."""
    return Path(__file__).read_text(encoding="utf-8")


class LazyFormerPreTrainedModel(PreTrainedModel):
    """Fresh weights as BERT's; loading that checks what it loaded; saving with the code."""

    config_class = LazyFormerConfig
    base_model_prefix = "lazyformer"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = _supports_flash_attn_2 = _supports_flex_attn = False
    _no_split_modules = ("LazyFormerModel",)  # what sublayers hand on stays on one device
    accepts_loss_kwargs = False  # Trainer divides a loss by the number of batches itself
    source_code = staticmethod(source_code)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        std = self.config.initializer_range
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=std)
        if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
            nn.init.ones_(module.weight)
        if isinstance(module, (nn.Linear, nn.LayerNorm)) and module.bias is not None:
            nn.init.zeros_(module.bias)
        is_loaded = getattr(getattr(module, "weight", None), "_is_hf_initialized", False)
        if isinstance(module, nn.Embedding) and module.padding_idx is not None and not is_loaded:
            nn.init.zeros_(module.weight[module.padding_idx])

    def post_init(self) -> None:
        """Fresh weights; what starts as a copy of other weights follows these."""
        super().post_init()
        for module in self.modules():
            if isinstance(module, AttentionSublayer):
                module.start_copies()

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Optional[str], *args: Any, **kwargs: Any) -> Any:
        """As PreTrainedModel's; raises a ValueError where weights are missing, untied or not those that were saved."""
        wants_loading = kwargs.pop("output_loading_info", False)
        model, loading = super().from_pretrained(
            pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs
        )
        is_changed = getattr(model, "is_quantized", False) or getattr(model, "_hf_peft_config_loaded", False)
        if pretrained_model_name_or_path is not None and not is_changed:
            check_weights(model, loading, str(pretrained_model_name_or_path))
        return (model, loading) if wants_loading else model

    def save_pretrained(
        self,
        save_directory: Union[str, Path],
        is_main_process: bool = True,
        state_dict: Optional[dict[str, Tensor]] = None,
        **kwargs: Any,
    ) -> None:
        """As PreTrainedModel's, with hashes of these weights in the config and the code beside it."""
        if is_main_process:
            self.config.weights_sha256 = hash_weights(self.state_dict() if state_dict is None else state_dict)
            self.config.auto_map = auto_map()
            Path(save_directory).mkdir(parents=True, exist_ok=True)
            code = self.source_code(self.config)
            Path(save_directory, CODE_FILE).write_text(code, encoding="utf-8")
        super().save_pretrained(save_directory, is_main_process=is_main_process, state_dict=state_dict, **kwargs)


def _run_anew(sublayer: nn.Module, shared: Context, x_BTC: Tensor, below: dict[str, Any]) -> tuple[Tensor, Any]:
    """What a sublayer returns, without what others have written for this pass: a second time it computes the same."""
    return sublayer(x_BTC, below, shared._replace(scores=replace(shared.scores)))


# By name in transformers the classes of this file.
AUTO_CLASSES = {
    "AutoConfig": "LazyFormerConfig",
    "AutoModel": "LazyFormerModel",
    "AutoModelForMaskedLM": "LazyFormerForMaskedLM",
    "AutoModelForSequenceClassification": "LazyFormerForSequenceClassification",
    "AutoModelForTokenClassification": "LazyFormerForTokenClassification",
    "AutoModelForQuestionAnswering": "LazyFormerForQuestionAnswering",
}


def auto_map() -> dict[str, str]:
    """The same, as a config names them for those who load the code beside it."""
    return {auto: f"{Path(CODE_FILE).stem}.{name}" for auto, name in AUTO_CLASSES.items()}


# Hashes of weights in the config, so that weights that are not those that were saved never load in silence:
# transformers gives a weight that it does not find in a file random numbers, and says so in a log. Here it is an error.
BASE = "lazyformer"  # the part without heads; a head is a part by its own name
HEADS = ("lm_head", "classifier", "token_classifier", "qa_outputs")


def other_heads(own: str = "") -> list[str]:
    """Patterns for names of weights that a model with the head `own` leaves alone."""
    return [rf"^{head}\." for head in HEADS if head != own]


# Whoever loads chooses the precision: each has a hash of the weights as they then are.
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

logger = logging.get_logger(__name__)


def by_part(names: Iterable[str]) -> dict[str, list[str]]:
    """Names of a model's weights, by the part that they belong to."""
    found: dict[str, list[str]] = {}
    for name in names:
        first = name.partition(".")[0]
        found.setdefault(first if first in HEADS else BASE, []).append(name)
    return found


def hash_part(weights: Mapping[str, Tensor], names: Iterable[str], precision: torch.dtype) -> str:
    """SHA-256 of names, shapes and numbers; of the base with or without a head around it, the same."""
    digest = hashlib.sha256()
    for name, weight in sorted((name.removeprefix(f"{BASE}."), weights[name]) for name in names):
        weight = weight.detach().to("cpu")
        weight = weight.to(precision) if weight.is_floating_point() else weight
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}\n".encode())
        digest.update(weight.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def hash_weights(weights: Mapping[str, Tensor]) -> Optional[dict[str, dict[str, str]]]:
    """By part and by precision, as the config has it; None where a weight is not here in full."""
    if not all(is_plain(weight) for weight in weights.values()):
        return None
    return {
        part: {name: hash_part(weights, names, precision) for name, precision in PRECISIONS.items()}
        for part, names in by_part(weights).items()
    }


def is_plain(weight: Tensor) -> bool:
    """Whether it is a tensor with all its numbers: not on the meta device, not a shard, not quantized."""
    return type(weight) in (Tensor, nn.Parameter, nn.Buffer) and not weight.is_meta


def check_weights(model: nn.Module, loading: Mapping[str, Any], source: str) -> None:
    """Compares a model that was just loaded with the hashes in its config.

    A part that the config has no hash of, such as a new classification head, may have fresh weights. So may one whose
    sizes the caller has changed, by ``ignore_mismatched_sizes``.

    Args:
        loading: what transformers says of how it loaded.
        source: the folder, for messages.

    Raises:
        ValueError: a weight is missing or untied, or has other numbers than those that were saved.
    """
    known = model.config.weights_sha256 or {}
    missing = by_part(loading["missing_keys"])
    changed = by_part(key if isinstance(key, str) else key[0] for key in loading["mismatched_keys"])
    for part, names in missing.items():
        if part == BASE or part in known:
            raise ValueError(
                f"{source}: its file of weights lacks {', '.join(sorted(names)[:3])}"
                f"{f' and {len(names) - 3} more' if len(names) > 3 else ''}, which would have random numbers: copy the "
                "whole folder again, or export the checkpoint again"
            )
    _check_tied(model, source)
    weights = model.state_dict()
    for part, names in by_part(weights).items():
        if part in changed:
            logger.warning("%s: sizes of %s have changed, so nobody knows whether its weights are right", source, part)
        elif part in known or part == BASE:
            _check_part(known.get(part), weights, names, source)


def _check_part(
    hashes: Optional[Mapping[str, str]], weights: Mapping[str, Tensor], names: list[str], source: str
) -> None:
    found = {weights[name].dtype for name in names if weights[name].is_floating_point()}
    precision = next(iter(found)) if len(found) == 1 else None
    precision = torch.float32 if precision is torch.float64 else precision  # exact both ways
    name = next((name for name, each in PRECISIONS.items() if each is precision), "")
    if name not in (hashes or {}) or not all(is_plain(weights[each]) for each in names):
        why = "they are not all here, or in mixed or other precision" if hashes else "config.json has no weights_sha256"
        logger.warning("%s: cannot tell whether the weights are those that were saved: %s", source, why)
    elif hash_part(weights, names, precision) != hashes[name]:
        raise ValueError(
            f"{source}: the weights are not those that config.json was saved with (weights_sha256): copy the whole "
            "folder again. Who changes weights on purpose saves them by save_pretrained, or removes weights_sha256"
        )


def _check_tied(model: nn.Module, source: str) -> None:
    """The masked-LM decoder is the token embedding."""
    decoder = model.get_output_embeddings()
    if decoder is None or not model.config.tie_word_embeddings or decoder.weight.is_meta:
        return
    if decoder.weight is not model.get_input_embeddings().weight:
        raise ValueError(
            f"{source}: the file has a decoder of its own, lm_head.decoder.weight, but config.json ties it to the "
            'token embedding: if that is meant, set "tie_word_embeddings": false there'
        )
