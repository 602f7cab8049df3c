"""Turns rows of the table of architectures into values of ``--arch``."""

from collections.abc import Mapping
from dataclasses import fields

from fairseq.models import (
    ARCH_CONFIG_REGISTRY,
    ARCH_MODEL_INV_REGISTRY,
    ARCH_MODEL_REGISTRY,
    MODEL_DATACLASS_REGISTRY,
    register_model_architecture,
)
from omegaconf import OmegaConf

from lazyformer_fairseq.fairseq_plugin.replacements import Stage, install
from lazyformer_fairseq.patterns.architectures import Architecture


def register_presets(model: str, rows: Mapping[str, Architecture]) -> None:
    """Registers each row under its name for the model that is registered as `model`."""
    install(Stage.NAME)
    defaults = {field.name: field.default for field in fields(MODEL_DATACLASS_REGISTRY[model]) if field.name[0] != "_"}
    for name, row in rows.items():
        register_model_architecture(model, name)(_preset(row, defaults))


def _preset(row: Architecture, defaults: Mapping[str, object]):
    def preset(args):
        # A checkpoint's settings lack options that are newer than it. fairseq finds their defaults by a model's name,
        # not by an arch's; for a command line it fills them in later.
        values = {**defaults, **row.options()} if OmegaConf.is_config(args) else row.options()
        for option, value in values.items():
            if getattr(args, option, None) is None:
                setattr(args, option, value)

    return preset


def without_bert_base(models_by_name: dict[str, str]) -> dict[str, str]:
    """fairseq's ``ARCH_MODEL_NAME_REGISTRY``, in place, and the three beside it, without its own ``bert_base``."""
    if (model := models_by_name.pop("bert_base", None)) is not None:
        del ARCH_MODEL_REGISTRY["bert_base"], ARCH_CONFIG_REGISTRY["bert_base"]
        ARCH_MODEL_INV_REGISTRY[model].remove("bert_base")
    return models_by_name
