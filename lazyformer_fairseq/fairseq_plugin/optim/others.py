"""Lookup of the options that an optimizer or schedule does not support, but others in fairseq's registry do."""

from dataclasses import fields

from fairseq.registry import REGISTRIES


def unsupported_options(registry: str, name: str) -> set[str]:
    """Return the options of all registered optimizers or schedules that a given one does not support.

    Args:
        registry: ``optimizer`` or ``lr_scheduler``.
        name: the name of the optimizer or schedule.
    """
    rows = {each: {one.name for one in fields(row)} for each, row in REGISTRIES[registry]["dataclass_registry"].items()}
    return set().union(*rows.values()) - rows.get(name, {"lr", "weight_decay"})  # sgd has these, but no dataclass
