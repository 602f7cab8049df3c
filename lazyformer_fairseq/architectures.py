"""The one table of named encoders. ``--arch`` presets and configs/pretraining/*.yaml are held to it by tests.

A new encoder is a new row. Every row also has a tiny twin of the same pattern for tests and quick starts:
``bert_base`` -> ``bert_tiny``, ``lazyformer_m2x6_s`` -> ``lazyformer_m2x6_s_tiny``.
"""

from dataclasses import dataclass, fields, replace
from typing import Optional, Union


@dataclass(frozen=True)
class Architecture:
    """One row: what distinguishes an encoder. The other options (dropout 0.1, ...) are the model's defaults.

    Attributes up to ``relative_position_buckets`` have the names of the model's options.

    Attributes:
        sublayer_pattern: the encoder, see :mod:`lazyformer_fairseq.sublayer_pattern`.
        encoder_ffn_embed_dim: W, width of the feed-forward sublayers.
        encoder_embed_dim: H, embedding dimension.
        encoder_attention_heads: N.
        attention_dropout: on attention distributions; the ``-S`` rows have none.
        relative_position_buckets: of T5's relative bias, 0 for none (the PAR paper's models).
        parameters_in_millions: at a vocabulary of 32,768 and 512 positions, as the paper prints it; ours to within 1%.
        source: where the row comes from.
    """

    sublayer_pattern: str
    encoder_ffn_embed_dim: int
    encoder_embed_dim: int
    encoder_attention_heads: int
    attention_dropout: float
    relative_position_buckets: int
    parameters_in_millions: Optional[float]
    source: str

    def options(self) -> dict[str, Union[str, int, float]]:
        """The row as model options, by name."""
        not_options = {"parameters_in_millions", "source"}
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in not_options}


def _lazyformer(pattern, width, embed_dim, heads, attention_dropout, millions, source):
    return Architecture(pattern, width, embed_dim, heads, attention_dropout, 32, millions, f"LazyFormer, {source}")


def _twins(name: str, pattern: str, width: int, source: str) -> dict[str, Architecture]:
    """The rows NAME_sd (with attention dropout) and NAME_s (without), of BERT's width and size."""
    row = _lazyformer(pattern, width, 768, 12, 0.1, 112, source)
    return {f"{name}_sd": row, f"{name}_s": replace(row, attention_dropout=0.0)}


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
    "par_bert_base": Architecture("(sff)x5 (f)x9", 3072, 768, 12, 0.1, 0, 127.8, "PAR Transformer, Table 4"),
    "sandwich_bert_base": Architecture(
        "(s)x6 (sf)x6 (f)x6", 3072, 768, 12, 0.1, 0, None, "Sandwich's order in BERT's size (ours)"
    ),
    "lazy_par_bert_base": Architecture("(sfflff)x3 (f)x6", 3072, 768, 12, 0.0, 0, None, "lazy blocks in PAR (ours)"),
}


def _tiny_name(name: str) -> str:
    return name.replace("_base", "_tiny") if name.endswith("_base") else f"{name}_tiny"


def _tiny(row: Architecture) -> Architecture:
    return replace(
        row,
        encoder_ffn_embed_dim=64,
        encoder_embed_dim=32,
        encoder_attention_heads=2,
        parameters_in_millions=None,
        source="for tests",
    )


ARCHITECTURES = {**_NAMED, **{_tiny_name(name): _tiny(row) for name, row in _NAMED.items()}}
