"""The causal language model: a causal decoder and an adaptive softmax."""

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
    """Return the :class:`AdaptiveEmbedding` arguments for the bands that a model's options define."""
    return {"cutoffs": parse_cutoffs(options.adaptive_softmax_cutoff), "div_val": options.adaptive_softmax_factor}


def softmax_of(options: CausalLMOptions, embedding: AdaptiveEmbedding, vocab_size: int) -> AdaptiveSoftmax:
    """Build the softmax that a model's options describe; it shares the embedding's tables or has its own."""
    own = None
    if options.untied_softmax:
        own = AdaptiveEmbedding(vocab_size, embedding.embed_dim, **bands_of(options))
    return AdaptiveSoftmax(embedding, own)


def decoder_arguments(options: CausalLMOptions, vocab_size: int) -> dict[str, Any]:
    """Return the :class:`CausalDecoder` arguments for a model's options."""
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
    """A causal language model built from any sublayer pattern.

    It consists of a causal decoder and an adaptive softmax. The softmax shares the embedding's tables unless the
    options request separate ones.

    Args:
        options: the model's options.
        vocab_size: V.
        padding_idx: the id of the padding symbol, at which the loss is 0.

    Attributes:
        decoder: the CausalDecoder. Its `mem_len`, `clamp_len` and `same_length` may be changed for evaluation.
        softmax: the AdaptiveSoftmax.

    Raises:
        UserError: If an option is out of bounds or options conflict.
    """

    per_word: ClassVar[str] = "softmax.bias"  # a weight with one row per word

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
        """Process one segment of B streams.

        Args:
            src_tokens: ids (B, T).
            memory: the streams' memory of previous segments, to which this segment is added. None to process the
                segment on its own.
            target: the ids (B, T) of the next tokens.
            features_only: whether to return only the decoder's output.
            return_all_hiddens: whether to also return the output of every sublayer.

        Returns:
            A pair. The first element is the negative log-likelihood (B, T) of each target in nats, in float32 or higher
            precision and 0 at padding; log-probabilities (B, T, V) if `target` is None; or features (B, T, C) with
            `features_only`. The second element is ``{"inner_states": list of (B, T, C)}``.
        """
        features, inner_states = self.decoder(src_tokens, memory, return_all=return_all_hiddens)
        extra = {"inner_states": inner_states}
        if features_only:
            return features, extra
        if target is None:
            return self.softmax.log_probabilities(features, self.decoder.embedding), extra
        nll = self.softmax.negative_log_likelihood(features.flatten(0, 1), target.flatten(), self.decoder.embedding)
        return nll.view_as(target).masked_fill(target == self.padding_idx, 0), extra
