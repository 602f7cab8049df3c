"""Options of the models, as fairseq reads them; ``--arch NAME`` sets those of a row of the table of architectures.

Defaults are those of ``lazyformer_m2x6_s`` and, of the causal language model, ``transformer_xl_base``.
"""

from argparse import SUPPRESS
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from fairseq import models
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.models import MODEL_DATACLASS_REGISTRY, register_model_architecture
from omegaconf import OmegaConf

from lazyformer_fairseq.fairseq_plugin.reliability.options import option
from lazyformer_fairseq.fairseq_plugin.replacements import Stage, install
from lazyformer_fairseq.modules.attention.choice import AUTO, BACKENDS
from lazyformer_fairseq.modules.layer_norm import EPS
from lazyformer_fairseq.modules.sublayers.feed_forward import ACTIVATIONS
from lazyformer_fairseq.patterns.architectures import ARCHITECTURES, CAUSAL_ARCHITECTURES, Architecture
from lazyformer_fairseq.patterns.kinds import LAYER, NORMS, describe_letters

BACKENDS_HELP = (
    "how attention is computed, all exact: eager and materialize keep distributions, recompute and fused do not; auto "
    "takes the fastest that was measured"
)
_ENCODER = ARCHITECTURES["lazyformer_m2x6_s"]
_DECODER = CAUSAL_ARCHITECTURES["transformer_xl_base"]


@dataclass
class LazyFormerConfig(FairseqDataclass):
    sublayer_pattern: str = option(
        _ENCODER.sublayer_pattern,
        f"the encoder, one letter a sublayer: {describe_letters()}; '(sff)x5 (f)x9' repeats, M2x6 is (sflf)x6",
    )
    encoder_embed_dim: int = option(_ENCODER.encoder_embed_dim, "embedding dimension")
    encoder_ffn_embed_dim: int = option(_ENCODER.encoder_ffn_embed_dim, "width of the feed-forward sublayers")
    encoder_attention_heads: int = option(_ENCODER.encoder_attention_heads, "number of attention heads")
    encoder_normalize_before: bool = option(False, "LayerNorm before each sublayer (pre-norm), not after it (BERT)")
    activation_fn: ChoiceEnum(list(ACTIVATIONS)) = option("gelu", "of feed-forward sublayers; relu_squared is Primer's")
    head_activation_fn: ChoiceEnum(list(ACTIVATIONS)) = option("gelu", "activation of the masked-LM head")
    layer_norm_eps: float = option(EPS, "what each norm adds to the variance; BERT's is 1e-12")
    norm: ChoiceEnum(list(NORMS)) = option(LAYER, "of all norms: LayerNorm, or RMSNorm, without mean and bias")
    no_norm_bias: bool = option(False, "LayerNorms without bias")
    no_linear_bias: bool = option(False, "sublayers, and the head's dense map, without biases")
    embedding_norm: bool = option(False, "pre-norm: normalise embeddings, not the first sublayer's input")
    plain_lm_head: bool = option(False, "masked-LM head: the output map alone")
    untied_lm_head: bool = option(False, "masked-LM head: an output map of its own, not the word embedding")
    dropout: float = option(0.1, "dropout on embeddings and sublayer outputs")
    attention_dropout: float = option(_ENCODER.attention_dropout, "dropout on attention distributions")
    activation_dropout: float = option(0.0, "dropout after the feed-forward activation")
    pooler_dropout: float = option(0.0, "dropout in the classification head")
    max_positions: int = option(512, "longest sequence, <s> and </s> included")
    no_token_positional_embeddings: bool = option(False, "no learned positions, as for s[rope=10000]")
    copy_positions: bool = option(False, "repeat a checkpoint's positions up to --max-positions, where it has fewer")
    token_types: int = option(0, "rows of a table that says which of two texts a token is of; BERT has 2")
    relative_position_buckets: int = option(_ENCODER.relative_position_buckets, "of T5's relative bias; 0: none")
    relative_position_max_distance: int = option(128, "from this distance on all relative positions share a bucket")
    attention_backend: ChoiceEnum([AUTO, *BACKENDS]) = option(AUTO, BACKENDS_HELP)
    lazy_backend: str = option("", SUPPRESS)  # see reliability.options.OLD_NAMES
    compile: bool = option(False, "in training, run sublayers and masked-LM loss through torch.compile")


@dataclass
class CausalLMConfig(FairseqDataclass):
    sublayer_pattern: str = option(
        _DECODER.sublayer_pattern,
        f"the decoder, one letter a sublayer: {describe_letters()}; '(sfff)x6 (f)x8' repeats, M2x6 is (sflf)x6",
    )
    decoder_embed_dim: int = option(_DECODER.decoder_embed_dim, "embedding dimension")
    decoder_ffn_embed_dim: int = option(_DECODER.decoder_ffn_embed_dim, "width of the feed-forward sublayers")
    decoder_attention_heads: int = option(_DECODER.decoder_attention_heads, "number of attention heads")
    decoder_normalize_before: bool = option(False, "LayerNorm before each sublayer (pre-norm) instead of after it")
    activation_fn: ChoiceEnum(list(ACTIVATIONS)) = option("relu", "of feed-forward sublayers; relu_squared is Primer's")
    norm: ChoiceEnum(list(NORMS)) = option(LAYER, "of all norms: LayerNorm, or RMSNorm, without mean and bias")
    no_norm_bias: bool = option(False, "LayerNorms without bias")
    no_linear_bias: bool = option(False, "sublayers without biases; attention has none anyway")
    dropout: float = option(_DECODER.dropout, "dropout on embeddings, encoded distances, sublayer outputs and features")
    attention_dropout: float = option(_DECODER.attention_dropout, "dropout on attention distributions")
    activation_dropout: float = option(_DECODER.activation_dropout, "dropout after the feed-forward activation")
    adaptive_softmax_cutoff: str = option(_DECODER.adaptive_softmax_cutoff, "ids that start a band of words; '': one")
    adaptive_softmax_factor: int = option(_DECODER.adaptive_softmax_factor, "by which each band's vectors are narrower")
    mem_len: int = option(_DECODER.mem_len, "tokens of the previous segments to attend to; 0 for no memory")
    clamp_len: int = option(0, "distances beyond this one are taken for it; 0 or -1 for no such limit")
    same_length: bool = option(False, "every query sees --mem-len tokens before it; else all of memory and segment")
    init_std: float = option(0.02, "standard deviation of the weights at first")
    attention_backend: ChoiceEnum([AUTO, *BACKENDS]) = option(AUTO, BACKENDS_HELP)
    lazy_backend: str = option("", SUPPRESS)  # see reliability.options.OLD_NAMES


def register_presets(model: str, rows: Mapping[str, Architecture]) -> None:
    """Registers each row under its name for the model that is registered as `model`."""
    install(Stage.NAME)
    defaults = {field.name: field.default for field in fields(MODEL_DATACLASS_REGISTRY[model]) if field.name[0] != "_"}

    def preset(row: Architecture, args: Any) -> None:
        # A checkpoint's settings lack options that are newer than it. fairseq finds their defaults by a model's name,
        # not by an arch's; for a command line it fills them in later.
        for name, value in {**(defaults if OmegaConf.is_config(args) else {}), **row.options()}.items():
            if getattr(args, name, None) is None:
                setattr(args, name, value)

    for name, row in rows.items():
        register_model_architecture(model, name)(partial(preset, row))


def without_bert_base(models_by_name: dict[str, str]) -> dict[str, str]:
    """fairseq's ``ARCH_MODEL_NAME_REGISTRY``, in place, and the three beside it, without its own ``bert_base``."""
    if (model := models_by_name.pop("bert_base", None)) is not None:
        del models.ARCH_MODEL_REGISTRY["bert_base"], models.ARCH_CONFIG_REGISTRY["bert_base"]
        models.ARCH_MODEL_INV_REGISTRY[model].remove("bert_base")
    return models_by_name
