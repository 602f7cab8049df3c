"""Options of the model, as fairseq reads them. Defaults are ``lazyformer_m2x6_s``'s; ``--arch NAME`` sets a row's."""

from dataclasses import dataclass, field

from fairseq.dataclass import ChoiceEnum, FairseqDataclass

from lazyformer_fairseq.modules.attention.choice import AUTO, BACKENDS
from lazyformer_fairseq.patterns.architectures import ARCHITECTURES
from lazyformer_fairseq.patterns.kinds import describe_letters

_DEFAULT = ARCHITECTURES["lazyformer_m2x6_s"]


@dataclass
class LazyFormerConfig(FairseqDataclass):
    sublayer_pattern: str = field(
        default=_DEFAULT.sublayer_pattern,
        metadata={
            "help": f"the encoder, one letter a sublayer: {describe_letters()}; "
            "'(sff)x5 (f)x9' repeats, M2x6 is (sflf)x6"
        },
    )
    encoder_embed_dim: int = field(default=_DEFAULT.encoder_embed_dim, metadata={"help": "embedding dimension"})
    encoder_ffn_embed_dim: int = field(
        default=_DEFAULT.encoder_ffn_embed_dim, metadata={"help": "width of the feed-forward sublayers"}
    )
    encoder_attention_heads: int = field(
        default=_DEFAULT.encoder_attention_heads, metadata={"help": "number of attention heads"}
    )
    encoder_normalize_before: bool = field(
        default=False, metadata={"help": "LayerNorm before each sublayer (pre-norm) instead of after it (BERT)"}
    )
    activation_fn: ChoiceEnum(["gelu", "relu"]) = field(
        default="gelu", metadata={"help": "activation of the feed-forward sublayers"}
    )
    dropout: float = field(default=0.1, metadata={"help": "dropout on embeddings and sublayer outputs"})
    attention_dropout: float = field(
        default=_DEFAULT.attention_dropout, metadata={"help": "dropout on attention distributions"}
    )
    activation_dropout: float = field(default=0.0, metadata={"help": "dropout after the feed-forward activation"})
    pooler_dropout: float = field(default=0.0, metadata={"help": "dropout in the classification head"})
    max_positions: int = field(default=512, metadata={"help": "longest sequence, <s> and </s> included"})
    relative_position_buckets: int = field(
        default=_DEFAULT.relative_position_buckets,
        metadata={"help": "buckets of T5's relative position bias; 0 for no such bias"},
    )
    relative_position_max_distance: int = field(
        default=128, metadata={"help": "from this distance on all relative positions share a bucket"}
    )
    lazy_backend: ChoiceEnum([AUTO, *BACKENDS]) = field(
        default=AUTO,
        metadata={
            "help": "how attention is computed, all exact: eager and materialize keep distributions, recompute and "
            "fused take memory linear in the length; auto takes the fastest that was measured"
        },
    )
    compile: bool = field(
        default=False,
        metadata={
            "help": "in training, run the encoder's sublayers and the masked-LM loss through torch.compile; needs a "
            "C++ compiler, on a GPU triton"
        },
    )
