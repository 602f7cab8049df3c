"""Builders of networks from named architectures or from options, in plain torch."""

from typing import Any, Union, cast

from lazyformer_fairseq.modules.networks.causal_lm import CausalLM
from lazyformer_fairseq.modules.networks.masked_lm import MaskedLM
from lazyformer_fairseq.modules.networks.options import CausalLMOptions, MaskedLMOptions, Options, options_of_arch


def build(arch: str, vocab_size: int, padding_idx: int = 1, **options: Any) -> Union[MaskedLM, CausalLM]:
    """Return a model of a named architecture, with fresh weights.

    Args:
        arch: the name of the architecture, as for ``--arch`` of fairseq-train.
        vocab_size: V.
        padding_idx: the id of the padding symbol.
        options: options that replace those of the architecture, by name, such as ``sublayer_pattern="M2x6"``.

    Raises:
        UserError: there is no such architecture or option, a value is not valid, or options contradict each other.
    """
    return network(options_of_arch(arch, **options), vocab_size, padding_idx)


def network(options: Options, vocab_size: int, padding_idx: int = 1) -> Union[MaskedLM, CausalLM]:
    """Return a model with fresh weights, built from its options or from fairseq's config with the same fields."""
    if hasattr(options, "encoder_embed_dim"):
        return MaskedLM(cast(MaskedLMOptions, options), vocab_size, padding_idx)
    return CausalLM(cast(CausalLMOptions, options), vocab_size, padding_idx)
