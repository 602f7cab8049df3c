"""Options of the models, as fairseq reads them; ``--arch NAME`` sets those of a row of the table of architectures."""

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


def as_fairseq_reads(options: type, name: str, more: Sequence[tuple] = (), base: type = FairseqDataclass) -> type:
    """Return a dataclass of fairseq's with options of ours: choices are an enum of its own.

    Args:
        options: a dataclass of ours.
        name: the name of the class.
        more: fields beside those, as (name, type, default).
        base: has some of them already.
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
    return make_dataclass(name, [*found, *more], bases=(base,), namespace={"__module__": __name__})


MaskedLMConfig = as_fairseq_reads(MaskedLMOptions, "MaskedLMConfig")
CausalLMConfig = as_fairseq_reads(CausalLMOptions, "CausalLMConfig")


def register_presets(model: str, rows: Mapping[str, Architecture]) -> None:
    """Register each row under its name for the model that is registered as `model`."""
    install(Stage.NAME)

    def preset(row: Architecture, args: Any) -> None:
        for name, value in row.options().items():
            if getattr(args, name, None) is None:
                setattr(args, name, value)

    for name, row in rows.items():
        register_model_architecture(model, name)(partial(preset, row))


def without_bert_base(models_by_name: dict[str, str]) -> dict[str, str]:
    """Remove fairseq's own ``bert_base`` from ``ARCH_MODEL_NAME_REGISTRY``, and the three registries beside it."""
    if (model := models_by_name.pop("bert_base", None)) is not None:
        del models.ARCH_MODEL_REGISTRY["bert_base"], models.ARCH_CONFIG_REGISTRY["bert_base"]
        models.ARCH_MODEL_INV_REGISTRY[model].remove("bert_base")
    return models_by_name
