"""The causal language model: Transformer-XL, PAR, Sandwich and lazy PAR are this class with other patterns."""

from functools import partial
from typing import Any, Optional

from fairseq.models import register_model
from torch import Tensor

from lazyformer_fairseq.fairseq_plugin.models.causal_lm_config import CausalLMConfig, parse_cutoffs
from lazyformer_fairseq.fairseq_plugin.models.checkpoint_match import CheckedModel, dictionary_hash
from lazyformer_fairseq.fairseq_plugin.models.presets import register_presets
from lazyformer_fairseq.fairseq_plugin.reliability.options import backend_of
from lazyformer_fairseq.fairseq_plugin.replacements import loading_safely
from lazyformer_fairseq.modules.networks.adaptive_softmax import AdaptiveSoftmax
from lazyformer_fairseq.modules.networks.causal_decoder import CausalDecoder, init_transformer_xl_weights
from lazyformer_fairseq.modules.networks.stack import StreamMemory
from lazyformer_fairseq.modules.sublayers.feed_forward import ACTIVATIONS
from lazyformer_fairseq.patterns.architectures import CAUSAL_ARCHITECTURES


@register_model("lazyformer_lm", dataclass=CausalLMConfig)
class CausalLanguageModel(CheckedModel):
    """A causal decoder of any pattern and an adaptive softmax that is tied to its embedding.

    Attributes:
        decoder: the CausalDecoder; its `mem_len`, `clamp_len` and `same_length` may be set for evaluation.
        softmax: the AdaptiveSoftmax.
    """

    per_word = "softmax.bias"

    @classmethod
    def from_pretrained(cls, *args, **kwargs):
        """fairseq's, for files that may be somebody else's: runs nothing that they hold."""
        with loading_safely():
            return super().from_pretrained(*args, **kwargs)

    def __init__(self, cfg: CausalLMConfig, dictionary):
        super().__init__()
        self.cfg = cfg
        self.padding_idx = dictionary.pad()
        self.decoder = CausalDecoder(
            pattern=cfg.sublayer_pattern,
            vocab_size=len(dictionary),
            embed_dim=cfg.decoder_embed_dim,
            ffn_embed_dim=cfg.decoder_ffn_embed_dim,
            num_heads=cfg.decoder_attention_heads,
            mem_len=cfg.mem_len,
            clamp_len=cfg.clamp_len,
            same_length=cfg.same_length,
            cutoffs=parse_cutoffs(cfg.adaptive_softmax_cutoff),
            div_val=cfg.adaptive_softmax_factor,
            dropout=cfg.dropout,
            attention_dropout=cfg.attention_dropout,
            activation_dropout=cfg.activation_dropout,
            activation=ACTIVATIONS[str(cfg.activation_fn)],
            normalize_before=cfg.decoder_normalize_before,
            attention_backend=backend_of(cfg),
        )
        self.softmax = AdaptiveSoftmax(self.decoder.embedding)
        self.register_buffer("dictionary_sha256", dictionary_hash(dictionary))
        self.apply(partial(init_transformer_xl_weights, std=cfg.init_std))

    def forward(
        self,
        src_tokens: Tensor,
        memory: Optional[StreamMemory] = None,
        target: Optional[Tensor] = None,
        features_only: bool = False,
        return_all_hiddens: bool = False,
        **unused,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Reads one segment of B streams.

        Args:
            src_tokens: ids (B, T).
            memory: of these B streams; advances to the end of this segment. None to start and end here.
            target: ids (B, T), the tokens that follow.
            features_only: return the decoder's output.
            return_all_hiddens: also return what every sublayer returned.

        Returns:
            With `target` the negative log-likelihood of each token in nats, (B, T) in float32, 0 where the target is
            padding; without, log-probabilities (B, T, V); or features (B, T, C). And
            ``{"inner_states": list of (B, T, C)}``.
        """
        features, inner_states = self.decoder(src_tokens, memory, return_all=return_all_hiddens)
        extra = {"inner_states": inner_states}
        if features_only:
            return features, extra
        if target is None:
            return self.softmax.log_probabilities(features, self.decoder.embedding), extra
        nll = self.softmax.negative_log_likelihood(features.flatten(0, 1), target.flatten(), self.decoder.embedding)
        return nll.view_as(target).masked_fill(target == self.padding_idx, 0), extra


register_presets("lazyformer_lm", CAUSAL_ARCHITECTURES)
