"""The models of ``--model NAME=SPEC``: patterns, named archs and external models, each with its own options."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Optional

from lazyformer_fairseq.errors import UserError, nearest, whole_number
from lazyformer_fairseq.patterns.architectures import ARCHITECTURES, CAUSAL_ARCHITECTURES
from lazyformer_fairseq.patterns.grammar import expand, is_possible, plan, split_sublayers
from lazyformer_fairseq.patterns.kinds import ENCODER

# The prefix of an external model's SPEC: "fairseq:" is followed by one of fairseq's --arch names, "hf:" by a model from
# transformers. For each model, the table has the pattern of one layer, which is used to count the model's FLOPs.
EXTERNALS = {
    "fairseq": ("fairseq", {"roberta_base": "sf"}),
    "hf": ("huggingface", {"bert": "sf", "modernbert": "sf[gate=gelu]"}),
}
OWN = {"embed": "embed_dim", "ffn": "ffn_embed_dim", "heads": "heads", "layers": "layers"}
WIDTHS = ("embed_dim", "ffn_embed_dim", "heads")
DRAWS = 1000  # maximum number of random draws per requested order
EXAMPLE = "'mine=(sff)x4 f', 'mine=(sff)x4 f; ffn=448', 'mine=bert_base; sizes=own' or 'roberta=fairseq:roberta_base'"


@dataclass(frozen=True)
class ModelSpec:
    """A model to compare.

    Attributes:
        name: the model's name in tables, without the suffix for a fraction of the training time.
        what: the kind of SPEC: ``pattern``, ``arch``, ``fairseq`` or ``huggingface``.
        pattern: the pattern of its sublayers; for an external model, one with the same FLOPs.
        arch: the name of an arch or an external model; None for a pattern.
        embed_dim: the embedding dimension.
        ffn_embed_dim: the width of the feed-forward sublayers.
        heads: the number of attention heads.
        own_sizes: whether an arch keeps its own widths and heads and, for encoders, its own positions and attention
            dropout.
        without: the names of the recipe parts that the model omits.
        rates: the model's own learning rates, which replace the comparison's; empty if it has none.
        options: further command-line options of the model, text, optimizer and schedule.
    """

    name: str
    what: str
    pattern: str
    arch: Optional[str]
    embed_dim: int
    ffn_embed_dim: int
    heads: int
    own_sizes: bool = False
    without: tuple[str, ...] = ()
    rates: tuple[float, ...] = ()
    options: tuple[str, ...] = ()

    @property
    def is_external(self) -> bool:
        """True if the model comes from fairseq or transformers."""
        return self.what in ("fairseq", "huggingface")

    @property
    def layers(self) -> int:
        """An external model's number of layers."""
        return layers_in(self.pattern)


def layers_in(pattern: str) -> int:
    """Return the number of layers in a pattern, counting two sublayers as one layer."""
    return len(split_sublayers(expand(pattern))) // 2


def read_models(specs: Mapping[str, str], task: Any, sizes: Mapping[str, Any]) -> dict[str, ModelSpec]:
    """Parse the SPEC of each model, in order.

    Unless its SPEC sets ``layers=N``, an external model has half as many layers as the first of this package's models
    has sublayers.

    Args:
        specs: each model's SPEC by NAME.
        task: the task's row in the table of tasks.
        sizes: the default `embed_dim`, `ffn_embed_dim` and `heads` for models that do not set their own.

    Returns:
        The models by name.

    Raises:
        UserError: a SPEC cannot be parsed, a pattern is invalid, or an arch is unknown.
    """
    found = {}
    for name, spec in specs.items():
        prefix = spec.partition(":")[0].strip()
        if prefix not in EXTERNALS:
            found[name] = _read_own(name, spec, task.direction, sizes)
    first = next(iter(found.values()), None)
    for name, spec in specs.items():
        if name not in found:
            if not task.supports_external_models:
                raise UserError(f"--model {name}={spec}: external models work only with --task masked-lm")
            found[name] = _read_external(name, spec, sizes, first)
    return {name: found[name] for name in specs}


def random_orders(pattern: str, count: int, seed: int, direction: str) -> dict[str, str]:
    """Return distinct random orders of a pattern's sublayers, by name, other than the pattern itself.

    Source: Press et al., 2019, section 3.

    Raises:
        UserError: fewer than `count` such orders were found.
    """
    parts = split_sublayers(expand(pattern))
    chance = random.Random(seed)
    orders = dict[str, None]()
    for _ in range(DRAWS * count):
        if len(orders) == count:
            break
        order = "".join(chance.sample(parts, len(parts)))
        if order != expand(pattern) and is_possible(order, direction):
            orders[order] = None
    if len(orders) < count:
        raise UserError(f"--random-orders {count}: only {len(orders)} orders of {pattern} were found; request fewer")
    return {f"random_{number}": order for number, order in enumerate(orders, 1)}


def _split(name: str, spec: str) -> tuple[str, dict[str, int], dict[str, Any]]:
    """Split a SPEC such as ``PATTERN; ffn=896; norm=rms``.

    Returns:
        The part before the first semicolon, the model's own sizes, and the other fields of its ModelSpec.
    """
    what, *options = (part.strip() for part in spec.split(";"))
    own = {}
    others = {}
    for option in options:
        key, equals, value = (part.strip() for part in option.partition("="))
        if not key or (equals and not value):
            raise UserError(f"--model {name}={spec}: {option!r} is not of the form NAME=VALUE; examples: {EXAMPLE}")
        if key == "sizes":
            others["own_sizes"] = True
            if value != "own":
                raise UserError(f"--model {name}={spec}: the only valid value of sizes is own, as in sizes=own")
        elif key == "without":
            left_out = [part.strip() for part in value.split(",")]
            others["without"] = tuple(part.replace("-", "_") for part in left_out)
        elif key == "lr":
            others["rates"] = tuple(_rate(part, name, spec) for part in value.split(","))
        elif key not in OWN:
            words = [f"--{key.replace('_', '-')}"]
            if equals:
                words.append(value)
            others["options"] = (*others.get("options", ()), *words)
        elif not whole_number(value):
            raise UserError(f"--model {name}={spec}: {key}={value} is not a positive integer")
        else:
            own[OWN[key]] = int(value)
    return what, own, others


def _rate(text: str, name: str, spec: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found <= 1:
        raise UserError(f"--model {name}={spec}: lr={text} must be above 0 and at most 1")
    return found


def _read_own(name: str, spec: str, direction: str, sizes: Mapping[str, Any]) -> ModelSpec:
    what, own, others = _split(name, spec)
    keeps = "own_sizes" in others
    part = "decoder"
    rows = CAUSAL_ARCHITECTURES
    if direction == ENCODER:
        part = "encoder"
        rows = ARCHITECTURES
    row = rows.get(what)

    if "layers" in own:
        raise UserError(
            f"--model {name}={spec}: layers=N works only with fairseq: and hf: models; a pattern already determines "
            "the number of layers"
        )
    if keeps and row is None:
        raise UserError(f"--model {name}={spec}: sizes=own works only with a named arch and keeps that arch's widths")

    named_by = "pattern"
    arch = None
    pattern = what
    if row:
        named_by = "arch"
        arch = what
        pattern = row.sublayer_pattern
    try:
        plan(pattern, direction)
    except UserError as error:
        named = ""
        if "_" in what:
            named = f"\nNor is there an arch of that name{nearest(what, rows) or '; docs/patterns.md lists all archs'}"
        raise UserError(f"--model {name}={spec}: {error}{named}") from None

    if keeps:
        options = zip(WIDTHS, ("embed_dim", "ffn_embed_dim", "attention_heads"), strict=True)
        own = {size: getattr(row, f"{part}_{option}") for size, option in options} | own
    widths = {size: own.get(size, sizes[size]) for size in WIDTHS}
    return ModelSpec(name=name, what=named_by, pattern=pattern, arch=arch, **widths, **others)


def _read_external(name: str, spec: str, sizes: Mapping[str, Any], first: Optional[ModelSpec]) -> ModelSpec:
    whole, own, others = _split(name, spec)
    prefix, _, called = (part.strip() for part in whole.partition(":"))
    what, archs = EXTERNALS[prefix]
    if called not in archs or "own_sizes" in others:
        known = ", ".join(f"{prefix}:{arch}" for arch in archs)
        raise UserError(f"--model {name}={spec}: choose from {known}; embed=, ffn=, heads= and layers= may follow")
    layers = own.pop("layers", None)
    if not layers and first:
        layers = max(1, layers_in(first.pattern))
    if not layers:
        raise UserError(f"--model {name}={spec}: specify the number of layers, as in '{name}={whole}; layers=6'")
    widths = {size: own.get(size, sizes[size]) for size in WIDTHS}
    pattern = f"({archs[called]})x{layers}"
    return ModelSpec(name=name, what=what, pattern=pattern, arch=called, **widths, **others)
