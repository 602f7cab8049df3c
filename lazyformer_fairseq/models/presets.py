"""Rows of the table of architectures become values of ``--arch``."""

from collections.abc import Mapping

from fairseq.models import register_model_architecture

from lazyformer_fairseq.fairseq_compat import release_arch_name
from lazyformer_fairseq.patterns.architectures import Architecture


def register_presets(model: str, rows: Mapping[str, Architecture]) -> None:
    """Registers each row under its name for the model that is registered as `model`."""
    for name, row in rows.items():
        release_arch_name(name)
        register_model_architecture(model, name)(_preset(row))


def _preset(row: Architecture):
    def preset(args):
        for option, value in row.options().items():
            if getattr(args, option, None) is None:
                setattr(args, option, value)

    return preset
