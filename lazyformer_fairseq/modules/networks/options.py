"""Model options, each defined once with its name, default, help text and choices.

fairseq's dataclasses are generated from these definitions. The defaults are taken from the architecture
``lazyformer_m2x6_s`` or, for causal language models, from ``transformer_xl_base``.
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
    "attention back end; the results are equivalent, but eager and materialize store attention distributions, whereas "
    "recompute and fused do not; auto uses the back end measured to be fastest"
)
CHECKPOINTS_HELP = (
    "during training, keep only the inputs of layers and lazy blocks, and recompute all other activations"
)
REVERSIBLE_HELP = (
    "let sublayers alternately update two streams, so that training can recompute all activations from the final "
    "streams; requires pre-norm"
)
PRIMERS = "activation of the feed-forward sublayers: gelu, gelu_tanh, relu or relu_squared (as in Primer)"
_ENCODER = ARCHITECTURES["lazyformer_m2x6_s"]
_DECODER = CAUSAL_ARCHITECTURES["transformer_xl_base"]


@dataclass
class MaskedLMOptions:
    """The options of :class:`~lazyformer_fairseq.modules.networks.masked_lm.MaskedLM`."""

    sublayer_pattern: str = option(
        _ENCODER.sublayer_pattern,
        f"encoder pattern, one letter per sublayer: {describe_letters()}; x repeats a group, as in '(sff)x5 (f)x9', "
        "and M2x6 is short for (sflf)x6",
    )
    encoder_embed_dim: int = option(_ENCODER.encoder_embed_dim, "embedding dimension", bounds=LENGTH)
    encoder_ffn_embed_dim: int = option(
        _ENCODER.encoder_ffn_embed_dim,
        "hidden size of the feed-forward sublayers",
        bounds=LENGTH,
    )
    encoder_attention_heads: int = option(_ENCODER.encoder_attention_heads, "number of attention heads", bounds=LENGTH)
    encoder_normalize_before: bool = option(
        False,
        "apply LayerNorm before each sublayer (pre-norm) instead of after it (post-norm, as in BERT)",
    )
    activation_fn: str = option("gelu", PRIMERS, choices=tuple(ACTIVATIONS))
    head_activation_fn: str = option(
        "gelu", "activation of the masked-LM head: gelu, gelu_tanh, relu or relu_squared", choices=tuple(ACTIVATIONS)
    )
    layer_norm_eps: float = option(EPS, "epsilon added to the variance in each norm; BERT uses 1e-12", bounds=AMOUNT)
    norm: str = option(
        LAYER,
        "type of all norms: layer (LayerNorm) or rms (RMSNorm, which has no bias and does not subtract the mean)",
        choices=tuple(NORMS),
    )
    no_norm_bias: bool = option(False, "omit the biases of LayerNorms")
    no_linear_bias: bool = option(
        False, "omit the biases of the sublayers' linear layers and of the masked-LM head's dense layer"
    )
    embedding_norm: bool = option(
        False, "normalize the embeddings instead of the first sublayer's input; requires pre-norm"
    )
    plain_lm_head: bool = option(False, "reduce the masked-LM head to its output projection")
    untied_lm_head: bool = option(
        False,
        "do not share the masked-LM head's output projection with the word embedding",
    )
    local_heads: bool = option(
        False, "initialize T5's relative position bias so that each of four heads favors one neighboring position"
    )
    zero_last_maps: bool = option(False, "initialize the last linear layer of each sublayer to zero (arXiv 1901.09321)")
    frequency_bias: bool = option(False, "initialize the bias of the masked-LM head to the log frequencies of tokens")
    neighbour_embeddings: bool = option(False, "initialize word embeddings from counts of neighboring tokens")
    dropout: float = option(0.1, "dropout on embeddings and sublayer outputs", bounds=PROPORTION)
    attention_dropout: float = option(
        _ENCODER.attention_dropout,
        "dropout on attention distributions",
        bounds=PROPORTION,
    )
    activation_dropout: float = option(0.0, "dropout after the feed-forward activation", bounds=PROPORTION)
    pooler_dropout: float = option(0.0, "dropout in the classification head", bounds=PROPORTION)
    max_positions: int = option(512, "maximum number of tokens in a sequence, including <s> and </s>", bounds=LENGTH)
    no_token_positional_embeddings: bool = option(
        False, "omit the learned position embeddings, such as when the pattern uses s[rope=10000]"
    )
    copy_positions: bool = option(
        False,
        "if a checkpoint has fewer positions than --max-positions, repeat its position embeddings to fill the table",
    )
    token_types: int = option(
        0,
        "number of token types, which distinguish the two texts of a pair; BERT uses 2; 0 for none",
        bounds=COUNT_OR_NONE,
    )
    relative_position_buckets: int = option(
        _ENCODER.relative_position_buckets,
        "number of buckets of T5's relative position bias; 0 for no bias",
        bounds=COUNT_OR_NONE,
    )
    relative_position_max_distance: int = option(
        128,
        "distance in tokens beyond which all relative positions share a bucket",
        bounds=LENGTH,
    )
    experts_loss: float = option(
        0.01,
        "weight of the load-balancing loss of sublayers with experts, such as f[experts=8]",
        bounds=AMOUNT,
    )
    attention_backend: str = option(AUTO, BACKENDS_HELP, choices=(AUTO, *BACKENDS))
    compile: bool = option(False, "during training, run the sublayers and the masked-LM loss through torch.compile")
    checkpoint_activations: bool = option(False, CHECKPOINTS_HELP)
    reversible: bool = option(False, REVERSIBLE_HELP)


@dataclass
class CausalLMOptions:
    """The options of :class:`~lazyformer_fairseq.modules.networks.causal_lm.CausalLM`."""

    sublayer_pattern: str = option(
        _DECODER.sublayer_pattern,
        f"decoder pattern, one letter per sublayer: {describe_letters()}; x repeats a group, as in '(sfff)x6 (f)x8', "
        "and M2x6 is short for (sflf)x6",
    )
    decoder_embed_dim: int = option(_DECODER.decoder_embed_dim, "embedding dimension", bounds=LENGTH)
    decoder_ffn_embed_dim: int = option(
        _DECODER.decoder_ffn_embed_dim,
        "hidden size of the feed-forward sublayers",
        bounds=LENGTH,
    )
    decoder_attention_heads: int = option(_DECODER.decoder_attention_heads, "number of attention heads", bounds=LENGTH)
    decoder_normalize_before: bool = option(
        False,
        "apply LayerNorm before each sublayer (pre-norm) instead of after it (post-norm)",
    )
    activation_fn: str = option("relu", PRIMERS, choices=tuple(ACTIVATIONS))
    norm: str = option(
        LAYER,
        "type of all norms: layer (LayerNorm) or rms (RMSNorm, which has no bias and does not subtract the mean)",
        choices=tuple(NORMS),
    )
    no_norm_bias: bool = option(False, "omit the biases of LayerNorms")
    no_linear_bias: bool = option(False, "omit the biases of the sublayers' linear layers; attention never has any")
    dropout: float = option(
        _DECODER.dropout,
        "dropout on embeddings, distance encodings, sublayer outputs and features",
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
    adaptive_softmax_cutoff: str = option(
        _DECODER.adaptive_softmax_cutoff,
        "comma-separated ids at which new frequency bands of the vocabulary start; '' for a single band",
    )
    adaptive_softmax_factor: int = option(
        _DECODER.adaptive_softmax_factor,
        "factor by which the embedding width shrinks from band to band",
        bounds=COUNT,
    )
    untied_softmax: bool = option(
        False,
        "use a separate, zero-initialized output projection instead of the word embedding",
    )
    mem_len: int = option(
        _DECODER.mem_len,
        "number of tokens from previous segments to attend to; 0 for no memory",
        bounds=COUNT_OR_NONE,
    )
    clamp_len: int = option(
        0,
        "maximum distance between tokens; longer distances are clamped to it; 0 or -1 for no limit",
        bounds=COUNT_OR_UNLIMITED,
    )
    same_length: bool = option(
        False,
        "let each query see itself and exactly the --mem-len tokens before it, instead of the whole memory and all "
        "earlier tokens of its segment",
    )
    init_std: float = option(0.02, "standard deviation of the initial weights", bounds=AMOUNT)
    scaled_init: bool = option(
        False,
        "divide the initial weights of each sublayer's last linear layer by the square root of the number of "
        "sublayers, as in GPT-2",
    )
    experts_loss: float = option(
        0.01,
        "weight of the load-balancing loss of sublayers with experts, such as f[experts=8]",
        bounds=AMOUNT,
    )
    attention_backend: str = option(AUTO, BACKENDS_HELP, choices=(AUTO, *BACKENDS))
    checkpoint_activations: bool = option(False, CHECKPOINTS_HELP)
    reversible: bool = option(False, REVERSIBLE_HELP)


Options = Union[MaskedLMOptions, CausalLMOptions]
SomeOptions = TypeVar("SomeOptions", MaskedLMOptions, CausalLMOptions)


DROPOUTS = ("dropout", "attention_dropout", "activation_dropout")


def norms_and_biases(options: Any) -> dict[str, Any]:
    """Return a network's arguments for norms, biases and the experts' loss.

    Args:
        options: a model's options.
    """
    return {
        "norm": str(options.norm),
        "norm_bias": not options.no_norm_bias,
        "linear_bias": not options.no_linear_bias,
        "experts_loss": options.experts_loss,
    }


def plain_options(cls: type[SomeOptions], config: Any) -> SomeOptions:
    """Convert a config to a plain dataclass of model options.

    Args:
        cls: the dataclass.
        config: an object with the same fields, such as a fairseq config.
    """
    found = {}
    for each in fields(cls):
        found[each.name] = getattr(config, each.name)
        if each.type is str:
            found[each.name] = str(found[each.name])
    return cls(**found)


def read_options(cls: type[SomeOptions], given: Mapping[str, Any]) -> SomeOptions:
    """Build model options from a mapping of names to values, such as one read from a checkpoint or a file.

    All options are checked here. Exporting, loading, building and the command line therefore reject the same values
    with the same messages.

    Args:
        cls: the dataclass of the options.
        given: the values by name; missing options get their defaults.

    Raises:
        UserError: If a name is unknown, or a value has the wrong type, is out of bounds or is not one of the choices.
    """
    given = dict(given)
    known = {each.name: each.default for each in fields(cls)}
    if unknown := sorted(map(str, given.keys() - known.keys())):
        raise UserError(f"unknown option {', '.join(unknown)}{nearest(unknown[0], known)}")
    for name, value in given.items():
        right = type(known[name])
        if right is float and type(value) is int:
            given[name] = float(value)
        elif type(value) is not right:
            raise UserError(f"option {name} is {value!r}, but must be of type {right.__name__}")
    options = cls(**given)
    check(options)
    return options


def options_of_arch(arch: str, **given: Any) -> Options:
    """Return the options of a named architecture, as set by ``--arch``.

    Args:
        arch: the name of the architecture.
        given: values that override the architecture's options, by name.

    Raises:
        UserError: If the architecture does not exist, or :func:`read_options` rejects a name or value.
    """
    if arch in ARCHITECTURES:
        return read_options(MaskedLMOptions, {**ARCHITECTURES[arch].options(), **given})
    if arch in CAUSAL_ARCHITECTURES:
        return read_options(CausalLMOptions, {**CAUSAL_ARCHITECTURES[arch].options(), **given})
    raise UserError(f"unknown architecture {arch!r}{nearest(arch, [*ARCHITECTURES, *CAUSAL_ARCHITECTURES])}")
