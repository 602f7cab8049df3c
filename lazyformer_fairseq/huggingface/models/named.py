"""Named architectures as transformers configs."""

from typing import Any, Union

from lazyformer_fairseq.huggingface.models.causal import LazyFormerCausalConfig
from lazyformer_fairseq.huggingface.models.configuration import LazyFormerConfig
from lazyformer_fairseq.huggingface.settings import settings_of
from lazyformer_fairseq.modules.networks.options import MaskedLMOptions, options_of_arch


def config_of_arch(arch: str, vocab_size: int, **settings: Any) -> Union[LazyFormerConfig, LazyFormerCausalConfig]:
    """Return the config of a named architecture, such as "modernbert_base".

    Args:
        arch: The architecture's name.
        vocab_size: The number of tokens in the vocabulary.
        **settings: Settings that override the architecture's.

    Raises:
        UserError: There is no architecture with this name.
    """
    options = options_of_arch(arch)
    if isinstance(options, MaskedLMOptions):
        config_class = LazyFormerConfig
    else:
        config_class = LazyFormerCausalConfig
    return config_class(**{**settings_of(options), "vocab_size": vocab_size, **settings})
