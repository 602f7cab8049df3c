"""Options of the causal language model. Defaults are ``transformer_xl_base``'s; ``--arch NAME`` sets a row's."""

from argparse import SUPPRESS
from dataclasses import dataclass

from fairseq.dataclass import ChoiceEnum, FairseqDataclass

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.models.config import BACKENDS_HELP
from lazyformer_fairseq.fairseq_plugin.reliability.options import option
from lazyformer_fairseq.modules.attention.choice import AUTO, BACKENDS
from lazyformer_fairseq.modules.sublayers.feed_forward import ACTIVATIONS
from lazyformer_fairseq.patterns.architectures import CAUSAL_ARCHITECTURES
from lazyformer_fairseq.patterns.kinds import describe_letters

_DEFAULT = CAUSAL_ARCHITECTURES["transformer_xl_base"]


@dataclass
class CausalLMConfig(FairseqDataclass):
    sublayer_pattern: str = option(
        _DEFAULT.sublayer_pattern,
        f"the decoder, one letter a sublayer: {describe_letters()}; '(sfff)x6 (f)x8' repeats, M2x6 is (sflf)x6",
    )
    decoder_embed_dim: int = option(_DEFAULT.decoder_embed_dim, "embedding dimension")
    decoder_ffn_embed_dim: int = option(_DEFAULT.decoder_ffn_embed_dim, "width of the feed-forward sublayers")
    decoder_attention_heads: int = option(_DEFAULT.decoder_attention_heads, "number of attention heads")
    decoder_normalize_before: bool = option(False, "LayerNorm before each sublayer (pre-norm) instead of after it")
    activation_fn: ChoiceEnum(list(ACTIVATIONS)) = option(
        "relu", "of the feed-forward sublayers; relu_squared is Primer's"
    )
    dropout: float = option(_DEFAULT.dropout, "dropout on embeddings, encoded distances, sublayer outputs and features")
    attention_dropout: float = option(_DEFAULT.attention_dropout, "dropout on attention distributions")
    activation_dropout: float = option(_DEFAULT.activation_dropout, "dropout after the feed-forward activation")
    adaptive_softmax_cutoff: str = option(
        _DEFAULT.adaptive_softmax_cutoff, "ids that start a new band of words; '': one band"
    )
    adaptive_softmax_factor: int = option(_DEFAULT.adaptive_softmax_factor, "by which each band's vectors are narrower")
    mem_len: int = option(_DEFAULT.mem_len, "tokens of the previous segments to attend to; 0 for no memory")
    clamp_len: int = option(0, "distances beyond this one are taken for it; 0 or -1 for no such limit")
    same_length: bool = option(False, "every query sees --mem-len tokens before it; else all of memory and segment")
    init_std: float = option(0.02, "standard deviation of the weights at first")
    attention_backend: ChoiceEnum([AUTO, *BACKENDS]) = option(AUTO, BACKENDS_HELP)
    lazy_backend: str = option("", SUPPRESS)  # see reliability.options.OLD_NAMES


def parse_cutoffs(text: str) -> tuple[int, ...]:
    """``"19997,39997"`` -> ``(19997, 39997)``; nothing for an empty text.

    Raises:
        UserError: anything but whole numbers stands between the commas.
    """
    try:
        return tuple(int(part) for part in text.split(",")) if text.strip() else ()
    except ValueError as error:
        raise UserError(
            f"--adaptive-softmax-cutoff {text!r}: must be whole numbers with commas, such as 19997,39997, or empty"
        ) from error
