"""Rows of the table of architectures become values of ``--arch``."""

from collections.abc import Mapping

from fairseq.models import (
    ARCH_CONFIG_REGISTRY,
    ARCH_MODEL_INV_REGISTRY,
    ARCH_MODEL_REGISTRY,
    register_model_architecture,
)

from lazyformer_fairseq.patterns.architectures import Architecture
from lazyformer_fairseq.reliability.hooks import Stage
from lazyformer_fairseq.reliability.installing import install


def register_presets(model: str, rows: Mapping[str, Architecture]) -> None:
    """Registers each row under its name for the model that is registered as `model`."""
    install(Stage.NAME)
    for name, row in rows.items():
        register_model_architecture(model, name)(_preset(row))


def _preset(row: Architecture):
    def preset(args):
        for option, value in row.options().items():
            if getattr(args, option, None) is None:
                setattr(args, option, value)

    return preset


def without_bert_base(models_by_name: dict[str, str]) -> dict[str, str]:
    """fairseq's ``ARCH_MODEL_NAME_REGISTRY``, in place, and the three beside it, without its own ``bert_base``."""
    if (model := models_by_name.pop("bert_base", None)) is not None:
        del ARCH_MODEL_REGISTRY["bert_base"], ARCH_CONFIG_REGISTRY["bert_base"]
        ARCH_MODEL_INV_REGISTRY[model].remove("bert_base")
    return models_by_name
