"""A named architecture as a network, of plain torch."""

from typing import Any, Union

from lazyformer_fairseq.modules.networks.causal_lm import CausalLM
from lazyformer_fairseq.modules.networks.masked_lm import MaskedLM
from lazyformer_fairseq.modules.networks.options import MaskedLMOptions, options_of_arch


def build(arch: str, vocab_size: int, padding_idx: int = 1, **options: Any) -> Union[MaskedLM, CausalLM]:
    """A model of a row of the table of architectures, with fresh weights.

    Args:
        arch: its name, as fairseq-train's ``--arch``.
        vocab_size: V.
        padding_idx: id of the padding symbol.
        options: in place of the row's, by name, such as ``sublayer_pattern="M2x6"``.

    Raises:
        UserError: no such name or option, a value that none can have, or sizes that do not fit together.
    """
    found = options_of_arch(arch, **options)
    network = MaskedLM if isinstance(found, MaskedLMOptions) else CausalLM
    return network(found, vocab_size, padding_idx)
