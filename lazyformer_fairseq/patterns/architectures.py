"""The table of named models: encoders, followed by causal language models.

To add a model, add a row; tests compare all other lists of names with this table. For every row, there is also a tiny
version with the same pattern, for tests and quick starts: for example, ``bert_tiny`` is the tiny version of
``bert_base``, and ``lazyformer_m2x6_s_tiny`` is the tiny version of ``lazyformer_m2x6_s``.
"""

from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Optional, TypeVar, Union

MASKED_LM = "full_sentences_masked_lm"
_NOT_OPTIONS = {"parameters_in_millions", "source", "tgt_len", "rows", "updates", "recipe", "task"}


# Encoder options other than the pattern and the sizes. Variants of a model that only differ in width have the same
# values of these options.
PARTS = (
    "norm",
    "no_norm_bias",
    "no_linear_bias",
    "embedding_norm",
    "plain_lm_head",
    "untied_lm_head",
    "no_token_positional_embeddings",
    "reversible",
)


@dataclass(frozen=True)
class Architecture:
    """A named model, which is a row of the table.

    Attributes that are not documented here or in a subclass are model options, which are documented by their help
    texts. None means the model's default.

    Attributes:
        source: The paper and table that the row is taken from.
    """

    sublayer_pattern: str
    source: str

    def options(self) -> dict[str, Union[str, int, float]]:
        """Return the row's model options by name."""
        names = [field.name for field in fields(self) if field.name not in _NOT_OPTIONS]
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}


Row = TypeVar("Row", bound=Architecture)


@dataclass(frozen=True)
class EncoderArchitecture(Architecture):
    """A row for an encoder. The defaults are the sizes of BERT and RoBERTa, without T5's bias.

    Attributes:
        parameters_in_millions: The parameter count reported in the paper, for a vocabulary of 32,768 and 512 positions.
            Our model's count is within 1% of it.
        task: The fairseq task that `lazyformer pretrain` uses to train the model.
    """

    encoder_ffn_embed_dim: int = 3072
    encoder_embed_dim: int = 768
    encoder_attention_heads: int = 12
    attention_dropout: float = 0.1
    relative_position_buckets: int = 0
    parameters_in_millions: Optional[float] = None
    max_positions: Optional[int] = None
    no_token_positional_embeddings: Optional[bool] = None
    dropout: Optional[float] = None
    encoder_normalize_before: Optional[bool] = None
    norm: Optional[str] = None
    no_norm_bias: Optional[bool] = None
    no_linear_bias: Optional[bool] = None
    embedding_norm: Optional[bool] = None
    plain_lm_head: Optional[bool] = None
    untied_lm_head: Optional[bool] = None
    reversible: Optional[bool] = None
    task: str = MASKED_LM


_WIKITEXT_103_CUTOFFS = "19997,39997,199997"  # Transformer-XL's cutoffs for 267,735 words


@dataclass(frozen=True)
class CausalArchitecture(Architecture):
    """A row for a causal language model. The defaults are those of Transformer-XL's base model (PAR, Table 5).

    Attributes:
        parameters_in_millions: The parameter count reported in the paper for 267,735 words (Table 6). Our model's count
            is within 1% of it.
        tgt_len: The number of tokens per segment during training.
        rows: The number of segments per update.
        updates: The number of training updates.
        recipe: The training recipe, a file in ``configs/language_modeling/recipe``.
    """

    decoder_ffn_embed_dim: int = 2048
    decoder_embed_dim: int = 512
    decoder_attention_heads: int = 8
    dropout: float = 0.1
    attention_dropout: float = 0.0
    activation_dropout: float = 0.1
    adaptive_softmax_cutoff: str = _WIKITEXT_103_CUTOFFS
    adaptive_softmax_factor: int = 1
    mem_len: int = 192
    parameters_in_millions: Optional[float] = None
    tgt_len: int = 192
    rows: int = 256
    updates: int = 40_000
    recipe: str = "nvidia"
    decoder_normalize_before: Optional[bool] = None
    activation_fn: Optional[str] = None
    norm: Optional[str] = None
    no_linear_bias: Optional[bool] = None
    untied_softmax: Optional[bool] = None
    scaled_init: Optional[bool] = None


# LazyFormer's encoders have T5's bias, and some of them have no attention dropout.
_BIASED = partial(EncoderArchitecture, relative_position_buckets=32)
_LAZY = partial(_BIASED, attention_dropout=0.0)


def _twins(name: str, pattern: str, width: int, source: str) -> dict[str, EncoderArchitecture]:
    """Build the rows NAME_sd (with attention dropout) and NAME_s (without), with BERT's width and parameter count."""
    row = _BIASED(pattern, source, encoder_ffn_embed_dim=width, parameters_in_millions=112)
    return {f"{name}_sd": row, f"{name}_s": replace(row, attention_dropout=0.0)}


def _synthesizer(terms: str, row: str) -> EncoderArchitecture:
    """Build a row of Synthesizer's Table 2 with BERT's sizes.

    The model has no attention dropout, so that all sequences share the learned distribution.
    """
    source = f"Synthesizer, Table 2: {row}"
    return EncoderArchitecture(f"(s[synthesizer={terms}]f)x12", source, attention_dropout=0.0)


def _linformers(name: str, projected: int) -> dict[str, EncoderArchitecture]:
    """Build three rows of RoBERTa's size.

    The first shares projections among heads, the second also between keys and values, and the third also among layers.
    """

    def row(share: str, called: str) -> EncoderArchitecture:
        pattern = f"(s[linformer={projected}{share}]f)x12"
        return EncoderArchitecture(pattern, f"Linformer, Table 2: {projected}{called}")

    return {
        name: row("", ""),
        name.replace("_base", "_kv_base"): row(",share=kv", ", shared kv"),
        name.replace("_base", "_layers_base"): row(",share=layers", ", shared kv, layer"),
    }


# These encoders are pre-norm and have only rotary positions, no biases in sublayers and no dropout.
_MODERN = partial(
    EncoderArchitecture,
    attention_dropout=0.0,
    dropout=0.0,
    encoder_normalize_before=True,
    no_linear_bias=True,
    no_token_positional_embeddings=True,
)


def _modernbert(of_two: str, width: int, source: str) -> EncoderArchitecture:
    """Build a row with 22 layers, of which every third one has full attention.

    `of_two` is the pattern of the two layers in between. Inputs have up to 1,024 tokens, as in the first phase of
    ModernBERT's pre-training.
    """
    of_all = "s[rope=160000]f[gate=gelu]"
    return _MODERN(
        f"({of_all} {of_two})x7{of_all}",
        source,
        encoder_ffn_embed_dim=width,
        max_positions=1024,
        no_norm_bias=True,
        embedding_norm=True,
    )


_LONG = partial(EncoderArchitecture, max_positions=4096)
_SMALL: dict[str, Any] = {"encoder_embed_dim": 512, "encoder_attention_heads": 8}

_NAMED = {
    "bert_base": _BIASED("M1x12", "LazyFormer, Table 2", parameters_in_millions=112),
    **_twins("lazyformer_m2x6", "M2x6", 3456, "LazyFormer, Table 2"),
    "lazyformer_m2x6": _LAZY(
        "M2x6",
        "LazyFormer, Table 2",
        encoder_ffn_embed_dim=4480,
        encoder_embed_dim=896,
        encoder_attention_heads=14,
        parameters_in_millions=157,
    ),
    "lazyformer_m2x6_w6144": _LAZY(
        "M2x6",
        "LazyFormer, Table 4",
        encoder_ffn_embed_dim=6144,
        parameters_in_millions=161,
    ),
    "lazyformer_m2x7": _LAZY(
        "M2x7",
        "LazyFormer, Table 4",
        encoder_ffn_embed_dim=4480,
        parameters_in_millions=148,
    ),
    **_twins("lazyformer_m3x4", "M3x4", 3584, "LazyFormer, Table 3"),
    **_twins("lazyformer_m4x3", "M4x3", 3648, "LazyFormer, Table 3"),
    **_twins("lazyformer_m6x2", "M6x2", 3712, "LazyFormer, Table 3"),
    **_twins("lazyformer_m5m3m2m2", "M5M3M2M2", 3584, "LazyFormer, Table 3"),
    **_twins("lazyformer_m2m2m3m5", "M2M2M3M5", 3584, "LazyFormer, Table 3"),
    # These models have 8 layers of width 512. M2x4 saves four query and key projections and uses their parameters for
    # wider feed-forward sublayers.
    "bert_small": _BIASED("M1x8", "for one GPU (ours)", encoder_ffn_embed_dim=2048, **_SMALL),
    "lazyformer_small": _LAZY("M2x4", "for one GPU (ours)", encoder_ffn_embed_dim=2304, **_SMALL),
    "bert_laptop": _LAZY(
        "(sf)x7",
        "for one core (ours)",
        encoder_ffn_embed_dim=768,
        encoder_embed_dim=192,
        encoder_attention_heads=6,
    ),
    # The paper reports 110M parameters with a vocabulary of 30,527 tokens.
    "mpnet_base": _BIASED("(sf)x12", "MPNet, section 3.1", task="masked_permuted_lm"),
    # bert_base_absolute, distilbert_base and par_bert_base are the rows of Table 4 of the PAR paper. We counted their
    # parameters; with 30,522 tokens, the counts match the published models.
    "bert_base_absolute": EncoderArchitecture("(sf)x12", "PAR, Table 4", parameters_in_millions=111.2),
    "distilbert_base": EncoderArchitecture("(sf)x6", "PAR, Table 4", parameters_in_millions=68.7),
    "par_bert_base": EncoderArchitecture("(sff)x5 (f)x9", "PAR, Table 4", parameters_in_millions=127.8),
    "sandwich_bert_base": EncoderArchitecture("(s)x6 (sf)x6 (f)x6", "Sandwich's order at BERT's size (ours)"),
    "lazy_par_bert_base": EncoderArchitecture(
        "(sfflff)x3 (f)x6",
        "lazy blocks in PAR (ours)",
        attention_dropout=0.0,
    ),
    "gshard_base": EncoderArchitecture("(sfsf[experts=8])x6", "GShard, section 2.2, at BERT's size (ours)"),
    # The window has 256 tokens on each side, and <s> is global, as in Longformer's fine-tuning.
    "longformer_base": _LONG("(s[window=256,global=1]f)x12", "Longformer, section 5"),
    "lazy_longformer_base": _LONG("(s[window=256,global=1]flf)x6", "lazy blocks in Longformer (ours)"),
    "synthesizer_fixed_base": _synthesizer("fixed", "Fixed Random"),
    "synthesizer_random_base": _synthesizer("random", "Random"),
    "synthesizer_factorised_random_base": _synthesizer("factorised_random", "Factorized Random"),
    "synthesizer_dense_base": _synthesizer("dense", "Dense"),
    "synthesizer_factorised_dense_base": _synthesizer("factorised_dense", "Factorized Dense"),
    "synthesizer_dense_random_base": _synthesizer("dense+random", "Random + Dense"),
    "synthesizer_dense_dot_base": _synthesizer("dense+dot", "Dense + Vanilla"),
    "synthesizer_random_dot_base": _synthesizer("random+dot", "Random + Vanilla"),
    "adaptively_sparse_base": EncoderArchitecture("(s[entmax=learned]f)x12", "adaptively sparse, section 3"),
    # With 128 buckets, a chunk of 64 is twice as long as the average bucket (section 2, "LSH attention").
    "reformer_base": _LONG("(s[buckets=128,rounds=4]f)x12", "Reformer, section 2", attention_dropout=0.0),
    "reformer_reversible_base": _LONG(
        "(s[buckets=128,rounds=4]f)x12",
        "Reformer, sections 2 and 3",
        attention_dropout=0.0,
        encoder_normalize_before=True,
        reversible=True,
    ),
    **_linformers("linformer_base", 256),
    **_linformers("linformer_128_base", 128),
    "lazy_linformer_base": EncoderArchitecture(
        "(s[linformer=256]flf)x6",
        "Linformer in lazyformer_m2x6 (ours)",
        encoder_ffn_embed_dim=3456,
        attention_dropout=0.0,
    ),
    # "Nonuniform projected dimension": higher layers project to fewer positions. The paper reports no numbers.
    "linformer_falling_base": EncoderArchitecture(
        "(s[linformer=192]f)x4 (s[linformer=128]f)x4 (s[linformer=64]f)x4",
        "Linformer, section 4 (our interpretation)",
    ),
    "nbrc_base": EncoderArchitecture("(r[cell=nbrc]f)x12", "nBRC instead of attention (ours)"),
    "modernbert_base": _modernbert("(s[window=64,rope=10000]f[gate=gelu])x2", 1152, "ModernBERT, section 2.1"),
    # Each l saves the query and key projections; their parameters are used for wider feed-forward sublayers.
    "lazy_modernbert_base": _modernbert(
        "s[window=64,rope=10000]f[gate=gelu]lf[gate=gelu]",
        1312,
        "lazy blocks in ModernBERT (ours)",
    ),
    "neobert": _MODERN(
        "(s[rope=10000]f[gate=silu])x28",
        "NeoBERT",
        encoder_ffn_embed_dim=2048,
        max_positions=1024,
        norm="rms",
        plain_lm_head=True,
        untied_lm_head=True,
    ),
    "bert_modern_base": _MODERN(
        "(s[rope=10000,qk_norm]f[gate=gelu])x12",
        "modern components in BERT (ours)",
        encoder_ffn_embed_dim=2048,
        norm="rms",
        embedding_norm=True,
    ),
}


def _with_tiny_twins(rows: dict[str, Row], **sizes: Any) -> dict[str, Row]:
    sizes |= {"parameters_in_millions": None, "source": "for tests"}
    twins = {_twin(name): _tiny(row, **sizes) for name, row in rows.items()}
    return rows | twins


def _tiny(row: Row, **sizes: Any) -> Row:
    if "positions=absolute" in row.sublayer_pattern:  # such a model cannot have a memory
        sizes["mem_len"] = 0
    return replace(row, **sizes)


def _twin(name: str) -> str:
    return f"{name.removesuffix('_base')}_tiny"


ARCHITECTURES = _with_tiny_twins(_NAMED, encoder_ffn_embed_dim=64, encoder_embed_dim=32, encoder_attention_heads=2)


# PAR Transformer, section 3.1. Dropout rates and band widths follow Transformer-XL's large model.
_LARGE = partial(
    CausalArchitecture,
    decoder_ffn_embed_dim=4096,
    decoder_embed_dim=1024,
    decoder_attention_heads=16,
    dropout=0.2,
    attention_dropout=0.2,
    activation_dropout=0.2,
    adaptive_softmax_factor=4,
    mem_len=384,
    tgt_len=384,
    rows=128,
    updates=100_000,
    recipe="nvidia_large",
)
# PAR Transformer, section 3.1: character-level models with 24 sublayers and the base model's sizes.
_24B = partial(
    CausalArchitecture,
    source="PAR, Table 3",
    adaptive_softmax_cutoff="",
    mem_len=512,
    tgt_len=512,
    rows=96,
)
# The small models as published by Sukhbaatar et al., with dropout in the same places and at least 8,192 keys. Unlike
# the originals, they have Transformer-XL's positions instead of a table of 8,192 keys, and a tied embedding.
_SUKHBAATAR = partial(
    CausalArchitecture,
    dropout=0.0,
    attention_dropout=0.3,
    activation_dropout=0.3,
    adaptive_softmax_cutoff="",
    mem_len=7680,
    tgt_len=512,
    rows=96,
    recipe="transformer_xl",
)


def _igpt(layers: int, width: int, heads: int, recipe: str = "igpt") -> CausalArchitecture:
    """Build an Image GPT for 32 x 32 pixels, with the paper's sizes, and with norm, biases and heads as in its code."""
    return CausalArchitecture(
        f"(s[positions=absolute,length=1024]f)x{layers}",
        "iGPT, section 3.3",
        decoder_ffn_embed_dim=4 * width,
        decoder_embed_dim=width,
        decoder_attention_heads=heads,
        dropout=0.0,
        activation_dropout=0.0,
        adaptive_softmax_cutoff="",
        mem_len=0,
        tgt_len=1024,
        rows=128,
        updates=1_000_000,
        recipe=recipe,
        decoder_normalize_before=True,
        activation_fn="gelu",
        norm="rms",
        no_linear_bias=True,
        untied_softmax=True,
        scaled_init=True,
    )


_NAMED_CAUSAL = {
    "transformer_xl_base": CausalArchitecture("(sf)x16", "PAR, Table 6", parameters_in_millions=192),
    "par_transformer_base": CausalArchitecture("(sfff)x6 (f)x8", "PAR, Table 6", parameters_in_millions=200),
    "sandwich_transformer_base": CausalArchitecture(
        "(s)x6 (sf)x10 (f)x6",
        "PAR, Table 6",
        parameters_in_millions=192,
    ),
    # PAR base with every other s replaced by an l, which computes only values and output. It therefore computes more
    # attention than the row with three s in Table 1, and less than the row with six s.
    "lazy_par_transformer_base": CausalArchitecture(
        "(sffflfff)x3 (f)x8",
        "PAR base with every other s lazy (ours)",
    ),
    "par_transformer_base_0s": CausalArchitecture("(f)x32", "PAR, Table 1"),
    "par_transformer_base_1s_sfff": CausalArchitecture("(sfff)x1 (f)x28", "PAR, Table 1"),
    "par_transformer_base_3s_sfff": CausalArchitecture("(sfff)x3 (f)x20", "PAR, Table 1"),
    "par_transformer_base_4s_sfff": CausalArchitecture("(sfff)x4 (f)x16", "PAR, Table 1"),
    "par_transformer_base_5s_sfff": CausalArchitecture("(sfff)x5 (f)x12", "PAR, Table 1"),
    "par_transformer_base_6s_sff": CausalArchitecture("(sff)x6 (f)x14", "PAR, Table 1"),
    "par_transformer_base_7s_sff": CausalArchitecture("(sff)x7 (f)x11", "PAR, Table 1"),
    "par_transformer_base_7s_sfff": CausalArchitecture("(sfff)x7 (f)x4", "PAR, Table 1"),
    "transformer_xl_large": _LARGE("(sf)x18", "PAR, Table 3"),
    "par_transformer_large": _LARGE("(sfff)x7 (f)x8", "PAR, Table 3 (our interpretation)"),
    "sandwich_transformer_large": _LARGE("(s)x6 (sf)x12 (f)x6", "PAR, Table 3"),
    "transformer_xl_24b": _24B("(sf)x12"),
    "par_transformer_24b": _24B("(sff)x5 (f)x9"),
    "sandwich_transformer_24b": _24B("(s)x6 (sf)x6 (f)x6"),
    "mingru_base": CausalArchitecture("(r[cell=mingru]f)x16", "minGRU instead of attention (ours)"),
    # There is no memory between segments. The windows grow from 32 to 512 tokens, with a mean of 230 (Table 4); we
    # chose which layer has which window. In the last three pairs of layers, two heads have gaps of 1, 2 and 3 tokens.
    "longformer_small": CausalArchitecture(
        "(s[window=32]f)x2 (s[window=64]f)x2 (s[window=128]f)x2 (s[window=256,dilation=2]f)x2 "
        "s[window=256,dilation=3]f s[window=512,dilation=3]f (s[window=512,dilation=4]f)x2",
        "Longformer, section 4 (our interpretation)",
        dropout=0.2,
        activation_dropout=0.2,
        adaptive_softmax_cutoff="",
        mem_len=0,
        tgt_len=2048,
        rows=32,
        recipe="transformer_xl",
    ),
    "adaptive_span_small": _SUKHBAATAR("(s[span=8192,span_loss=5e-7]f)x12", "Sukhbaatar et al., 2019a, section 3"),
    "all_attention_small": _SUKHBAATAR(
        "(s[span=8192,span_loss=1e-7,persistent=1024])x18",
        "Sukhbaatar et al., 2019b, section 5",
    ),
    # Each head sees local keys and summaries, as in the paper's text model. There is no memory between segments of
    # 12,288 bytes.
    "sparse_transformer_base": CausalArchitecture(
        "(s[fixed=128,summary=32]f)x30",
        "Sparse Transformer, section 7.2 (enwik8)",
        dropout=0.4,
        activation_dropout=0.0,
        adaptive_softmax_cutoff="",
        mem_len=0,
        tgt_len=12_288,
        rows=4,
        recipe="transformer_xl",
    ),
    "igpt_s": _igpt(24, 512, 8),
    "igpt_m": _igpt(36, 1024, 8),
    "igpt_l": _igpt(48, 1536, 16, recipe="igpt_large"),
}

CAUSAL_ARCHITECTURES = _with_tiny_twins(
    _NAMED_CAUSAL,
    decoder_ffn_embed_dim=64,
    decoder_embed_dim=32,
    decoder_attention_heads=2,
    adaptive_softmax_cutoff="",
    mem_len=16,
)
