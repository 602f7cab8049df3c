"""The exported model: its configuration, and the encoder around the package's own sublayers.

What ``lazyformer export --to huggingface`` writes is this file, ``heads.py`` and all that they and the pattern's kinds
reach in the package, merged into one.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Optional, Union

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PretrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_outputs import BaseModelOutputWithPooling

from lazyformer_fairseq.huggingface.exported.checksums import check_weights, hash_weights, other_heads
from lazyformer_fairseq.huggingface.exported.plain import PlannedSublayer
from lazyformer_fairseq.modules.attention.scores import Scores
from lazyformer_fairseq.modules.networks.encoder import RelativePositionBias
from lazyformer_fairseq.modules.networks.heads import Pooler
from lazyformer_fairseq.modules.sublayers.attention import AttentionSublayer
from lazyformer_fairseq.modules.sublayers.feed_forward import ResidualSublayer
from lazyformer_fairseq.modules.sublayers.interface import Context, SublayerOptions
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
    "type_vocab_size": 0,
    "pooler": False,
    "relative_position_buckets": 0,
    "relative_position_max_distance": 128,
    "classifier": "dense",
    "classifier_dropout": 0.0,
    "initializer_range": 0.02,
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
        sublayer_pattern: as it was trained; for readers, as `plan` says the same.
        plan: the sublayers, lowest first; see :func:`read_plan`. ``lazyformer export`` writes it.
        head_act: activation of the masked-LM head.
        normalize_before: LayerNorm before each sublayer (pre-norm) instead of after it.
        activation_dropout: after the activation of the feed-forward sublayers.
        pooler: whether the encoder has BERT's, which a model has that was imported with one.
        relative_position_buckets: of T5's relative position bias; 0 for none.
        relative_position_max_distance: from this one on, all distances share a bucket.
        classifier: the classification head, "dense" (RoBERTa's) or "linear" (one map).
        classifier_dropout: in it.
        weights_sha256: by part of the model and by precision, a hash of the weights.
        hidden_size, ..., layer_norm_eps: as BertConfig's. `type_vocab_size` is 0 where there are no token types.
    """

    model_type = "lazyformer"

    def __init__(self, **given: Any):
        plan = given.get("plan") or []
        super().__init__(**{**DEFAULTS, **given, "plan": plan, "num_hidden_layers": len(plan)})


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
    """One module per place of the config's plan."""
    options = SublayerOptions(
        config.hidden_size,
        config.intermediate_size,
        config.num_attention_heads,
        config.attention_probs_dropout_prob,
        config.activation_dropout,
        ACT2FN[config.hidden_act],
        config.max_position_embeddings,
    )
    around = (config.hidden_size, config.hidden_dropout_prob, config.normalize_before, config.layer_norm_eps)
    built = [find_kind(each.letter).module(ENCODER).build(options, each) for each in read_plan(config.plan)]
    for module in (module for inner in built for module in inner.modules()):
        if hasattr(module, "set_longest"):  # nobody measures spans here: they may be as long as they can become
            module.set_longest(1.0)
    return nn.ModuleList(ResidualSublayer(inner, *around) if inner.is_residual else inner for inner in built)


def run_sublayers(
    sublayers: nn.ModuleList,
    x_BTC: Tensor,
    scores: Scores,
    attention: str = "eager",
    output_attentions: bool = False,
    checkpoint: Any = None,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """The last output, the input and all outputs, and attention probabilities where they are asked for.

    Args:
        attention: "eager"; what else it is, torch's fused attention computes.
        checkpoint: called with (function, x, below) in place of the function, as to save memory in training.
    """
    seen: list[Any] = []  # distributions
    back_end = "eager" if attention == "eager" else "recompute"
    shared = Context(scores, lambda consumers, settings: back_end, observe=seen.append if output_attentions else None)
    all_states, probabilities = [x_BTC], []
    below: dict[str, Any] = {}
    for sublayer in sublayers:
        if checkpoint is None:
            x_BTC, handed_on = sublayer(x_BTC, below, shared)
        else:
            x_BTC, handed_on = checkpoint(partial(_run_anew, sublayer, shared), x_BTC, below)
        if output_attentions and isinstance(getattr(sublayer, "inner", None), AttentionSublayer):
            distribution = seen.pop() if seen else below[DISTRIBUTION]  # an l attends with what it reads
            probabilities.append(distribution.probabilities.expand(x_BTC.size(0), -1, -1, -1))
        below = {**below, **handed_on}
        all_states.append(x_BTC)
    return x_BTC, all_states, probabilities


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
        if isinstance(module, nn.LayerNorm):
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
            self.config.auto_map = {auto: f"{Path(CODE_FILE).stem}.{name}" for auto, name in AUTO_CLASSES.items()}
            Path(save_directory).mkdir(parents=True, exist_ok=True)
            code = self.source_code(self.config)
            Path(save_directory, CODE_FILE).write_text(code, encoding="utf-8")
        super().save_pretrained(save_directory, is_main_process=is_main_process, state_dict=state_dict, **kwargs)


def _run_anew(sublayer: nn.Module, shared: Context, x_BTC: Tensor, below: dict[str, Any]) -> tuple[Tensor, Any]:
    """What a sublayer returns, without what others have written for this pass: a second time it computes the same."""
    return sublayer(x_BTC, below, shared._replace(scores=replace(shared.scores)))


class LazyFormerModel(LazyFormerPreTrainedModel):
    """The encoder: embeddings, then the sublayers of the plan.

    Post-norm encoders normalise the embeddings, pre-norm ones the output.
    """

    _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = other_heads()

    def __init__(self, config: LazyFormerConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.embed_token_types = (
            nn.Embedding(config.type_vocab_size, config.hidden_size) if config.type_vocab_size else None
        )
        self.relative_position_bias = (
            RelativePositionBias(
                config.num_attention_heads, config.relative_position_buckets, config.relative_position_max_distance
            )
            if config.relative_position_buckets
            else None
        )
        self.sublayers = build_sublayers(config)
        norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.embedding_layer_norm = None if config.normalize_before else norm
        self.final_layer_norm = norm if config.normalize_before else None
        self.pooler = Pooler(config.hidden_size) if config.pooler else None
        self.gradient_checkpointing = False
        self.same_weights = same_weights(self)
        if self.same_weights:
            self._tied_weights_keys = self.same_weights if TIES_BY_TABLE else list(self.same_weights)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embed_tokens

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.embed_tokens = value

    def _tie_weights(self) -> None:
        """What transformers 4 calls after loading: sublayers that share a weight do so again."""
        for name, source in self.same_weights.items():
            module, _, weight = name.rpartition(".")
            setattr(self.get_submodule(module), weight, self.get_parameter(source))

    def forward(
        self,
        input_ids: Optional[Tensor] = None,
        attention_mask: Optional[Tensor] = None,
        token_type_ids: Optional[Tensor] = None,
        inputs_embeds: Optional[Tensor] = None,
        global_attention_mask: Optional[Tensor] = None,
        output_attentions: Optional[bool] = None,
        output_hidden_states: Optional[bool] = None,
        return_dict: Optional[bool] = None,
    ) -> Union[tuple[Any, ...], BaseModelOutputWithPooling]:
        """Encodes.

        Args:
            input_ids: (B, T).
            attention_mask: (B, T), 0 at padding, which may stand anywhere: before the text it takes no position. None
                for padding wherever `input_ids` has the padding symbol.
            token_type_ids: (B, T); for models with token types alone.
            inputs_embeds: (B, T, C), in place of `input_ids`.
            global_attention_mask: (B, T), 1 at tokens that see and are seen by all; for patterns with ``global=given``.
            output_attentions: also return probabilities (B, N, T, K) of each attending sublayer, computed eagerly.
            output_hidden_states: also return the embeddings and what each sublayer returned, the last one normalised.
            return_dict: False for a tuple.

        Raises:
            ValueError: a sequence longer than the model's positions, or arguments that do not fit together.
        """
        config = self.config
        output_attentions = config.output_attentions if output_attentions is None else output_attentions
        output_hidden_states = config.output_hidden_states if output_hidden_states is None else output_hidden_states
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        padding_mask = self.find_padding(input_ids, attention_mask)
        x = self._embed(input_ids, inputs_embeds, token_type_ids, padding_mask)
        scores = Scores() if self.relative_position_bias is None else self.relative_position_bias(x.size(1))
        scores = scores if padding_mask is None else scores.with_padding(padding_mask, is_on_right=False)
        if (given := self._global_positions(global_attention_mask)) is not None:
            scores = scores.with_given(given)
        attention = "eager" if output_attentions else config._attn_implementation
        checkpoint = self._checkpoint if self.gradient_checkpointing and self.training else None
        x, states, probabilities = run_sublayers(
            self.sublayers, x, scores, attention, bool(output_attentions), checkpoint
        )
        x = x if self.final_layer_norm is None else self.final_layer_norm(x)
        output = BaseModelOutputWithPooling(
            last_hidden_state=x,
            pooler_output=None if self.pooler is None else self.pooler(first_of_text(x, padding_mask)[:, None]),
            hidden_states=(*states[:-1], x) if output_hidden_states else None,
            attentions=tuple(probabilities) if output_attentions else None,
        )
        return output if wants_dict(config, return_dict) else output.to_tuple()

    def find_padding(self, input_ids: Optional[Tensor], attention_mask: Optional[Tensor]) -> Optional[Tensor]:
        """(B, T), True at padding; None where it is known that there is none."""
        if attention_mask is not None and attention_mask.dim() != 2:
            raise ValueError(f"attention_mask has the shape {tuple(attention_mask.shape)}, must be (batch, tokens)")
        if attention_mask is not None:
            padding_mask = attention_mask.eq(0)
        elif input_ids is not None and self.config.pad_token_id is not None:
            padding_mask = input_ids.eq(self.config.pad_token_id)
        else:
            return None
        # What is traced must hold for other inputs too.
        return padding_mask if torch.compiler.is_compiling() or bool(padding_mask.any()) else None

    def _embed(
        self,
        input_ids: Optional[Tensor],
        inputs_embeds: Optional[Tensor],
        token_type_ids: Optional[Tensor],
        padding_mask: Optional[Tensor],
    ) -> Tensor:
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        x = x + self._positions(x.size(1), padding_mask)
        if self.embed_token_types is not None:
            if token_type_ids is None:
                token_type_ids = torch.zeros(x.shape[:2], dtype=torch.long, device=x.device)
            x = x + self.embed_token_types(token_type_ids)
        elif token_type_ids is not None:
            raise ValueError("token_type_ids are given, but this model has no token types: leave them out")
        x = x if self.embedding_layer_norm is None else self.embedding_layer_norm(x)
        return F.dropout(x, self.config.hidden_dropout_prob, self.training)

    def _positions(self, time: int, padding_mask_BT: Optional[Tensor]) -> Tensor:
        """Embeddings of T positions. They count from each row's first text: padding before it takes none."""
        embeddings = self.embed_positions.weight
        if time > embeddings.size(0):
            raise ValueError(f"a sequence of {time} tokens is longer than the model's {embeddings.size(0)} positions")
        if padding_mask_BT is None:
            return embeddings[:time]
        first = padding_mask_BT.int().argmin(-1, keepdim=True)
        return embeddings[(torch.arange(time, device=first.device) - first).clamp(min=0)]

    def _global_positions(self, global_attention_mask: Optional[Tensor]) -> Optional[Tensor]:
        asks = any(place["settings"].get("global") == "given" for place in self.config.plan)
        if asks != (global_attention_mask is not None):
            raise ValueError(
                "this model's tokens that see and are seen by all are given: pass global_attention_mask, 1 at each"
                if asks
                else "global_attention_mask is given, but no sublayer of this model asks for it"
            )
        return None if global_attention_mask is None else global_attention_mask.ne(0)

    def _checkpoint(self, function: Callable, *arguments: Any) -> Any:
        # Reentrant, it would not see the tensors within what sublayers hand on, and their gradients would be lost.
        return self._gradient_checkpointing_func(function, *arguments, use_reentrant=False)


def first_of_text(x_BTC: Tensor, padding_mask_BT: Optional[Tensor]) -> Tensor:
    """(B, C) of the tokens with which texts begin, behind padding if there is some on the left."""
    if padding_mask_BT is None:
        return x_BTC[:, 0]
    first = padding_mask_BT.int().argmin(-1).to(x_BTC.device)
    return x_BTC[torch.arange(x_BTC.size(0), device=x_BTC.device), first]


def same_weights(model: nn.Module) -> dict[str, str]:
    """From each further name of a weight that several sublayers share to its first.

    They say so themselves: where transformers 4 builds a model without memory, each has a weight of its own at first.
    """
    first: dict[str, str] = {}
    found = {}
    for path, module in model.named_modules():
        for name, common in getattr(module, "common_weights", {}).items():
            weight = f"{path}.{name}"
            if first.setdefault(common, weight) != weight:
                found[weight] = first[common]
    return found


def wants_dict(config: LazyFormerConfig, return_dict: Optional[bool]) -> bool:
    return config.return_dict if return_dict is None else return_dict


# By name in transformers the classes of this file.
AUTO_CLASSES = {
    "AutoConfig": "LazyFormerConfig",
    "AutoModel": "LazyFormerModel",
    "AutoModelForMaskedLM": "LazyFormerForMaskedLM",
    "AutoModelForSequenceClassification": "LazyFormerForSequenceClassification",
    "AutoModelForTokenClassification": "LazyFormerForTokenClassification",
    "AutoModelForQuestionAnswering": "LazyFormerForQuestionAnswering",
}
