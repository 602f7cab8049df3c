"""Lookup of the options that an optimizer or schedule does not support, but others in fairseq's registry do."""

from dataclasses import fields

from fairseq.registry import REGISTRIES


def unsupported_options(registry: str, name: str) -> set[str]:
    """Return the options of all registered optimizers or schedules that a given one does not support.

    Args:
        registry: ``optimizer`` or ``lr_scheduler``.
        name: the name of the optimizer or schedule.
    """
    options_of = {}
    for each, options in REGISTRIES[registry]["dataclass_registry"].items():
        options_of[each] = {field.name for field in fields(options)}
    supported = options_of.get(name, {"lr", "weight_decay"})  # sgd has these, but no dataclass
    return set().union(*options_of.values()) - supported
