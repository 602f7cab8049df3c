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

BACKENDS_HELP = (
    "how attention is computed, all exact: eager and materialize keep distributions, recompute and fused do not; auto "
    "takes the fastest that was measured"
)
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
    encoder_normalize_before: bool = option(False, "LayerNorm before each sublayer (pre-norm), not after it (BERT)")
    activation_fn: ChoiceEnum(list(ACTIVATIONS)) = option(
        "gelu", "of the feed-forward sublayers; relu_squared is Primer's"
    )
    head_activation_fn: ChoiceEnum(list(ACTIVATIONS)) = option("gelu", "activation of the masked-LM head")
    layer_norm_eps: float = option(EPS, "what each LayerNorm adds to the variance; BERT's is 1e-12")
    dropout: float = option(0.1, "dropout on embeddings and sublayer outputs")
    attention_dropout: float = option(_DEFAULT.attention_dropout, "dropout on attention distributions")
    activation_dropout: float = option(0.0, "dropout after the feed-forward activation")
    pooler_dropout: float = option(0.0, "dropout in the classification head")
    max_positions: int = option(512, "longest sequence, <s> and </s> included")
    copy_positions: bool = option(False, "repeat a checkpoint's positions up to --max-positions, where it has fewer")
    token_types: int = option(0, "rows of a table that says which of two texts a token is of; BERT has 2")
    relative_position_buckets: int = option(
        _DEFAULT.relative_position_buckets, "of T5's relative position bias; 0: none"
    )
    relative_position_max_distance: int = option(128, "from this distance on all relative positions share a bucket")
    attention_backend: ChoiceEnum([AUTO, *BACKENDS]) = option(AUTO, BACKENDS_HELP)
    lazy_backend: str = option("", SUPPRESS)  # see reliability.options.OLD_NAMES
    compile: bool = option(False, "in training, run sublayers and masked-LM loss through torch.compile")
