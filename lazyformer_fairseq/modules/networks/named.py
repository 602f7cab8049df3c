"""A named architecture as a network, of plain torch."""

from typing import Any, Union, cast

from lazyformer_fairseq.modules.networks.causal_lm import CausalLM
from lazyformer_fairseq.modules.networks.masked_lm import MaskedLM
from lazyformer_fairseq.modules.networks.options import CausalLMOptions, MaskedLMOptions, Options, options_of_arch


def build(arch: str, vocab_size: int, padding_idx: int = 1, **options: Any) -> Union[MaskedLM, CausalLM]:
    """Return a model of a row of the table of architectures, with fresh weights.

    Args:
        arch: its name, as fairseq-train's ``--arch``.
        vocab_size: V.
        padding_idx: id of the padding symbol.
        options: in place of the row's, by name, such as ``sublayer_pattern="M2x6"``.

    Raises:
        UserError: no such name or option, a value that none can have, or sizes that do not fit together.
    """
    return network(options_of_arch(arch, **options), vocab_size, padding_idx)


def network(options: Options, vocab_size: int, padding_idx: int = 1) -> Union[MaskedLM, CausalLM]:
    """Return the model of these options, or of fairseq's config of them, with fresh weights."""
    if hasattr(options, "encoder_embed_dim"):
        return MaskedLM(cast(MaskedLMOptions, options), vocab_size, padding_idx)
    return CausalLM(cast(CausalLMOptions, options), vocab_size, padding_idx)
