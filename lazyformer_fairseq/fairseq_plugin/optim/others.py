"""Options that belong to other optimizers and schedules of fairseq's registry, ours among them."""

from dataclasses import fields

from fairseq.registry import REGISTRIES


def options_of_others(registry: str, name: str) -> set[str]:
    """Return the options of all optimizers, or schedules, that the one of this name lacks."""
    rows = {each: {one.name for one in fields(row)} for each, row in REGISTRIES[registry]["dataclass_registry"].items()}
    return set().union(*rows.values()) - rows.get(name, {"lr", "weight_decay"})  # which sgd has, without a row
