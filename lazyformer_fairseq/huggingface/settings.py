"""What transformers' configs call the options of our models, written once for both ways."""

from dataclasses import asdict, fields
from typing import Any

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.huggingface.families import ACTIVATIONS, WRITTEN_ACTIVATIONS
from lazyformer_fairseq.modules.networks.options import (
    CausalLMOptions,
    MaskedLMOptions,
    SomeOptions,
    plain_options,
    read_options,
)

# Of those that are called otherwise there, theirs; in the second table they say the opposite.
NAMES = {
    "encoder_embed_dim": "hidden_size",
    "decoder_embed_dim": "hidden_size",
    "encoder_ffn_embed_dim": "intermediate_size",
    "decoder_ffn_embed_dim": "intermediate_size",
    "encoder_attention_heads": "num_attention_heads",
    "decoder_attention_heads": "num_attention_heads",
    "encoder_normalize_before": "normalize_before",
    "decoder_normalize_before": "normalize_before",
    "activation_fn": "hidden_act",
    "head_activation_fn": "head_act",
    "dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
    "pooler_dropout": "classifier_dropout",
    "max_positions": "max_position_embeddings",
    "token_types": "type_vocab_size",
    "init_std": "initializer_range",
}
OPPOSITES = {
    "no_norm_bias": "norm_bias",
    "no_linear_bias": "linear_bias",
    "untied_lm_head": "tie_word_embeddings",
    "no_token_positional_embeddings": "position_embeddings",
}
OF_A_RUN = ("compile", "copy_positions")  # they have no place in a config


def settings_of(options: Any) -> dict[str, Any]:
    """Of a model's options, as a config has them."""
    kind = MaskedLMOptions if hasattr(options, "encoder_embed_dim") else CausalLMOptions
    found = {name: value for name, value in asdict(plain_options(kind, options)).items() if name not in OF_A_RUN}
    return {
        NAMES.get(name) or OPPOSITES.get(name) or name: not value if name in OPPOSITES else _activation(name, value)
        for name, value in found.items()
    }


def _activation(name: str, value: Any) -> Any:
    return WRITTEN_ACTIVATIONS[value] if name.endswith("activation_fn") else value


def options_of(config: Any, kind: type[SomeOptions]) -> SomeOptions:
    """The options that a config describes; `classifier_dropout` may be None there. Raises a UserError as they do."""
    given: dict[str, Any] = {}
    for each in fields(kind):
        theirs = NAMES.get(each.name) or OPPOSITES.get(each.name) or each.name
        value = getattr(config, theirs, None)
        if value is None:
            continue
        if each.name.endswith("activation_fn"):
            if value not in ACTIVATIONS:
                raise UserError(f"{theirs} {value!r}: must be one of {', '.join(ACTIVATIONS)}")
            value = ACTIVATIONS[value]
        given[each.name] = not value if each.name in OPPOSITES else value
    return read_options(kind, given)
