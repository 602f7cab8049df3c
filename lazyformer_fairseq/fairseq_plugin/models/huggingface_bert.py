"""fairseq's arch ``huggingface_bert``: Hugging Face's BERT, as others ship it, to train beside our models."""

from argparse import Namespace

from fairseq.models import BaseFairseqModel, register_model

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.extras import PACKAGE
from lazyformer_fairseq.fairseq_plugin.models.config import as_fairseq_reads
from lazyformer_fairseq.modules.networks import huggingface_bert as plain

HuggingFaceBertConfig = as_fairseq_reads(plain.HuggingFaceBertOptions, "HuggingFaceBertConfig")


@register_model("huggingface_bert", dataclass=HuggingFaceBertConfig)
class HuggingFaceBert(plain.HuggingFaceBert, BaseFairseqModel):
    """Of a dictionary."""

    def __init__(self, cfg: HuggingFaceBertConfig, dictionary):
        super().__init__(cfg, len(dictionary), dictionary.pad())

    @classmethod
    def build_model(cls, cfg, task) -> "HuggingFaceBert":
        """Raises a UserError where transformers is missing, or the sizes do not fit together."""
        if isinstance(cfg, Namespace):
            cfg = HuggingFaceBertConfig.from_namespace(cfg)
        if not plain.has_transformers():
            raise UserError(f"--arch huggingface_bert: needs transformers; pip install '{PACKAGE}[bench]'")
        if cfg.encoder_embed_dim % cfg.encoder_attention_heads:
            raise UserError(
                f"--encoder-attention-heads {cfg.encoder_attention_heads}: does not divide --encoder-embed-dim "
                f"{cfg.encoder_embed_dim}"
            )
        return cls(cfg, task.source_dictionary)
