"""The one table of named models: encoders, then causal language models. Tests hold every other list of names to it.

A new model is a new row. Every row also has a tiny twin of the same pattern for tests and quick starts:
``bert_base`` -> ``bert_tiny``, ``lazyformer_m2x6_s`` -> ``lazyformer_m2x6_s_tiny``.
"""

from dataclasses import dataclass, fields, replace
from typing import Optional, Union

MASKED_LM = "full_sentences_masked_lm"
_NOT_OPTIONS = {"parameters_in_millions", "source", "tgt_len", "rows", "updates", "recipe", "task"}


# Of an encoder's row, what is neither its pattern nor a size, and stays where widths are others.
PARTS = ("norm", "no_norm_bias", "no_linear_bias", "embedding_norm", "plain_lm_head", "untied_lm_head")
PARTS = (*PARTS, "no_token_positional_embeddings", "reversible")


class Architecture:
    """One row. All attributes but those described below are options of the model, whose help describes them."""

    def options(self) -> dict[str, Union[str, int, float]]:
        """The row as model options, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in _NOT_OPTIONS}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class EncoderArchitecture(Architecture):
    """What distinguishes an encoder. The other options (dropout 0.1, ...) are the model's defaults.

    Attributes:
        parameters_in_millions: at a vocabulary of 32,768 and 512 positions, as the paper prints it; ours is within 1%.
        source: where the row comes from.
        max_positions: None for the model's default, 512.
        no_token_positional_embeddings: whether there are no learned positions; None for the model's default, as for
            all that come after it.
        task: what `lazyformer pretrain` has it learn, by fairseq-train's name.
    """

    sublayer_pattern: str
    encoder_ffn_embed_dim: int
    encoder_embed_dim: int
    encoder_attention_heads: int
    attention_dropout: float
    relative_position_buckets: int
    parameters_in_millions: Optional[float]
    source: str
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


@dataclass(frozen=True)
class CausalArchitecture(Architecture):
    """What distinguishes a causal language model.

    Attributes:
        parameters_in_millions: at 267,735 words, as the paper prints it (Table 6); ours is within 1%.
        source: where the row comes from.
        tgt_len: tokens of a segment in training.
        rows: segments of an update.
        updates: of its training.
        recipe: of that, a file of ``configs/language_modeling/recipe``.
        decoder_normalize_before: pre-norm; None for the model's default, as for all that come after it.
    """

    sublayer_pattern: str
    decoder_ffn_embed_dim: int
    decoder_embed_dim: int
    decoder_attention_heads: int
    dropout: float
    attention_dropout: float
    activation_dropout: float
    adaptive_softmax_cutoff: str
    adaptive_softmax_factor: int
    mem_len: int
    parameters_in_millions: Optional[float]
    source: str
    tgt_len: int = 192
    rows: int = 256
    updates: int = 40_000
    recipe: str = "transformer_xl"
    decoder_normalize_before: Optional[bool] = None
    activation_fn: Optional[str] = None
    norm: Optional[str] = None
    no_linear_bias: Optional[bool] = None
    untied_softmax: Optional[bool] = None
    scaled_init: Optional[bool] = None


def _lazyformer(pattern, width, embed_dim, heads, attention_dropout, millions, table):
    source = f"LazyFormer, {table}"
    return EncoderArchitecture(pattern, width, embed_dim, heads, attention_dropout, 32, millions, source)


def _base_size(pattern, source, attention_dropout=0.1, millions=None, max_positions=None):
    """BERT's and RoBERTa's sizes, without T5's bias."""
    return EncoderArchitecture(pattern, 3072, 768, 12, attention_dropout, 0, millions, source, max_positions)


def _twins(name: str, pattern: str, width: int, source: str) -> dict[str, EncoderArchitecture]:
    """The rows NAME_sd (with attention dropout) and NAME_s (without), in BERT's width and size."""
    row = _lazyformer(pattern, width, 768, 12, 0.1, 112, source)
    return {f"{name}_sd": row, f"{name}_s": replace(row, attention_dropout=0.0)}


def _synthesizer(terms: str, row: str) -> EncoderArchitecture:
    """A row of Synthesizer's Table 2 in BERT's size. Without dropout in attention sequences share learned scores."""
    return _base_size(f"(s[synthesizer={terms}]f)x12", f"Synthesizer, Table 2: {row}", 0.0)


def _linformers(name: str, projected: int) -> dict[str, EncoderArchitecture]:
    """RoBERTa's size with the paper's three ways to share: by heads, by keys and values too, by layers too."""

    def row(share: str, called: str) -> EncoderArchitecture:
        return _base_size(f"(s[linformer={projected}{share}]f)x12", f"Linformer, Table 2: {projected}{called}")

    return {
        name: row("", ""),
        name.replace("_base", "_kv_base"): row(",share=kv", ", shared kv"),
        name.replace("_base", "_layers_base"): row(",share=layers", ", shared kv, layer"),
    }


def _modern(pattern: str, width: int, source: str, **options) -> EncoderArchitecture:
    """Of size 768: pre-norm, rotary positions alone, no biases in sublayers, no dropout."""
    how = dict.fromkeys(("encoder_normalize_before", "no_linear_bias", "no_token_positional_embeddings"), True)
    return EncoderArchitecture(pattern, width, 768, 12, 0.0, 0, None, source, dropout=0.0, **how, **options)


def _modernbert(of_two: str, width: int, source: str) -> EncoderArchitecture:
    """22 layers, of which every third sees all; `of_two` are the two between them. 1,024 tokens, as at first there."""
    of_all = "s[rope=160000]f[gate=gelu]"
    how = {"max_positions": 1024, "no_norm_bias": True, "embedding_norm": True}
    return _modern(f"({of_all} {of_two})x7{of_all}", width, source, **how)


_NAMED = {
    "bert_base": _lazyformer("M1x12", 3072, 768, 12, 0.1, 112, "Table 2"),
    **_twins("lazyformer_m2x6", "M2x6", 3456, "Table 2"),
    "lazyformer_m2x6": _lazyformer("M2x6", 4480, 896, 14, 0.0, 157, "Table 2"),
    "lazyformer_m2x6_w6144": _lazyformer("M2x6", 6144, 768, 12, 0.0, 161, "Table 4"),
    "lazyformer_m2x7": _lazyformer("M2x7", 4480, 768, 12, 0.0, 148, "Table 4"),
    **_twins("lazyformer_m3x4", "M3x4", 3584, "Table 3"),
    **_twins("lazyformer_m4x3", "M4x3", 3648, "Table 3"),
    **_twins("lazyformer_m6x2", "M6x2", 3712, "Table 3"),
    **_twins("lazyformer_m5m3m2m2", "M5M3M2M2", 3584, "Table 3"),
    **_twins("lazyformer_m2m2m3m5", "M2M2M3M5", 3584, "Table 3"),
    # For one GPU: 8 layers of 512. What M2x4 saves in four query and key projections widens its feed-forward.
    "bert_small": EncoderArchitecture("M1x8", 2048, 512, 8, 0.1, 32, None, "for one GPU (ours)"),
    "lazyformer_small": EncoderArchitecture("M2x4", 2304, 512, 8, 0.0, 32, None, "for one GPU (ours)"),
    "bert_laptop": EncoderArchitecture("(sf)x7", 768, 192, 6, 0.0, 32, None, "for one core (ours)"),
    # 110M in the paper, whose dictionary has 30,527 pieces.
    "mpnet_base": EncoderArchitecture(
        "(sf)x12",
        3072,
        768,
        12,
        0.1,
        32,
        None,
        "MPNet, section 3.1",
        task="masked_permuted_lm",
    ),
    # The other two rows of PAR's Table 4. Parameters counted, as par_bert_base's: at 30,522 pieces they are those of
    # the published models.
    "bert_base_absolute": _base_size("(sf)x12", "PAR, Table 4", millions=111.2),
    "distilbert_base": _base_size("(sf)x6", "PAR, Table 4", millions=68.7),
    "par_bert_base": _base_size("(sff)x5 (f)x9", "PAR, Table 4", millions=127.8),
    "sandwich_bert_base": _base_size("(s)x6 (sf)x6 (f)x6", "Sandwich's order in BERT's size (ours)"),
    "lazy_par_bert_base": _base_size("(sfflff)x3 (f)x6", "lazy blocks in PAR (ours)", 0.0),
    "gshard_base": _base_size("(sfsf[experts=8])x6", "GShard, section 2.2, in BERT's size (ours)"),
    # 256 tokens to either side, and <s>, which sees and is seen by all, as in its fine-tuning.
    "longformer_base": _base_size("(s[window=256,global=1]f)x12", "Longformer, section 5", max_positions=4096),
    "lazy_longformer_base": _base_size(
        "(s[window=256,global=1]flf)x6",
        "lazy blocks in Longformer (ours)",
        max_positions=4096,
    ),
    "synthesizer_fixed_base": _synthesizer("fixed", "Fixed Random"),
    "synthesizer_random_base": _synthesizer("random", "Random"),
    "synthesizer_factorised_random_base": _synthesizer("factorised_random", "Factorized Random"),
    "synthesizer_dense_base": _synthesizer("dense", "Dense"),
    "synthesizer_factorised_dense_base": _synthesizer("factorised_dense", "Factorized Dense"),
    "synthesizer_dense_random_base": _synthesizer("dense+random", "Random + Dense"),
    "synthesizer_dense_dot_base": _synthesizer("dense+dot", "Dense + Vanilla"),
    "synthesizer_random_dot_base": _synthesizer("random+dot", "Random + Vanilla"),
    "adaptively_sparse_base": _base_size("(s[entmax=learned]f)x12", "adaptively sparse, section 3"),
    # As many buckets as make a chunk of 64 twice as long as a mean bucket (section 2, "LSH attention").
    "reformer_base": _base_size("(s[buckets=128,rounds=4]f)x12", "Reformer, section 2", 0.0, max_positions=4096),
    "reformer_reversible_base": replace(
        _base_size("(s[buckets=128,rounds=4]f)x12", "Reformer, sections 2 and 3", 0.0, max_positions=4096),
        encoder_normalize_before=True,
        reversible=True,
    ),
    **_linformers("linformer_base", 256),
    **_linformers("linformer_128_base", 128),
    "lazy_linformer_base": EncoderArchitecture(
        "(s[linformer=256]flf)x6",
        3456,
        768,
        12,
        0.0,
        0,
        None,
        "Linformer in lazyformer_m2x6 (ours)",
    ),
    # "Nonuniform projected dimension": fewer positions for higher layers; the paper gives none.
    "linformer_falling_base": _base_size(
        "(s[linformer=192]f)x4 (s[linformer=128]f)x4 (s[linformer=64]f)x4", "Linformer, section 4 (our reading)"
    ),
    "nbrc_base": _base_size("(r[cell=nbrc]f)x12", "nBRC for attention (ours)"),
    "modernbert_base": _modernbert("(s[window=64,rope=10000]f[gate=gelu])x2", 1152, "ModernBERT, section 2.1"),
    # What an l saves in queries and keys widens the feed-forwards.
    "lazy_modernbert_base": _modernbert(
        "s[window=64,rope=10000]f[gate=gelu]lf[gate=gelu]",
        1312,
        "lazy blocks in ModernBERT (ours)",
    ),
    "neobert": _modern(
        "(s[rope=10000]f[gate=silu])x28",
        2048,
        "NeoBERT",
        max_positions=1024,
        norm="rms",
        plain_lm_head=True,
        untied_lm_head=True,
    ),
    "bert_modern_base": _modern(
        "(s[rope=10000,qk_norm]f[gate=gelu])x12",
        2048,
        "modern parts in BERT (ours)",
        norm="rms",
        embedding_norm=True,
    ),
}


def _with_tiny_twins(rows: dict[str, Architecture], **sizes) -> dict[str, Architecture]:
    sizes |= {"parameters_in_millions": None, "source": "for tests"}
    return rows | {_twin(name): _tiny(row, **sizes) for name, row in rows.items()}


def _tiny(row: Architecture, **sizes) -> Architecture:
    if "positions=absolute" in row.sublayer_pattern:  # without memory, as the row itself
        sizes["mem_len"] = 0
    return replace(row, **sizes)


def _twin(name: str) -> str:
    return f"{name.removesuffix('_base')}_tiny"


ARCHITECTURES = _with_tiny_twins(_NAMED, encoder_ffn_embed_dim=64, encoder_embed_dim=32, encoder_attention_heads=2)


_WIKITEXT_103_CUTOFFS = "19997,39997,199997"  # Transformer-XL's, of 267,735 words


def _base(pattern: str, source: str, millions: Optional[float] = None) -> CausalArchitecture:
    """PAR, Table 5; dropouts as Transformer-XL's base model."""
    sizes = (2048, 512, 8, 0.1, 0.0, 0.1, _WIKITEXT_103_CUTOFFS, 1, 192, millions, source)
    return CausalArchitecture(pattern, *sizes, recipe="nvidia")


def _large(pattern: str, source: str) -> CausalArchitecture:
    """PAR Transformer, section 3.1; dropouts and narrowing bands as Transformer-XL's large model."""
    sizes = (4096, 1024, 16, 0.2, 0.2, 0.2, _WIKITEXT_103_CUTOFFS, 4, 384, None, source, 384, 128)
    return CausalArchitecture(pattern, *sizes, updates=100_000, recipe="nvidia_large")


def _24b(pattern: str) -> CausalArchitecture:
    """PAR Transformer, section 3.1: 24 sublayers of the base model's size for characters."""
    sizes = (2048, 512, 8, 0.1, 0.0, 0.1, "", 1, 512, None, "PAR, Table 3", 512, 96)
    return CausalArchitecture(pattern, *sizes, recipe="nvidia")


def _sukhbaatar(pattern: str, source: str) -> CausalArchitecture:
    """The small models of Sukhbaatar et al., as published: dropout where they have it, 8,192 keys and more.

    The rest is ours: Transformer-XL's positions in place of a table of 8,192 keys, a tied embedding.
    """
    return CausalArchitecture(pattern, 2048, 512, 8, 0.0, 0.3, 0.3, "", 1, 7680, None, source, 512, 96)


def _igpt(layers: int, width: int, heads: int, updates: int = 1_000_000, recipe: str = "igpt") -> CausalArchitecture:
    """Image GPT, of 32 x 32 pixels. Sizes are the paper's; norm, biases and heads those of the published code."""
    sizes = (4 * width, width, heads, 0.0, 0.0, 0.0, "", 1, 0, None, "iGPT, section 3.3", 1024, 128, updates, recipe)
    how = dict.fromkeys(("decoder_normalize_before", "no_linear_bias", "untied_softmax", "scaled_init"), True)
    pattern = f"(s[positions=absolute,length=1024]f)x{layers}"
    return CausalArchitecture(pattern, *sizes, activation_fn="gelu", norm="rms", **how)


_NAMED_CAUSAL = {
    "transformer_xl_base": _base("(sf)x16", "PAR, Table 6", 192),
    "par_transformer_base": _base("(sfff)x6 (f)x8", "PAR, Table 6", 200),
    "sandwich_transformer_base": _base("(s)x6 (sf)x10 (f)x6", "PAR, Table 6", 192),
    # Between Table 1's three and six s: PAR base with every second s replaced by an l. Each l stands where PAR
    # attends, and pays for values and output alone.
    "lazy_par_transformer_base": _base("(sffflfff)x3 (f)x8", "PAR base with every other s lazy (ours)"),
    "par_transformer_base_0s": _base("(f)x32", "PAR, Table 1"),
    "par_transformer_base_1s_sfff": _base("(sfff)x1 (f)x28", "PAR, Table 1"),
    "par_transformer_base_3s_sfff": _base("(sfff)x3 (f)x20", "PAR, Table 1"),
    "par_transformer_base_4s_sfff": _base("(sfff)x4 (f)x16", "PAR, Table 1"),
    "par_transformer_base_5s_sfff": _base("(sfff)x5 (f)x12", "PAR, Table 1"),
    "par_transformer_base_6s_sff": _base("(sff)x6 (f)x14", "PAR, Table 1"),
    "par_transformer_base_7s_sff": _base("(sff)x7 (f)x11", "PAR, Table 1"),
    "par_transformer_base_7s_sfff": _base("(sfff)x7 (f)x4", "PAR, Table 1"),
    "transformer_xl_large": _large("(sf)x18", "PAR, Table 3"),
    "par_transformer_large": _large("(sfff)x7 (f)x8", "PAR, Table 3 (our reading)"),
    "sandwich_transformer_large": _large("(s)x6 (sf)x12 (f)x6", "PAR, Table 3"),
    "transformer_xl_24b": _24b("(sf)x12"),
    "par_transformer_24b": _24b("(sff)x5 (f)x9"),
    "sandwich_transformer_24b": _24b("(s)x6 (sf)x6 (f)x6"),
    "mingru_base": _base("(r[cell=mingru]f)x16", "minGRU for attention (ours)"),
    # Segments remember nothing. Windows grow from 32 to 512 with a mean of 230 (Table 4): which layer has which is our
    # reading. In the last three pairs of layers two heads have gaps of 1, 2 and 3 tokens.
    "longformer_small": CausalArchitecture(
        "(s[window=32]f)x2 (s[window=64]f)x2 (s[window=128]f)x2 (s[window=256,dilation=2]f)x2 "
        "s[window=256,dilation=3]f s[window=512,dilation=3]f (s[window=512,dilation=4]f)x2",
        *(2048, 512, 8, 0.2, 0.0, 0.2, "", 1, 0, None, "Longformer, section 4 (our reading)", 2048, 32),
    ),
    "adaptive_span_small": _sukhbaatar("(s[span=8192,span_loss=5e-7]f)x12", "Sukhbaatar et al., 2019a, section 3"),
    "all_attention_small": _sukhbaatar(
        "(s[span=8192,span_loss=1e-7,persistent=1024])x18", "Sukhbaatar et al., 2019b, section 5"
    ),
    # Each head sees both parts, as in the paper's model of text. Segments of 12,288 bytes remember nothing.
    "sparse_transformer_base": CausalArchitecture(
        "(s[fixed=128,summary=32]f)x30",
        *(2048, 512, 8, 0.4, 0.0, 0.0, "", 1, 0, None, "Sparse Transformer, section 7.2 (enwik8)", 12_288, 4),
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
