"""The causal language model as a transformers model with ``generate``.

The decoder's memory (Transformer-XL, section 3.2) serves as the cache of ``generate``. The memory contains the
attending sublayers' inputs. By default, it covers the whole text, so each step produces the same result as a pass over
the whole text.
"""

from dataclasses import fields
from typing import Any, ClassVar, Optional, Union

import torch
from torch import Tensor
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.huggingface.models.encoder import wants_dict
from lazyformer_fairseq.huggingface.models.heads import IGNORED, at_least_one
from lazyformer_fairseq.huggingface.settings import options_of, settings_of
from lazyformer_fairseq.modules.networks.adaptive_softmax import AdaptiveEmbedding
from lazyformer_fairseq.modules.networks.auxiliary_loss import auxiliary_loss
from lazyformer_fairseq.modules.networks.causal_decoder import CausalDecoder, init_transformer_xl_weights
from lazyformer_fairseq.modules.networks.causal_lm import decoder_arguments, softmax_of
from lazyformer_fairseq.modules.networks.options import CausalLMOptions
from lazyformer_fairseq.modules.networks.stream_memory import StreamMemory, WholeMemory
from lazyformer_fairseq.modules.sublayers.interface import Context, StackOutput
from lazyformer_fairseq.patterns.grammar import plan
from lazyformer_fairseq.patterns.kinds import CAUSAL

# The name of the cache, which depends on the version of transformers.
CACHE = next(
    name for name in ("past_key_values", "cache") if name in {each.name for each in fields(CausalLMOutputWithPast)}
)


class LazyFormerCausalConfig(PretrainedConfig):
    """The sizes and pattern of a causal language model. Settings shared with BertConfig keep their names.

    The defaults are the sizes of ``transformer_xl_base``, except for a vocabulary of 32,768 words in one band.

    Arguments of ``__init__``, besides PretrainedConfig's:
        adaptive_softmax_cutoff: The ids at which a new band of words begins, such as "20000,60000"; "" for one band.
        adaptive_softmax_factor: The factor by which each band's vectors are narrower than the previous band's.
        mem_len: The number of tokens of earlier segments that the memory contained during training. ``generate``
            remembers the whole text.
        clamp_len: The maximum distance; larger distances are clamped to it. 0 for no limit.
        same_length: Whether every query attends to the same number of earlier tokens, `mem_len`.
        sublayer_pattern, norm, norm_bias, linear_bias, normalize_before, activation_dropout, attention_backend: See
            LazyFormerConfig.
    """

    model_type = "lazyformer_lm"

    def __init__(self, **given: Any):
        settings = {
            **settings_of(CausalLMOptions()),
            "vocab_size": 32768,
            "adaptive_softmax_cutoff": "",
            "adaptive_softmax_factor": 1,
            "tie_word_embeddings": False,
            "bos_token_id": 0,
            "pad_token_id": 1,
            "eos_token_id": 2,
            **given,
        }
        settings["num_hidden_layers"] = len(plan(settings["sublayer_pattern"], CAUSAL))
        super().__init__(**settings)


class LazyFormerMemory(WholeMemory):
    """The memory of a text, which transformers uses as a cache; by default, it covers the whole text."""

    is_compileable = False
    is_linear = (False,)
    layers = ()

    def get_seq_length(self, layer: int = 0) -> int:
        """Return the number of tokens read so far."""
        return self.seen

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the memory so that each beam has the memory of the beam that it continues."""
        self.states = [state.index_select(0, beam_idx.to(state.device)) for state in self.states]


class _Decoder(CausalDecoder):
    """The decoder with transformers' gradient checkpointing."""

    gradient_checkpointing = False

    def run(
        self,
        x_BTC: Tensor,
        shared: Context,
        return_all: bool = False,
        memory: Optional[StreamMemory] = None,
    ) -> StackOutput:
        self.checkpoints = self.gradient_checkpointing
        return super().run(x_BTC, shared, return_all, memory)

    def checkpoint(self, *arguments: Any) -> Any:
        return self._gradient_checkpointing_func(*arguments, use_reentrant=False)


class LazyFormerForCausalLM(PreTrainedModel, GenerationMixin):
    """A causal language model with any pattern, and an adaptive softmax tied to the embedding.

    The weights have the same names as in checkpoints. Logits are log-probabilities.
    """

    config_class = LazyFormerCausalConfig
    base_model_prefix = ""
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True
    _is_stateful = True  # tokens cannot be removed from the memory
    _supports_sdpa = True
    _no_split_modules = ("_Decoder",)
    _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = ["dictionary_sha256"]

    def __init__(self, config: LazyFormerCausalConfig):
        super().__init__(config)
        options = options_of(config, CausalLMOptions)
        self.decoder = _Decoder(**decoder_arguments(options, config.vocab_size))
        self.softmax = softmax_of(options, self.decoder.embedding, config.vocab_size)
        self.post_init()

    def _init_weights(self, module: torch.nn.Module) -> None:
        init_transformer_xl_weights(module, self.config.initializer_range)

    def get_input_embeddings(self) -> AdaptiveEmbedding:
        """Return the word embeddings."""
        return self.decoder.embedding

    def resize_token_embeddings(self, new_num_tokens: Optional[int] = None, *args: Any, **kwargs: Any) -> Any:
        """Reject any size but the current one, because ids are sorted by frequency and divided into bands.

        Raises:
            UserError: The size is not the vocabulary size.
        """
        if new_num_tokens not in (None, self.config.vocab_size):
            raise UserError(
                f"the embeddings cannot be resized to {new_num_tokens} tokens, because an adaptive softmax with "
                f"{self.config.vocab_size} words cannot be resized"
            )
        return self.decoder.embedding

    def forward(
        self,
        input_ids: Optional[Tensor] = None,
        attention_mask: Optional[Tensor] = None,
        past_key_values: Optional[StreamMemory] = None,
        inputs_embeds: Optional[Tensor] = None,
        labels: Optional[Tensor] = None,
        use_cache: Optional[bool] = None,
        logits_to_keep: int = 0,
        output_attentions: Optional[bool] = None,
        output_hidden_states: Optional[bool] = None,
        return_dict: Optional[bool] = None,
        num_items_in_batch: Union[Tensor, int, None] = None,
        cache: Optional[StreamMemory] = None,
    ) -> Any:
        """Predict the next tokens of texts, or of continuations of texts in a memory.

        Args:
            input_ids: The tokens (B, T).
            attention_mask: (B, T), 0 at padding. Padding must be on the right and cannot be combined with a memory.
            past_key_values: A :class:`LazyFormerMemory`, which these tokens are added to, or a StreamMemory, which
                keeps the last `mem_len` tokens as during training.
            cache: The same as `past_key_values`, under the name used by other versions of transformers.
            inputs_embeds: Embeddings (B, T, C) instead of `input_ids`.
            labels: (B, T), equal to `input_ids`, or -100 at tokens that are not predicted. Each label is predicted at
                the previous position. During training, `logits` is then None, because the logits of rare words are only
                computed where they are needed.
            use_cache: Whether to create a memory if none is passed, and to return it.
            logits_to_keep: The number of final positions to return logits for; 0 for all.
            output_attentions: Not supported.
            output_hidden_states: Whether to return the embeddings and all sublayers' outputs, the last one normalized.
            return_dict: Whether to return an object; False for a tuple.
            num_items_in_batch: The number of predicted tokens in the whole update, which the loss is divided by.

        Raises:
            ValueError: The padding is not on the right, `input_ids` and `inputs_embeds` are both set or both missing,
                or attentions are requested.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise UserError("pass either input_ids or inputs_embeds")
        if output_attentions:
            raise UserError("output_attentions: lazyformer_fairseq's causal models do not return attentions")
        tokens = input_ids
        if input_ids is None:
            tokens = inputs_embeds
        memory = past_key_values
        if memory is None:
            memory = cache
        if memory is None and use_cache:
            memory = LazyFormerMemory()
        _refuse_padding(attention_mask, memory)
        wants_states = output_hidden_states
        if wants_states is None:
            wants_states = self.config.output_hidden_states
        features, states = self.decoder(tokens, memory, bool(wants_states))
        if isinstance(memory, LazyFormerMemory):
            memory.seen += tokens.size(1)

        found: dict[str, Any] = {}
        if labels is not None:
            found["loss"] = self._loss(features, labels.to(features.device), num_items_in_batch)
        if labels is None or not self.training:
            found["logits"] = self.softmax.log_probabilities(features[:, -logits_to_keep:], self.decoder.embedding)
        if use_cache:
            found[CACHE] = memory
        if wants_states:
            found["hidden_states"] = (*states[:-1], features)
        output = CausalLMOutputWithPast(**found)
        if wants_dict(self.config, return_dict):
            return output
        return output.to_tuple()

    def _loss(self, features_BTC: Tensor, labels_BT: Tensor, items: Union[Tensor, int, None]) -> Tensor:
        targets = labels_BT[:, 1:].flatten()
        places = targets.ne(IGNORED).nonzero().squeeze(1)
        predicting = features_BTC[:, :-1].flatten(0, 1).index_select(0, places)
        nats = self.softmax.negative_log_likelihood(predicting, targets[places], self.decoder.embedding).sum()
        if items is None:
            items = len(places)
        items = at_least_one(items, nats)
        loss = nats / items
        if self.training:
            loss = loss + auxiliary_loss(self.decoder) * (len(places) / items)
        return loss

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        attention_mask: Optional[Tensor] = None,
        **given: Any,
    ) -> dict[str, Any]:
        """Return the inputs for the next step: the tokens that are not in the memory yet, and the memory."""
        memory = given.get(CACHE)
        if memory is None:
            seen = 0
        else:
            seen = memory.get_seq_length()
        inputs = {"input_ids": input_ids[:, seen:], CACHE: memory, "use_cache": False, "logits_to_keep": 1}
        if seen:
            return inputs
        return {**inputs, "attention_mask": attention_mask}

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: dict[str, Any], *unused: Any) -> None:
        wanted = generation_config.use_cache is not False and not self.decoder.why_no_memory
        if wanted and model_kwargs.get(CACHE) is None:
            model_kwargs[CACHE] = LazyFormerMemory()


def _refuse_padding(mask: Optional[Tensor], memory: Optional[StreamMemory]) -> None:
    if mask is None or torch.compiler.is_compiling() or bool(mask.all()):
        return
    if memory is not None or bool((mask[:, 1:] > mask[:, :-1]).any()):
        raise UserError(
            "attention_mask: a causal model can only continue a batch of texts of equal length, without padding at the "
            "start; generate from a single text, or from texts of the same length"
        )
