"""fairseq configs for the models' options, and presets for the named architectures (``--arch NAME``)."""

from collections.abc import Mapping, Sequence
from dataclasses import field, fields, make_dataclass
from functools import partial
from typing import Any

from fairseq import models
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.models import register_model_architecture

from lazyformer_fairseq.fairseq_plugin.replacements import Stage, install
from lazyformer_fairseq.modules.networks.options import CausalLMOptions, MaskedLMOptions
from lazyformer_fairseq.patterns.architectures import Architecture


def to_fairseq_dataclass(
    options: type, name: str, extra_fields: Sequence[tuple] = (), base: type = FairseqDataclass
) -> type:
    """Convert one of our options dataclasses to a fairseq dataclass.

    Fields with choices become fairseq enums.

    Args:
        options: the dataclass to convert.
        name: the name of the new class.
        extra_fields: additional fields, as (name, type, default).
        base: the base class; its fields are not repeated.
    """
    found = []
    inherited = {each.name for each in fields(base)}
    for each in fields(options):
        said = each.metadata["option"]
        if each.name in inherited:
            continue
        value_type = ChoiceEnum(list(said.choices)) if said.choices else each.type
        metadata = {"help": said.help}
        if said.flags:
            metadata["argparse_alias"] = said.flags[-1]
        found.append((each.name, value_type, field(default=each.default, metadata=metadata)))
    return make_dataclass(name, [*found, *extra_fields], bases=(base,), namespace={"__module__": __name__})


MaskedLMConfig = to_fairseq_dataclass(MaskedLMOptions, "MaskedLMConfig")
CausalLMConfig = to_fairseq_dataclass(CausalLMOptions, "CausalLMConfig")


def register_presets(model: str, rows: Mapping[str, Architecture]) -> None:
    """Register architectures with fairseq as presets of a registered model.

    Args:
        model: the name under which the model is registered.
        rows: the architectures by name.
    """
    install(Stage.NAME)

    def preset(row: Architecture, args: Any) -> None:
        for name, value in row.options().items():
            if getattr(args, name, None) is None:
                setattr(args, name, value)

    for name, row in rows.items():
        register_model_architecture(model, name)(partial(preset, row))


def without_bert_base(models_by_name: dict[str, str]) -> dict[str, str]:
    """Remove fairseq's ``bert_base`` from ``ARCH_MODEL_NAME_REGISTRY`` and the three related registries."""
    if (model := models_by_name.pop("bert_base", None)) is not None:
        del models.ARCH_MODEL_REGISTRY["bert_base"], models.ARCH_CONFIG_REGISTRY["bert_base"]
        models.ARCH_MODEL_INV_REGISTRY[model].remove("bert_base")
    return models_by_name
