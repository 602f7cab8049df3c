"""The models of ``--model NAME=SPEC``: a pattern, an arch of ours, or a model from elsewhere, with sizes of its own."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Optional

from lazyformer_fairseq.errors import UserError, whole_number
from lazyformer_fairseq.patterns.architectures import ARCHITECTURES, CAUSAL_ARCHITECTURES
from lazyformer_fairseq.patterns.grammar import expand, is_possible, plan, split_sublayers
from lazyformer_fairseq.patterns.kinds import ENCODER

# SPEC begins with one: "fairseq:" names an --arch of fairseq's, "hf:" a model of transformers. FLOPs count as those of
# such layers.
EXTERNALS = {
    "fairseq": ("fairseq", {"roberta_base": "sf"}),
    "hf": ("huggingface", {"bert": "sf", "modernbert": "sf[gate=gelu]"}),
}
OWN = {"embed": "embed_dim", "ffn": "ffn_embed_dim", "heads": "heads", "layers": "layers"}
WIDTHS = ("embed_dim", "ffn_embed_dim", "heads")
DRAWS = 1000  # for each order that is asked for
EXAMPLE = "'mine=(sff)x4 f', 'mine=(sff)x4 f; ffn=448', 'mine=bert_base; sizes=own' or 'roberta=fairseq:roberta_base'"


@dataclass(frozen=True)
class ModelSpec:
    """A model to compare.

    Attributes:
        name: the name in tables, without its share.
        what: ``pattern``, ``arch``, ``fairseq`` or ``huggingface``.
        pattern: its sublayers; an external's have the FLOPs of its layers.
        arch: the name of an arch or an external.
        embed_dim, ffn_embed_dim, heads: its sizes.
        own_sizes: whether an arch keeps its widths and heads, and for encoders its positions and dropout in attention.
        without: parts of the recipe that it goes without, by name.
        rates: learning rates of its own, in place of the comparison's.
        options: words of further options, of its model, text, optimizer and schedule.
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
        """True for a model of fairseq or transformers."""
        return self.what in ("fairseq", "huggingface")

    @property
    def layers(self) -> int:
        """The layers of an external."""
        return layers_in(self.pattern)


def layers_in(pattern: str) -> int:
    """Return half the number of sublayers."""
    return len(split_sublayers(expand(pattern))) // 2


def read_models(specs: Mapping[str, str], task: Any, sizes: Mapping[str, Any]) -> dict[str, ModelSpec]:
    """Return the models by name, in the order given.

    An external has as many layers as half the sublayers of the first model of ours, unless it says ``layers=N``.

    Args:
        specs: SPEC by NAME.
        task: the row of the table of tasks.
        sizes: `embed_dim`, `ffn_embed_dim` and `heads` of all that have none of their own.

    Raises:
        UserError: a SPEC that cannot be read, a pattern that is wrong, an arch that nobody knows.
    """
    ours = {name: spec for name, spec in specs.items() if spec.partition(":")[0].strip() not in EXTERNALS}
    found = {name: _ours(name, spec, task.direction, sizes) for name, spec in ours.items()}
    first = next(iter(found.values()), None)
    for name, spec in specs.items():
        if name not in found:
            if not task.takes_externals:
                raise UserError(f"--model {name}={spec}: models from elsewhere are for --task masked-lm alone")
            found[name] = _elsewhere(name, spec, sizes, first)
    return {name: found[name] for name in specs}


def random_orders(pattern: str, count: int, seed: int, direction: str) -> dict[str, str]:
    """Return random orders of a pattern's sublayers by name, each once, without itself (Press et al., 2019, section 3).

    Raises:
        UserError: there are not so many.
    """
    parts = split_sublayers(expand(pattern))
    chance = random.Random(seed)
    orders = dict[str, None]()
    for _ in range(DRAWS * count):
        order = "".join(chance.sample(parts, len(parts)))
        if len(orders) < count and order != expand(pattern) and is_possible(order, direction):
            orders[order] = None
    if len(orders) < count:
        raise UserError(f"--random-orders {count}: of {pattern} only {len(orders)} were found; give fewer")
    return {f"random_{number}": order for number, order in enumerate(orders, 1)}


def _split(name: str, spec: str) -> tuple[str, dict[str, int], dict[str, Any]]:
    """Return the parts of ``PATTERN; ffn=896; norm=rms``: what comes first, sizes, other fields of its ModelSpec."""
    what, *options = (part.strip() for part in spec.split(";"))
    own = {}
    others = {}
    for option in options:
        key, equals, value = (part.strip() for part in option.partition("="))
        if not key or (equals and not value):
            raise UserError(f"--model {name}={spec}: {option!r} is no NAME=VALUE; write for example {EXAMPLE}")
        if key == "sizes":
            others["own_sizes"] = True
            if value != "own":
                raise UserError(f"--model {name}={spec}: sizes=own is for a named arch, whose widths it keeps")
        elif key == "without":
            others["without"] = tuple(part.strip().replace("-", "_") for part in value.split(","))
        elif key == "lr":
            others["rates"] = tuple(_rate(part, name, spec) for part in value.split(","))
        elif key not in OWN:
            words = [f"--{key.replace('_', '-')}"]
            if equals:
                words.append(value)
            others["options"] = (*others.get("options", ()), *words)
        elif not whole_number(value):
            raise UserError(f"--model {name}={spec}: {key}={value} is no whole number above 0")
        else:
            own[OWN[key]] = int(value)
    return what, own, others


def _rate(text: str, name: str, spec: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found <= 1:
        raise UserError(f"--model {name}={spec}: lr={text} is no number above 0, of at most 1")
    return found


def _ours(name: str, spec: str, direction: str, sizes: Mapping[str, Any]) -> ModelSpec:
    what, own, others = _split(name, spec)
    keeps = "own_sizes" in others
    part = "decoder"
    row = CAUSAL_ARCHITECTURES.get(what)
    if direction == ENCODER:
        part = "encoder"
        row = ARCHITECTURES.get(what)
    if "layers" in own:
        raise UserError(f"--model {name}={spec}: layers is for fairseq: and hf: alone; a pattern says how many it has")
    if keeps and row is None:
        raise UserError(f"--model {name}={spec}: sizes=own is for a named arch, whose widths it keeps")
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
            named = "\nnor is it a named arch; docs/patterns.md lists those"
        raise UserError(f"--model {name}={spec}: {error}{named}") from None
    if keeps:
        fields = zip(WIDTHS, ("embed_dim", "ffn_embed_dim", "attention_heads"), strict=True)
        own = {ours: getattr(row, f"{part}_{theirs}") for ours, theirs in fields} | own
    widths = {size: own.get(size, sizes[size]) for size in WIDTHS}
    return ModelSpec(name=name, what=named_by, pattern=pattern, arch=arch, **widths, **others)


def _elsewhere(name: str, spec: str, sizes: Mapping[str, Any], first: Optional[ModelSpec]) -> ModelSpec:
    whole, own, others = _split(name, spec)
    prefix, _, called = (part.strip() for part in whole.partition(":"))
    what, archs = EXTERNALS[prefix]
    if called not in archs or "own_sizes" in others:
        known = ", ".join(f"{prefix}:{arch}" for arch in archs)
        raise UserError(f"--model {name}={spec}: choose from {known}, with embed=, ffn=, heads= or layers= if you like")
    layers = own.pop("layers", None) or (first and max(1, layers_in(first.pattern)))
    if not layers:
        raise UserError(f"--model {name}={spec}: say how many layers, as in '{name}={whole}; layers=6'")
    widths = {size: own.get(size, sizes[size]) for size in WIDTHS}
    pattern = f"({archs[called]})x{layers}"
    return ModelSpec(name=name, what=what, pattern=pattern, arch=called, **widths, **others)
