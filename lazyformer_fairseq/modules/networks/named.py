"""Functions that build networks from named architectures or from options, in plain PyTorch."""

from typing import Any, Union, cast

from lazyformer_fairseq.modules.networks.causal_lm import CausalLM
from lazyformer_fairseq.modules.networks.masked_lm import MaskedLM
from lazyformer_fairseq.modules.networks.options import CausalLMOptions, MaskedLMOptions, Options, options_of_arch


def build(arch: str, vocab_size: int, padding_idx: int = 1, **options: Any) -> Union[MaskedLM, CausalLM]:
    """Build a named architecture with newly initialized weights.

    Args:
        arch: the name of the architecture, as passed to fairseq-train's ``--arch``.
        vocab_size: V.
        padding_idx: the id of the padding symbol.
        options: keyword arguments that override the architecture's options, such as ``sublayer_pattern="M2x6"``.

    Raises:
        UserError: If the architecture or an option does not exist, a value is invalid, or options conflict.
    """
    return network(options_of_arch(arch, **options), vocab_size, padding_idx)


def network(options: Options, vocab_size: int, padding_idx: int = 1) -> Union[MaskedLM, CausalLM]:
    """Build a model with new weights, given its options or a fairseq config with the same fields."""
    if hasattr(options, "encoder_embed_dim"):
        return MaskedLM(cast(MaskedLMOptions, options), vocab_size, padding_idx)
    return CausalLM(cast(CausalLMOptions, options), vocab_size, padding_idx)
