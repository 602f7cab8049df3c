"""This package's encoder as a transformers model.

An export includes this file and everything it imports, so the same classes are used with and without the package.
"""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Optional, Union

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.huggingface.activations import ACTIVATIONS
from lazyformer_fairseq.huggingface.models.configuration import LazyFormerConfig
from lazyformer_fairseq.huggingface.models.saved_weights import check_weights, hash_weights, other_heads
from lazyformer_fairseq.modules.attention import BACK_ENDS, AttentionCall, AttentionInputs
from lazyformer_fairseq.modules.networks.auxiliary_loss import auxiliary_loss
from lazyformer_fairseq.modules.networks.encoder import Encoder, PaddingPermutation, TokenInfo, is_padded_right
from lazyformer_fairseq.modules.networks.heads import Pooler
from lazyformer_fairseq.modules.sublayers import feed_forward
from lazyformer_fairseq.modules.sublayers.attention import AttentionSublayer
from lazyformer_fairseq.modules.sublayers.attention_variants.span import SPANS
from lazyformer_fairseq.patterns.attention_variants import GIVEN
from lazyformer_fairseq.patterns.kinds import DISTRIBUTION

CODE_FILE = "modeling_lazyformer.py"
# Our classes, by the names of transformers' auto classes.
AUTO_CLASSES = {
    "AutoConfig": "LazyFormerConfig",
    "AutoModel": "LazyFormerModel",
    "AutoModelForMaskedLM": "LazyFormerForMaskedLM",
    "AutoModelForSequenceClassification": "LazyFormerForSequenceClassification",
    "AutoModelForTokenClassification": "LazyFormerForTokenClassification",
    "AutoModelForQuestionAnswering": "LazyFormerForQuestionAnswering",
}
# transformers 5 declares tied weights in a dictionary; earlier versions use a list.
TIES_BY_TABLE = int(transformers.__version__.partition(".")[0]) >= 5


def auto_map() -> dict[str, str]:
    """Return a config's `auto_map`, which names the classes in the accompanying code."""
    return {auto: f"{Path(CODE_FILE).stem}.{name}" for auto, name in AUTO_CLASSES.items()}


def activation(name: str) -> Any:
    """Return the activation function that has this name in a config.

    Raises:
        UserError: There is no activation with this name.
    """
    if name not in ACTIVATIONS:
        raise UserError(f"activation {name!r} must be one of {', '.join(ACTIVATIONS)}")
    return feed_forward.ACTIVATIONS[ACTIVATIONS[name]]


def copy_own_code(_config: LazyFormerConfig, folder: Path) -> None:
    """Copy the code that a model was loaded with. If the package is installed, it replaces this function."""
    for file in Path(__file__).parent.glob("*.py"):
        if file.name != "__init__.py":
            shutil.copyfile(file, folder / file.name)


class LazyFormerPreTrainedModel(PreTrainedModel):
    """The base class of all models, which initializes weights like BERT, checks loaded weights, and saves the code.

    Attributes:
        write_code: A function that writes a model's code to a folder, based on its config.
        selects_back_ends: Whether the fastest back end is selected by timing; False in exported models.
    """

    config_class = LazyFormerConfig
    base_model_prefix = "lazyformer"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = _supports_flash_attn_2 = _supports_flex_attn = False
    _no_split_modules = ("LazyFormerModel",)  # tensors passed between sublayers must stay on one device
    accepts_loss_kwargs = False  # Trainer itself divides the loss by the number of batches
    write_code = staticmethod(copy_own_code)
    selects_back_ends: ClassVar[bool] = True

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
        """Initialize the weights, and then the weights that start as copies of others."""
        super().post_init()
        for module in self.modules():
            if isinstance(module, AttentionSublayer):
                module.initialize_copies()

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Optional[str], *args: Any, **kwargs: Any) -> Any:
        """Load a model as in transformers, and check its weights.

        Raises:
            ValueError: Weights are missing, no longer tied, or different from the saved ones.
        """
        wants_loading = kwargs.pop("output_loading_info", False)
        model, loading = super().from_pretrained(
            pretrained_model_name_or_path,
            *args,
            output_loading_info=True,
            **kwargs,
        )
        is_changed = getattr(model, "is_quantized", False) or getattr(model, "_hf_peft_config_loaded", False)
        if pretrained_model_name_or_path is not None and not is_changed:
            check_weights(model, loading, str(pretrained_model_name_or_path))
        if wants_loading:
            return (model, loading)
        return model

    def save_pretrained(
        self,
        save_directory: Union[str, Path],
        is_main_process: bool = True,
        state_dict: Optional[dict[str, Tensor]] = None,
        **kwargs: Any,
    ) -> None:
        """Save a model as in transformers, together with its code and with hashes of the weights in the config."""
        if is_main_process:
            weights = state_dict
            if weights is None:
                weights = self.state_dict()
            self.config.weights_sha256 = hash_weights(weights)
            self.config.auto_map = auto_map()
            Path(save_directory).mkdir(parents=True, exist_ok=True)
            self.write_code(self.config, Path(save_directory))
        super().save_pretrained(save_directory, is_main_process=is_main_process, state_dict=state_dict, **kwargs)


class _Encoder(Encoder):
    """The encoder with transformers' gradient checkpointing, and a fixed back end where timing is impossible.

    Attributes:
        fixed_back_end: The back end for the next passes; None to select it by ``attention_backend``.
    """

    gradient_checkpointing = False
    fixed_back_end: Optional[str] = None

    def back_end(self) -> Callable[..., str]:
        """Return the function that selects a call's back end."""
        if self.fixed_back_end is None:
            return super().back_end()
        for span in self.options.common.get(SPANS, ()):  # lengths are not measured here, so assume the maximum
            span.set_longest(1.0)
        return self._take_fixed_back_end

    def _take_fixed_back_end(self, given: AttentionInputs) -> str:
        """Return the fixed back end, or ``eager`` if the fixed one cannot compute the call."""
        call = AttentionCall.of(given)
        reason = BACK_ENDS[self.fixed_back_end].why_not(call, given.device, given.dtype)
        if reason is None:
            return self.fixed_back_end
        return "eager"

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the sublayers, with checkpointing if transformers has enabled it."""
        self.checkpoints = self.gradient_checkpointing
        return super().run(*args, **kwargs)

    def checkpoint(self, function: Any, *args: Any) -> Any:
        """Return a function's result; the backward pass recomputes its intermediate values."""
        # A reentrant checkpoint would not see the tensors nested in the sublayers' outputs and would lose their
        # gradients.
        return self._gradient_checkpointing_func(function, *args, use_reentrant=False)

    @contextmanager
    def observing(self, probabilities: list[Tensor]) -> Iterator[None]:
        """Append each sublayer's attention probabilities (B, N, T, K) to a list within a ``with`` block."""

        def append(_sublayer: nn.Module, given: tuple[Any, ...], output: tuple[Tensor, dict[str, Any]]) -> None:
            below = given[1]
            x_BTC, handed_on = output
            if DISTRIBUTION in handed_on:
                distribution = handed_on[DISTRIBUTION]
            else:
                distribution = below[DISTRIBUTION]
            probabilities.append(distribution.probabilities.expand(x_BTC.size(0), -1, -1, -1))

        attending = [module for module in self.modules() if isinstance(module, AttentionSublayer)]
        hooks = [module.register_forward_hook(append) for module in attending]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


class LazyFormerModel(LazyFormerPreTrainedModel):
    """The encoder without a head: embeddings, followed by the sublayers of the pattern."""

    _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = other_heads()

    def __init__(self, config: LazyFormerConfig, is_part: bool = False):
        super().__init__(config)
        self.is_part = is_part
        self.encoder = _Encoder(
            pattern=config.sublayer_pattern,
            vocab_size=config.vocab_size,
            embed_dim=config.hidden_size,
            ffn_embed_dim=config.intermediate_size,
            num_heads=config.num_attention_heads,
            max_positions=config.max_position_embeddings,
            padding_idx=config.pad_token_id,
            relative_position_buckets=config.relative_position_buckets,
            relative_position_max_distance=config.relative_position_max_distance,
            token_types=config.type_vocab_size,
            no_token_positional_embeddings=not config.position_embeddings,
            embedding_norm=config.embedding_norm,
            dropout=config.hidden_dropout_prob,
            attention_dropout=config.attention_probs_dropout_prob,
            activation_dropout=config.activation_dropout,
            activation=activation(config.hidden_act),
            normalize_before=config.normalize_before,
            attention_backend=config.attention_backend,
            layer_norm_eps=config.layer_norm_eps,
            norm=config.norm,
            norm_bias=config.norm_bias,
            linear_bias=config.linear_bias,
            reversible=config.reversible,
            experts_loss=config.experts_loss,
        )
        if config.pooler:
            self.pooler = Pooler(config.hidden_size)
        else:
            self.pooler = None
        self.same_weights = same_weights(self)
        if self.same_weights:
            if TIES_BY_TABLE:
                self._tied_weights_keys = self.same_weights
            else:
                self._tied_weights_keys = list(self.same_weights)
        self.post_init()

    def init_weights(self) -> None:
        """Initialize the weights, unless a larger model contains this one and draws all weights in its order."""
        if not self.is_part:
            super().init_weights()

    def get_input_embeddings(self) -> nn.Embedding:
        """Return the word embeddings."""
        return self.encoder.embed_tokens

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replace the word embeddings."""
        self.encoder.embed_tokens = value

    def _tie_weights(self) -> None:
        """Tie the weights shared by sublayers. transformers 4 calls this after loading."""
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
        documents: Optional[Sequence[Sequence[int]]] = None,
        restart_positions: bool = False,
    ) -> Union[tuple[Any, ...], BaseModelOutputWithPooling]:
        """Encode a batch.

        Args:
            input_ids: The tokens (B, T).
            attention_mask: (B, T), 0 at padding. Padding may be anywhere and is skipped when positions are counted. If
                None, padding is where `input_ids` has the padding symbol.
            token_type_ids: (B, T), only for models with token types.
            inputs_embeds: Embeddings (B, T, C) instead of `input_ids`.
            global_attention_mask: (B, T), 1 at tokens with global attention in both directions, for patterns with
                ``global=given``.
            output_attentions: Whether to return each attending sublayer's attention probabilities (B, N, T, K), which
                are then computed by ``eager``.
            output_hidden_states: Whether to return the embeddings and all sublayers' outputs, the last one normalized.
            return_dict: Whether to return an object; False for a tuple.
            documents: Per sequence, the lengths of its documents, which do not attend to each other.
            restart_positions: Whether positions restart at each document.

        Raises:
            ValueError: A sequence is longer than the model's maximum length, or arguments contradict each other.
        """
        config = self.config
        if output_attentions is None:
            output_attentions = config.output_attentions
        if output_hidden_states is None:
            output_hidden_states = config.output_hidden_states
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass either input_ids or inputs_embeds")
        if documents is not None and output_attentions:
            raise ValueError("documents cannot be combined with output_attentions")
        if input_ids is None:
            tokens = inputs_embeds
        else:
            tokens = input_ids
        masks = {"attention_mask": attention_mask, "global_attention_mask": global_attention_mask}
        marked = self._global_positions(global_attention_mask)
        refuse_other_masks(tokens.shape[:2], **masks)
        padding_mask = self.find_padding(input_ids, attention_mask)
        is_padded_on_right = padding_mask is None
        if padding_mask is not None and not torch.compiler.is_compiling():  # a graph must work for any padding
            is_padded_on_right = is_padded_right(padding_mask)

        self.encoder.fixed_back_end = self._fixed_back_end(bool(output_attentions))
        given = {
            "padding_mask_BT": padding_mask,
            "return_all": bool(output_hidden_states),
            "is_padded_on_right": is_padded_on_right,
            "info": TokenInfo(
                global_positions_BT=marked,
                token_types_BT=token_type_ids,
                documents=documents,
                restart_positions=restart_positions,
            ),
        }
        attentions = None
        if output_attentions:
            probabilities: list[Tensor] = []
            with self.encoder.observing(probabilities):
                x, states = self.encoder(tokens, **given)
            if not is_padded_on_right:
                probabilities = self._in_order_of_input(probabilities, padding_mask)
            attentions = tuple(probabilities)
        else:
            x, states = self.encoder(tokens, **given)

        output = BaseModelOutputWithPooling(
            last_hidden_state=x,
            pooler_output=self._pool(x, padding_mask),
            hidden_states=(*states[:-1], x) if output_hidden_states else None,
            attentions=attentions,
        )
        if wants_dict(config, return_dict):
            return output
        return output.to_tuple()

    def _fixed_back_end(self, wants_distributions: bool) -> Optional[str]:
        """Return the back end that must be used; None if the encoder may select one."""
        if wants_distributions or self.config._attn_implementation == "eager":
            return "eager"
        is_exported = not self.selects_back_ends
        if is_exporting() or (is_exported and torch.compiler.is_compiling()):
            if torch.is_grad_enabled():
                return "eager"
            return "recompute"
        if is_exported and self.encoder.attention_backend == "auto":
            return "recompute"
        return None

    def _pool(self, x_BTC: Tensor, padding_mask_BT: Optional[Tensor]) -> Optional[Tensor]:
        if self.pooler is None:
            return None
        return self.pooler(first_of_text(x_BTC, padding_mask_BT)[:, None])

    def _global_positions(self, global_attention_mask: Optional[Tensor]) -> Optional[Tensor]:
        asks = any(planned.values.get("global") == GIVEN for planned in self.encoder.plan)
        if asks and global_attention_mask is None:
            raise ValueError(
                "this model has global=given: pass global_attention_mask, which is 1 at tokens with global attention "
                "in both directions"
            )
        if not asks and global_attention_mask is not None:
            raise ValueError("global_attention_mask is set, but none of this model's sublayers uses it")
        if global_attention_mask is None:
            return None
        return global_attention_mask.ne(0)

    def _in_order_of_input(self, probabilities: list[Tensor], padding_mask_BT: Tensor) -> list[Tensor]:
        """Return the probabilities in input order, undoing the encoder's move of all text to the front."""
        text = PaddingPermutation.of(padding_mask_BT)
        tokens = []
        for planned, sublayer in zip(self.encoder.plan, self.encoder.sublayers, strict=True):
            inner = getattr(sublayer, "inner", None)
            if isinstance(inner, AttentionSublayer):
                count = padding_mask_BT.size(1)
                if not inner.attends and planned.shaper.values.get("linformer"):
                    count = 0  # the keys that a `k` sublayer reads from a Linformer are not tokens
                tokens.append(count)
        return [text.pairs_back(*pair) for pair in zip(probabilities, tokens, strict=True)]

    def penalty(self) -> Union[Tensor, float]:
        """Return the sublayers' additional training loss, in nats per token."""
        return auxiliary_loss(self.encoder)

    def find_padding(self, input_ids: Optional[Tensor], attention_mask: Optional[Tensor]) -> Optional[Tensor]:
        """Return a mask (B, T) that is True at padding; None if there is certainly no padding."""
        if attention_mask is not None:
            padding_mask = attention_mask.eq(0)
        elif input_ids is not None and self.config.pad_token_id is not None:
            padding_mask = input_ids.eq(self.config.pad_token_id)
        else:
            return None
        # A traced graph must also work for other inputs, which may have padding.
        if torch.compiler.is_compiling() or bool(padding_mask.any()):
            return padding_mask
        return None


def is_exporting() -> bool:
    """Return whether a graph is being exported for other programs."""
    is_graph = getattr(
        torch.compiler,
        "is_exporting",
        torch.compiler.is_compiling,
    )  # torch 2.6 does not distinguish export from compilation
    return is_graph() or torch.jit.is_tracing()


def refuse_other_masks(sizes: torch.Size, **masks: Optional[Tensor]) -> None:
    """Reject masks with a shape other than `sizes` (B, T) or values other than 0 and 1, such as additive masks.

    Nothing is checked during tracing, because the graph must also work for other inputs.

    Raises:
        ValueError: A mask has a different shape or different values.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return
    for name, mask in masks.items():
        if mask is None:
            continue
        if mask.shape != sizes:
            raise ValueError(
                f"{name} has the shape {tuple(mask.shape)}, but must have the shape "
                f"(batch, tokens), here {tuple(sizes)}"
            )
        is_binary = mask.dtype == torch.bool or bool((mask.eq(0) | mask.eq(1)).all())
        if not is_binary:
            wrong = mask[mask.ne(0) & mask.ne(1)][0].item()
            raise ValueError(f"{name} contains {wrong}, but must be 1 at tokens that count and 0 at others")


def first_of_text(x_BTC: Tensor, padding_mask_BT: Optional[Tensor]) -> Tensor:
    """Return the features (B, C) of each text's first token, which may follow padding on the left.

    Args:
        x_BTC: The features of all tokens.
        padding_mask_BT: True at padding; None for no padding.
    """
    if padding_mask_BT is None:
        return x_BTC[:, 0]
    first = padding_mask_BT.int().argmin(-1).to(x_BTC.device)
    return x_BTC[torch.arange(x_BTC.size(0), device=x_BTC.device), first]


def same_weights(model: nn.Module) -> dict[str, str]:
    """Map each additional name of a weight shared by several sublayers to the weight's first name.

    The modules declare which weights they share. Comparing the weights would not work, because when transformers 4
    builds a model on the meta device, each module has its own weight at first.
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
    """Return whether to output an object instead of a tuple; `return_dict` overrides the config."""
    if return_dict is None:
        return config.return_dict
    return return_dict
