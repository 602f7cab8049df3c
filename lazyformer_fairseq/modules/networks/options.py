"""Options of the models, each written once: name, default, help, choices. fairseq's dataclasses are made of these.

Defaults are those of ``lazyformer_m2x6_s`` and, of the causal language model, ``transformer_xl_base``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar, Union

from lazyformer_fairseq.errors import UserError, nearest
from lazyformer_fairseq.modules.attention.selection import AUTO, BACKENDS
from lazyformer_fairseq.modules.layer_norm import EPS
from lazyformer_fairseq.modules.sublayers.feed_forward import ACTIVATIONS
from lazyformer_fairseq.options import (
    AMOUNT,
    COUNT,
    COUNT_OR_NONE,
    COUNT_OR_UNLIMITED,
    LENGTH,
    PROPORTION,
    check,
    option,
)
from lazyformer_fairseq.patterns.architectures import ARCHITECTURES, CAUSAL_ARCHITECTURES
from lazyformer_fairseq.patterns.kinds import LAYER, NORMS, describe_letters

BACKENDS_HELP = (
    "how attention is computed, all exact: eager and materialize keep distributions, recompute and fused do not; auto "
    "takes the fastest that was measured"
)
CHECKPOINTS_HELP = "training keeps what goes into layers and lazy blocks alone, and recomputes the rest"
REVERSIBLE_HELP = "pre-norm: sublayers change two streams in turn; training recomputes all from the last"
PRIMERS = "of feed-forward sublayers; relu_squared is Primer's"
_ENCODER = ARCHITECTURES["lazyformer_m2x6_s"]
_DECODER = CAUSAL_ARCHITECTURES["transformer_xl_base"]


@dataclass
class MaskedLMOptions:
    """Options of :class:`~lazyformer_fairseq.modules.networks.masked_lm.MaskedLM`."""

    sublayer_pattern: str = option(
        _ENCODER.sublayer_pattern,
        f"the encoder, one letter a sublayer: {describe_letters()}; '(sff)x5 (f)x9' repeats, M2x6 is (sflf)x6",
    )
    encoder_embed_dim: int = option(_ENCODER.encoder_embed_dim, "embedding dimension", bounds=LENGTH)
    encoder_ffn_embed_dim: int = option(
        _ENCODER.encoder_ffn_embed_dim,
        "width of the feed-forward sublayers",
        bounds=LENGTH,
    )
    encoder_attention_heads: int = option(_ENCODER.encoder_attention_heads, "number of attention heads", bounds=LENGTH)
    encoder_normalize_before: bool = option(False, "LayerNorm before each sublayer (pre-norm), not after it (BERT)")
    activation_fn: str = option("gelu", PRIMERS, choices=tuple(ACTIVATIONS))
    head_activation_fn: str = option("gelu", "activation of the masked-LM head", choices=tuple(ACTIVATIONS))
    layer_norm_eps: float = option(EPS, "what each norm adds to the variance; BERT's is 1e-12", bounds=AMOUNT)
    norm: str = option(LAYER, "of all norms: LayerNorm, or RMSNorm, without mean and bias", choices=tuple(NORMS))
    no_norm_bias: bool = option(False, "LayerNorms without bias")
    no_linear_bias: bool = option(False, "sublayers, and the head's dense map, without biases")
    embedding_norm: bool = option(False, "pre-norm: normalise embeddings, not the first sublayer's input")
    plain_lm_head: bool = option(False, "masked-LM head: the output map alone")
    untied_lm_head: bool = option(False, "masked-LM head: an output map of its own, not the word embedding")
    local_heads: bool = option(False, "T5's bias starts at a neighbour each in four heads")
    zero_last_maps: bool = option(False, "sublayers' last maps start at zero (1901.09321)")
    frequency_bias: bool = option(False, "masked-LM head: its bias starts at log frequencies")
    neighbour_embeddings: bool = option(False, "word embeddings start from counts of neighbouring tokens")
    dropout: float = option(0.1, "dropout on embeddings and sublayer outputs", bounds=PROPORTION)
    attention_dropout: float = option(
        _ENCODER.attention_dropout,
        "dropout on attention distributions",
        bounds=PROPORTION,
    )
    activation_dropout: float = option(0.0, "dropout after the feed-forward activation", bounds=PROPORTION)
    pooler_dropout: float = option(0.0, "dropout in the classification head", bounds=PROPORTION)
    max_positions: int = option(512, "longest sequence, <s> and </s> included", bounds=LENGTH)
    no_token_positional_embeddings: bool = option(False, "no learned positions, as for s[rope=10000]")
    copy_positions: bool = option(False, "repeat a checkpoint's positions up to --max-positions, where it has fewer")
    token_types: int = option(
        0,
        "rows of a table that says which of two texts a token is of; BERT has 2",
        bounds=COUNT_OR_NONE,
    )
    relative_position_buckets: int = option(
        _ENCODER.relative_position_buckets,
        "of T5's relative bias; 0: none",
        bounds=COUNT_OR_NONE,
    )
    relative_position_max_distance: int = option(
        128,
        "from this distance on all relative positions share a bucket",
        bounds=LENGTH,
    )
    experts_loss: float = option(
        0.01,
        "weight of the loss that keeps the experts of f[experts=8] equally busy",
        bounds=AMOUNT,
    )
    attention_backend: str = option(AUTO, BACKENDS_HELP, choices=(AUTO, *BACKENDS))
    compile: bool = option(False, "in training, run sublayers and masked-LM loss through torch.compile")
    checkpoint_activations: bool = option(False, CHECKPOINTS_HELP)
    reversible: bool = option(False, REVERSIBLE_HELP)


@dataclass
class CausalLMOptions:
    """Options of :class:`~lazyformer_fairseq.modules.networks.causal_lm.CausalLM`."""

    sublayer_pattern: str = option(
        _DECODER.sublayer_pattern,
        f"the decoder, one letter a sublayer: {describe_letters()}; '(sfff)x6 (f)x8' repeats, M2x6 is (sflf)x6",
    )
    decoder_embed_dim: int = option(_DECODER.decoder_embed_dim, "embedding dimension", bounds=LENGTH)
    decoder_ffn_embed_dim: int = option(
        _DECODER.decoder_ffn_embed_dim,
        "width of the feed-forward sublayers",
        bounds=LENGTH,
    )
    decoder_attention_heads: int = option(_DECODER.decoder_attention_heads, "number of attention heads", bounds=LENGTH)
    decoder_normalize_before: bool = option(False, "LayerNorm before each sublayer (pre-norm) instead of after it")
    activation_fn: str = option("relu", PRIMERS, choices=tuple(ACTIVATIONS))
    norm: str = option(LAYER, "of all norms: LayerNorm, or RMSNorm, without mean and bias", choices=tuple(NORMS))
    no_norm_bias: bool = option(False, "LayerNorms without bias")
    no_linear_bias: bool = option(False, "sublayers without biases; attention has none anyway")
    dropout: float = option(
        _DECODER.dropout,
        "dropout on embeddings, encoded distances, sublayer outputs and features",
        bounds=PROPORTION,
    )
    attention_dropout: float = option(
        _DECODER.attention_dropout,
        "dropout on attention distributions",
        bounds=PROPORTION,
    )
    activation_dropout: float = option(
        _DECODER.activation_dropout,
        "dropout after the feed-forward activation",
        bounds=PROPORTION,
    )
    adaptive_softmax_cutoff: str = option(_DECODER.adaptive_softmax_cutoff, "ids that start a band of words; '': one")
    adaptive_softmax_factor: int = option(
        _DECODER.adaptive_softmax_factor,
        "by which each band's vectors are narrower",
        bounds=COUNT,
    )
    untied_softmax: bool = option(False, "an output map of its own, zero at first, not the word embedding")
    mem_len: int = option(
        _DECODER.mem_len,
        "tokens of the previous segments to attend to; 0 for no memory",
        bounds=COUNT_OR_NONE,
    )
    clamp_len: int = option(
        0,
        "distances beyond this one are taken for it; 0 or -1 for no such limit",
        bounds=COUNT_OR_UNLIMITED,
    )
    same_length: bool = option(False, "every query sees --mem-len tokens before it; else all of memory and segment")
    init_std: float = option(0.02, "standard deviation of the weights at first", bounds=AMOUNT)
    scaled_init: bool = option(False, "the last map of each of L sublayers is smaller at first by sqrt(L) (GPT-2)")
    experts_loss: float = option(
        0.01,
        "weight of the loss that keeps the experts of f[experts=8] equally busy",
        bounds=AMOUNT,
    )
    attention_backend: str = option(AUTO, BACKENDS_HELP, choices=(AUTO, *BACKENDS))
    checkpoint_activations: bool = option(False, CHECKPOINTS_HELP)
    reversible: bool = option(False, REVERSIBLE_HELP)


Options = Union[MaskedLMOptions, CausalLMOptions]
SomeOptions = TypeVar("SomeOptions", MaskedLMOptions, CausalLMOptions)


DROPOUTS = ("dropout", "attention_dropout", "activation_dropout")


def norms_and_biases(options: Any) -> dict[str, Any]:
    """Return options of norms and biases, and the weight of experts' loss, as a network takes them."""
    return {
        "norm": str(options.norm),
        "norm_bias": not options.no_norm_bias,
        "linear_bias": not options.no_linear_bias,
        "experts_loss": options.experts_loss,
    }


def plain_options(cls: type[SomeOptions], config: Any) -> SomeOptions:
    """Return the options that a model was built from as a dataclass of ours, from fairseq's config or such a one."""
    found = {}
    for each in fields(cls):
        found[each.name] = getattr(config, each.name)
        if each.type is str:
            found[each.name] = str(found[each.name])
    return cls(**found)


def read_options(cls: type[SomeOptions], given: Mapping[str, Any]) -> SomeOptions:
    """Return the options of a model by name, as a checkpoint or a file has them.

    The one check of them: an export, a load, a build and a command line refuse the same values in the same words.

    Raises:
        UserError: an unknown name, or a value of another type, out of its bounds, or none of the choices.
    """
    given = dict(given)
    known = {each.name: each.default for each in fields(cls)}
    if unknown := sorted(map(str, given.keys() - known.keys())):
        raise UserError(f"no setting {', '.join(unknown)}{nearest(unknown[0], known)}")
    for name, value in given.items():
        right = type(known[name])
        if right is float and type(value) is int:
            given[name] = float(value)
        elif type(value) is not right:
            raise UserError(f"option {name} is {value!r}, must be {right.__name__}")
    options = cls(**given)
    check(options)
    return options


def options_of_arch(arch: str, **given: Any) -> Options:
    """Return the options of a named architecture, as ``--arch`` sets them; `given` replaces some.

    Raises:
        UserError: as :func:`read_options`, or there is no such architecture.
    """
    if arch in ARCHITECTURES:
        return read_options(MaskedLMOptions, {**ARCHITECTURES[arch].options(), **given})
    if arch in CAUSAL_ARCHITECTURES:
        return read_options(CausalLMOptions, {**CAUSAL_ARCHITECTURES[arch].options(), **given})
    raise UserError(f"no architecture {arch!r}{nearest(arch, [*ARCHITECTURES, *CAUSAL_ARCHITECTURES])}")
