"""The causal language model: the decoder of a pattern, and an adaptive softmax that is tied to its embedding."""

from functools import partial
from typing import Any, ClassVar, Optional

from torch import Tensor, nn

from lazyformer_fairseq.modules.networks.adaptive_softmax import AdaptiveEmbedding, AdaptiveSoftmax
from lazyformer_fairseq.modules.networks.causal_decoder import CausalDecoder, init_transformer_xl_weights
from lazyformer_fairseq.modules.networks.options import DROPOUTS, CausalLMOptions, norms_and_biases
from lazyformer_fairseq.modules.networks.stream_memory import StreamMemory
from lazyformer_fairseq.modules.sublayers.feed_forward import ACTIVATIONS
from lazyformer_fairseq.patterns.kinds import parse_cutoffs

_SAME_NAMES = ("mem_len", "clamp_len", "same_length", "reversible", "scaled_init")


def bands_of(options: CausalLMOptions) -> dict[str, Any]:
    """Return arguments of an :class:`AdaptiveEmbedding` besides vocabulary and width."""
    return {"cutoffs": parse_cutoffs(options.adaptive_softmax_cutoff), "div_val": options.adaptive_softmax_factor}


def softmax_of(options: CausalLMOptions, embedding: AdaptiveEmbedding, vocab_size: int) -> AdaptiveSoftmax:
    """Return the head of a model of these options: on the tables of its embedding, or on its own."""
    own = None
    if options.untied_softmax:
        own = AdaptiveEmbedding(vocab_size, embedding.embed_dim, **bands_of(options))
    return AdaptiveSoftmax(embedding, own)


def decoder_arguments(options: CausalLMOptions, vocab_size: int) -> dict[str, Any]:
    """Return arguments of the :class:`CausalDecoder` that a model's options describe."""
    return {
        "pattern": options.sublayer_pattern,
        "vocab_size": vocab_size,
        "embed_dim": options.decoder_embed_dim,
        "ffn_embed_dim": options.decoder_ffn_embed_dim,
        "num_heads": options.decoder_attention_heads,
        **bands_of(options),
        "activation": ACTIVATIONS[str(options.activation_fn)],
        "normalize_before": options.decoder_normalize_before,
        "attention_backend": str(options.attention_backend),
        **{name: getattr(options, name) for name in (*DROPOUTS, *_SAME_NAMES)},
        **norms_and_biases(options),
    }


class CausalLM(nn.Module):
    """A causal decoder of any pattern and an adaptive softmax, tied to its embedding unless the options say otherwise.

    Args:
        options: of the model.
        vocab_size: V.
        padding_idx: id of the padding symbol, whose loss is 0.

    Attributes:
        decoder: the CausalDecoder; its `mem_len`, `clamp_len` and `same_length` may be set for evaluation.
        softmax: the AdaptiveSoftmax.

    Raises:
        ValueError: as :class:`CausalDecoder` does.
    """

    per_word: ClassVar[str] = "softmax.bias"  # the weight with a row for each word

    def __init__(self, options: CausalLMOptions, vocab_size: int, padding_idx: int = 1):
        super().__init__()
        self.cfg = options
        self.padding_idx = padding_idx
        self.decoder = CausalDecoder(**decoder_arguments(options, vocab_size))
        self.decoder.checkpoints = options.checkpoint_activations
        self.softmax = softmax_of(options, self.decoder.embedding, vocab_size)
        self.apply(partial(init_transformer_xl_weights, std=options.init_std))

    def forward(
        self,
        src_tokens: Tensor,
        memory: Optional[StreamMemory] = None,
        target: Optional[Tensor] = None,
        features_only: bool = False,
        return_all_hiddens: bool = False,
        **_more: Any,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Read one segment of B streams.

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
