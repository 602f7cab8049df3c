"""Options of the causal language model. Defaults are ``transformer_xl_base``'s; ``--arch NAME`` sets a row's."""

from dataclasses import dataclass, field

from fairseq.dataclass import ChoiceEnum, FairseqDataclass

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.modules.attention.choice import AUTO, BACKENDS
from lazyformer_fairseq.patterns.architectures import CAUSAL_ARCHITECTURES
from lazyformer_fairseq.patterns.kinds import describe_letters

_DEFAULT = CAUSAL_ARCHITECTURES["transformer_xl_base"]


@dataclass
class CausalLMConfig(FairseqDataclass):
    sublayer_pattern: str = field(
        default=_DEFAULT.sublayer_pattern,
        metadata={
            "help": f"the decoder, one letter a sublayer: {describe_letters()}; "
            "'(sfff)x6 (f)x8' repeats, M2x6 is (sflf)x6"
        },
    )
    decoder_embed_dim: int = field(default=_DEFAULT.decoder_embed_dim, metadata={"help": "embedding dimension"})
    decoder_ffn_embed_dim: int = field(
        default=_DEFAULT.decoder_ffn_embed_dim, metadata={"help": "width of the feed-forward sublayers"}
    )
    decoder_attention_heads: int = field(
        default=_DEFAULT.decoder_attention_heads, metadata={"help": "number of attention heads"}
    )
    decoder_normalize_before: bool = field(
        default=False, metadata={"help": "LayerNorm before each sublayer (pre-norm) instead of after it"}
    )
    activation_fn: ChoiceEnum(["relu", "gelu"]) = field(
        default="relu", metadata={"help": "activation of the feed-forward sublayers"}
    )
    dropout: float = field(
        default=_DEFAULT.dropout,
        metadata={"help": "dropout on embeddings, encoded distances, sublayer outputs and features"},
    )
    attention_dropout: float = field(
        default=_DEFAULT.attention_dropout, metadata={"help": "dropout on attention distributions"}
    )
    activation_dropout: float = field(
        default=_DEFAULT.activation_dropout, metadata={"help": "dropout after the feed-forward activation"}
    )
    adaptive_softmax_cutoff: str = field(
        default=_DEFAULT.adaptive_softmax_cutoff,
        metadata={"help": "ids that start a new band of words, with commas; '' for one band, a full softmax"},
    )
    adaptive_softmax_factor: int = field(
        default=_DEFAULT.adaptive_softmax_factor,
        metadata={"help": "each band's vectors are narrower than the last one's by this factor"},
    )
    mem_len: int = field(
        default=_DEFAULT.mem_len, metadata={"help": "tokens of the previous segments to attend to; 0 for no memory"}
    )
    clamp_len: int = field(
        default=0, metadata={"help": "distances beyond this one are taken for it; 0 or -1 for no such limit"}
    )
    lazy_backend: ChoiceEnum([AUTO, *BACKENDS]) = field(
        default=AUTO,
        metadata={
            "help": "how attention is computed, all exact: eager and materialize keep distributions, recompute and "
            "fused do not; auto takes the fastest that was measured"
        },
    )


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
