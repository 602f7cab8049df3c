"""Converts our models' options to settings in transformers' configs, and back."""

from dataclasses import asdict, fields
from typing import Any

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.huggingface.activations import ACTIVATIONS, WRITTEN_ACTIVATIONS
from lazyformer_fairseq.modules.networks.options import (
    CausalLMOptions,
    MaskedLMOptions,
    SomeOptions,
    plain_options,
    read_options,
)

# Options with a different name in a config. All others keep their names.
NAMES = {
    "encoder_embed_dim": "hidden_size",
    "encoder_ffn_embed_dim": "intermediate_size",
    "encoder_attention_heads": "num_attention_heads",
    "encoder_normalize_before": "normalize_before",
    "decoder_embed_dim": "hidden_size",
    "decoder_ffn_embed_dim": "intermediate_size",
    "decoder_attention_heads": "num_attention_heads",
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
# Options whose counterpart in a config has the opposite meaning.
OPPOSITES = {
    "no_norm_bias": "norm_bias",
    "no_linear_bias": "linear_bias",
    "untied_lm_head": "tie_word_embeddings",
    "no_token_positional_embeddings": "position_embeddings",
}
OF_A_RUN = ("compile", "copy_positions", "checkpoint_activations")  # options of a run, which configs do not contain


def settings_of(options: Any) -> dict[str, Any]:
    """Return a model's options as config settings, by name."""
    if hasattr(options, "encoder_embed_dim"):
        options_class = MaskedLMOptions
    else:
        options_class = CausalLMOptions
    found = {}
    for name, value in asdict(plain_options(options_class, options)).items():
        if name in OF_A_RUN:
            continue
        if name in OPPOSITES:
            found[OPPOSITES[name]] = not value
        elif name.endswith("activation_fn"):
            found[NAMES[name]] = WRITTEN_ACTIVATIONS[value]
        else:
            found[NAMES.get(name, name)] = value
    return found


def options_of(config: Any, options_class: type[SomeOptions]) -> SomeOptions:
    """Return the options described by a config.

    Raises:
        UserError: A value is invalid for its option.
    """
    given: dict[str, Any] = {}
    for field in fields(options_class):
        name = OPPOSITES.get(field.name) or NAMES.get(field.name, field.name)
        value = getattr(config, name, None)
        if value is None:  # for example, a BERT's `classifier_dropout`
            continue
        if field.name in OPPOSITES:
            value = not value
        elif field.name.endswith("activation_fn"):
            if value not in ACTIVATIONS:
                raise UserError(f"{name} is {value!r}, but must be one of {', '.join(ACTIVATIONS)}")
            value = ACTIVATIONS[value]
        given[field.name] = value
    return read_options(options_class, given)
