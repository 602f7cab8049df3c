"""What transformers' configs call the options of our models, written once for both ways."""

from dataclasses import asdict, fields
from typing import Any

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.huggingface.families import ACTIVATIONS, BERT_KEYS, WRITTEN_ACTIVATIONS
from lazyformer_fairseq.modules.networks.options import (
    CausalLMOptions,
    MaskedLMOptions,
    SomeOptions,
    plain_options,
    read_options,
)

# Of those that are called otherwise there, theirs; in the second table they say the opposite.
NAMES = {
    **BERT_KEYS,
    **{f"decoder_{name}": BERT_KEYS[f"encoder_{name}"] for name in ("embed_dim", "ffn_embed_dim", "attention_heads")},
    **dict.fromkeys(("encoder_normalize_before", "decoder_normalize_before"), "normalize_before"),
    "head_activation_fn": "head_act",
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
OF_A_RUN = ("compile", "copy_positions", "checkpoint_activations")  # they have no place in a config


def settings_of(options: Any) -> dict[str, Any]:
    """Of a model's options, as a config has them."""
    kind = MaskedLMOptions if hasattr(options, "encoder_embed_dim") else CausalLMOptions
    found = asdict(plain_options(kind, options))
    return {_name(name): _value(name, value) for name, value in found.items() if name not in OF_A_RUN}


def _name(ours: str) -> str:
    return NAMES.get(ours) or OPPOSITES.get(ours) or ours


def _value(name: str, value: Any) -> Any:
    return not value if name in OPPOSITES else WRITTEN_ACTIVATIONS[value] if name.endswith("activation_fn") else value


def options_of(config: Any, kind: type[SomeOptions]) -> SomeOptions:
    """The options that a config describes; `classifier_dropout` may be None there. Raises a UserError as they do."""
    given: dict[str, Any] = {}
    for each in fields(kind):
        theirs = _name(each.name)
        value = getattr(config, theirs, None)
        if value is None:
            continue
        if each.name.endswith("activation_fn"):
            if value not in ACTIVATIONS:
                raise UserError(f"{theirs} {value!r}: must be one of {', '.join(ACTIVATIONS)}")
            value = ACTIVATIONS[value]
        given[each.name] = not value if each.name in OPPOSITES else value
    return read_options(kind, given)
