"""The fairseq arch ``huggingface_bert``: Hugging Face's BERT implementation, a baseline for our models."""

from argparse import Namespace

from fairseq.models import BaseFairseqModel, register_model

from lazyformer_fairseq.fairseq_plugin.models.config import to_fairseq_dataclass
from lazyformer_fairseq.modules.networks import huggingface_bert as plain

HuggingFaceBertConfig = to_fairseq_dataclass(plain.HuggingFaceBertOptions, "HuggingFaceBertConfig")


@register_model("huggingface_bert", dataclass=HuggingFaceBertConfig)
class HuggingFaceBert(plain.HuggingFaceBert, BaseFairseqModel):
    """Hugging Face's BERT with a fairseq dictionary as its vocabulary."""

    def __init__(self, cfg: HuggingFaceBertConfig, dictionary):
        super().__init__(cfg, len(dictionary), dictionary.pad())

    @classmethod
    def build_model(cls, cfg, task) -> "HuggingFaceBert":
        """Build the model for a task's dictionary."""
        if isinstance(cfg, Namespace):
            cfg = HuggingFaceBertConfig.from_namespace(cfg)
        return cls(cfg, task.source_dictionary)
