"""Options of the model, as fairseq reads them. Defaults are ``lazyformer_m2x6_s``'s; ``--arch NAME`` sets a row's."""

from argparse import SUPPRESS
from dataclasses import dataclass

from fairseq.dataclass import ChoiceEnum, FairseqDataclass

from lazyformer_fairseq.fairseq_plugin.reliability.options import option
from lazyformer_fairseq.modules.attention.choice import AUTO, BACKENDS
from lazyformer_fairseq.modules.layer_norm import EPS
from lazyformer_fairseq.modules.sublayers.feed_forward import ACTIVATIONS
from lazyformer_fairseq.patterns.architectures import ARCHITECTURES
from lazyformer_fairseq.patterns.kinds import describe_letters

_DEFAULT = ARCHITECTURES["lazyformer_m2x6_s"]


@dataclass
class LazyFormerConfig(FairseqDataclass):
    sublayer_pattern: str = option(
        _DEFAULT.sublayer_pattern,
        f"the encoder, one letter a sublayer: {describe_letters()}; '(sff)x5 (f)x9' repeats, M2x6 is (sflf)x6",
    )
    encoder_embed_dim: int = option(_DEFAULT.encoder_embed_dim, "embedding dimension")
    encoder_ffn_embed_dim: int = option(_DEFAULT.encoder_ffn_embed_dim, "width of the feed-forward sublayers")
    encoder_attention_heads: int = option(_DEFAULT.encoder_attention_heads, "number of attention heads")
    encoder_normalize_before: bool = option(
        False, "LayerNorm before each sublayer (pre-norm) instead of after it (BERT)"
    )
    activation_fn: ChoiceEnum(list(ACTIVATIONS)) = option(
        "gelu",
        "activation of the feed-forward sublayers; gelu_tanh is GELU's approximation by a hyperbolic tangent, "
        "relu_squared Primer's",
    )
    head_activation_fn: ChoiceEnum(list(ACTIVATIONS)) = option("gelu", "activation of the masked-LM head")
    layer_norm_eps: float = option(EPS, "what each LayerNorm adds to the variance; BERT's is 1e-12")
    dropout: float = option(0.1, "dropout on embeddings and sublayer outputs")
    attention_dropout: float = option(_DEFAULT.attention_dropout, "dropout on attention distributions")
    activation_dropout: float = option(0.0, "dropout after the feed-forward activation")
    pooler_dropout: float = option(0.0, "dropout in the classification head")
    max_positions: int = option(512, "longest sequence, <s> and </s> included")
    copy_positions: bool = option(
        False,
        "copies a checkpoint's positions again and again, up to --max-positions, where it has fewer (Longformer, "
        "section 5); to resume with them, add --reset-optimizer",
    )
    token_types: int = option(
        0,
        "rows of a table that says which of two texts a token is of; 2 for BERT's; this package's archs have none",
    )
    relative_position_buckets: int = option(
        _DEFAULT.relative_position_buckets, "buckets of T5's relative position bias; 0 for no such bias"
    )
    relative_position_max_distance: int = option(128, "from this distance on all relative positions share a bucket")
    attention_backend: ChoiceEnum([AUTO, *BACKENDS]) = option(
        AUTO,
        "how attention is computed, all exact: eager and materialize keep distributions, recompute and fused do not; "
        "auto takes the fastest that was measured",
    )
    lazy_backend: str = option("", SUPPRESS)  # see reliability.options.OLD_NAMES
    compile: bool = option(
        False,
        "in training, run the encoder's sublayers and the masked-LM loss through torch.compile; needs a "
        "C++ compiler, on a GPU triton",
    )
