"""An objective's model: its construction and its settings in checkpoints."""

from dataclasses import asdict, dataclass
from typing import Any, Union

from torch import nn

from lazyformer_fairseq.data.text.dictionary_file import Dictionary
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation import loading
from lazyformer_fairseq.modules.networks.huggingface_bert import HuggingFaceBert, HuggingFaceBertOptions
from lazyformer_fairseq.modules.networks.options import CausalLMOptions, MaskedLMOptions

FAIRSEQ_NAMES = {
    MaskedLMOptions: "lazyformer",
    CausalLMOptions: "lazyformer_lm",
    HuggingFaceBertOptions: "huggingface_bert",
}


@dataclass(frozen=True)
class Network:
    """A model from this package or Hugging Face's BERT, described by its options.

    Any class with the same two methods can be used instead, such as
    :class:`~lazyformer_fairseq.fairseq_plugin.models.elsewhere.FairseqNetwork`.
    """

    options: Union[MaskedLMOptions, CausalLMOptions, HuggingFaceBertOptions]

    def build(self, dictionary: Dictionary) -> nn.Module:
        """Build the model with random weights.

        Raises:
            UserError: the sizes are incompatible or a library is missing.
        """
        try:
            if isinstance(self.options, HuggingFaceBertOptions):
                return HuggingFaceBert(self.options, len(dictionary), dictionary.pad())
            return loading.model_of(self.options, dictionary)
        except ValueError as error:
            raise UserError(str(error)) from error

    def settings(self) -> dict[str, Any]:
        """Return the settings to store in checkpoints."""
        return {"_name": FAIRSEQ_NAMES[type(self.options)], **asdict(self.options)}
