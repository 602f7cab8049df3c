"""The encoder as a model of transformers: this package's, with its back ends, and documents apart.

It takes the exported one's place: weights and arguments are the same, so a folder that was exported loads
into it, and what it saves brings its code along for those who lack this package.
"""

from collections.abc import Sequence
from typing import Any, Optional, Union

from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling

from lazyformer_fairseq.huggingface.exported import heads
from lazyformer_fairseq.huggingface.exported.modelling import LazyFormerConfig
from lazyformer_fairseq.huggingface.models.causal import LazyFormerCausalConfig
from lazyformer_fairseq.huggingface.settings import options_of, settings_of
from lazyformer_fairseq.modules.networks.encoder import Encoder
from lazyformer_fairseq.modules.networks.masked_lm import encoder_arguments
from lazyformer_fairseq.modules.networks.options import MaskedLMOptions, options_of_arch
from lazyformer_fairseq.modules.sublayers.interface import Context


def config_of_arch(arch: str, vocab_size: int, **settings: Any) -> Union[LazyFormerConfig, LazyFormerCausalConfig]:
    """The config of a named architecture, such as "modernbert_base"; `settings`, by the config's names, replace some.

    Raises:
        UserError: no such name.
    """
    options = options_of_arch(arch)
    kind = LazyFormerConfig if isinstance(options, MaskedLMOptions) else LazyFormerCausalConfig
    return kind(**{**settings_of(options), "vocab_size": vocab_size, **settings})


class _Unbuilt(Encoder):
    """An encoder whose sizes come later: transformers' class, which is built first, knows none."""

    def __init__(self) -> None:
        nn.Module.__init__(self)


class LazyFormerModel(heads.LazyFormerModel, _Unbuilt):
    """The package's encoder as a model of transformers.

    ``config.attention_backend`` names its back end, "auto" the fastest, as fairseq-train's option; `attention_backend`
    may be set on the model too.
    """

    def build(self, config: LazyFormerConfig) -> None:
        """Embeddings, sublayers, norms: an encoder's."""
        options = options_of(config, MaskedLMOptions)
        Encoder.__init__(self, **encoder_arguments(options, config.vocab_size, config.pad_token_id))

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
        positions_begin_anew: bool = False,
    ) -> Union[tuple[Any, ...], BaseModelOutputWithPooling]:
        """As the exported encoder's.

        Args:
            documents, positions_begin_anew: of each sequence the lengths of documents that do not see each other, see
                :meth:`~lazyformer_fairseq.modules.networks.encoder.Encoder.forward`. No padding is computed.
        """
        if documents is None:
            inputs = input_ids, attention_mask, token_type_ids, inputs_embeds, global_attention_mask
            return super().forward(*inputs, output_attentions, output_hidden_states, return_dict)
        config, tokens = self.config, inputs_embeds if input_ids is None else input_ids
        wants_attentions = config.output_attentions if output_attentions is None else output_attentions
        if wants_attentions:
            raise ValueError("documents: without output_attentions")
        wants_states = config.output_hidden_states if output_hidden_states is None else output_hidden_states
        mask = self.find_padding(input_ids, attention_mask)
        given = self._global_positions(global_attention_mask), token_type_ids, documents, positions_begin_anew
        x, states = Encoder.forward(self, tokens, mask, bool(wants_states), None, *given)
        pooled = None if self.pooler is None else self.pooler(x)
        states = (*states[:-1], x) if wants_states else None
        output = BaseModelOutputWithPooling(last_hidden_state=x, pooler_output=pooled, hidden_states=states)
        return output if heads.wants_dict(config, return_dict) else output.to_tuple()

    def run(self, *args: Any) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """As the encoder's; transformers says whether it checkpoints."""
        self.checkpoints = self.gradient_checkpointing
        return Encoder.run(self, *args)

    def checkpoint(self, *args: Any) -> Any:
        """By the function that transformers has for it."""
        return self._checkpoint(*args)

    def through_sublayers(
        self, x_BTC: Tensor, shared: Context, output_attentions: bool, output_hidden_states: bool
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """By the encoder, which recomputes by lazy blocks; with attentions as the exported one."""
        if output_attentions:
            return super().through_sublayers(x_BTC, shared, output_attentions, output_hidden_states)
        x, states, _ = self.run(x_BTC, shared, output_hidden_states)
        return x, states, []

    def context(self, *args: Any) -> Context:
        """As the encoder's."""
        return Encoder.context(self, *args)

    def _embed(
        self, input_ids: Optional[Tensor], inputs_embeds: Optional[Tensor], token_type_ids: Optional[Tensor]
    ) -> Tensor:
        return self.embed(inputs_embeds if input_ids is None else input_ids, token_type_ids)

    def penalty(self) -> Union[Tensor, float]:
        """What sublayers add to the loss of a token in nats."""
        return Encoder.penalty(self)
