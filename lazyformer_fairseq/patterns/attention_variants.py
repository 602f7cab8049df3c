"""The table of attention variants, which settings of an ``s`` choose: one row for each system.

An attention is a few choices, so rows of different choices combine:

| choice | if no row is chosen | |
|---|---|---|
| scores | QK^T / sqrt(D) | where numbers come from |
| mask | all, in causal models the past | which keys a query may look at |
| weights | softmax | how scores become a distribution |
| memory | the tokens | what keys and values are |
| vectors | as projected | what queries and keys are before they meet |
| positions | T5's bias, in causal models Transformer-XL's | how scores depend on places |

A row is switched on by its first setting. ``modules/sublayers/attention_variants`` has one file per row.
"""

import math
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional, Union

SCORES = "scores"
MASK = "mask"
WEIGHTS = "weights"
MEMORY = "memory"
VECTORS = "vectors"
POSITIONS = "positions"
CHOICES = (SCORES, MASK, WEIGHTS, MEMORY, VECTORS, POSITIONS)
Value = Union[int, float, str]
QUERIES = "queries"
KEYS = "keys"
LARGEST = 2**31 - 1  # of a number, so that sums of two fit a kernel's
Checks = Iterable[tuple[str, str]]  # (name of a setting, what is wrong)


@dataclass(frozen=True)
class Setting:
    """Setting in square brackets after a letter, as in ``s[window=256]``.

    Attributes:
        default: the value if it is left out; every value has its type, but for `choices` of a number. Where 0 or ""
            means that there is none, bounds and choices need not have it. False for what is there where its name is,
            without a value.
        unit: of a number, such as tokens.
        low, high: inclusive bounds of a number.
        choices: of a word; beside a number, words that may stand in its place.
        is_sum: several of the choices may stand together, as in ``dense+dot``.
    """

    name: str
    default: Value
    help: str
    unit: str = ""
    low: float = -math.inf
    high: float = math.inf
    choices: tuple[str, ...] = ()
    is_sum: bool = False

    def read(self, text: str) -> Value:
        """Parse a value.

        Raises:
            ValueError: the text is no valid value; the message gives the reason.
        """
        if isinstance(self.default, str) or text in self.choices:
            return self._word(text)
        type_ = type(self.default)
        try:
            value = type_(text)
        except ValueError:
            needed = " or ".join([f"a {'whole ' * (type_ is int)}number", *self.choices])
            raise ValueError(f"{self.name} needs {needed}, not {text!r}") from None
        if abs(value) > LARGEST or not self.low <= value <= self.high:  # as NaN is not either
            raise ValueError(f"{self.name} must be {self.bounds}, not {text[:20]}{'...' * (len(text) > 20)}")
        return value

    def _word(self, text: str) -> str:
        terms = [text]
        if self.is_sum:
            terms = [term.strip() for term in text.split("+")]
        if unknown := [term for term in terms if term not in self.choices]:
            some = "a sum of some" if self.is_sum else "one"
            raise ValueError(f"{self.name} is {some} of {', '.join(self.choices)}, not {unknown[0]!r}")
        if len(set(terms)) < len(terms):
            raise ValueError(f"{self.name} has one of its terms twice")
        return "+".join(sorted(terms, key=self.choices.index))

    @property
    def bounds(self) -> str:
        """The bounds of a number, in words."""
        if math.isfinite(self.low) and math.isfinite(self.high):
            return f"from {self.low:g} to {self.high:g}"
        if math.isfinite(self.low):
            return f"{self.low:g} or more"
        if math.isfinite(self.high):
            return f"{self.high:g} or less"
        return "a finite number"


CLASSES: dict[str, Any] = {}  # by place; filled by an exported model, whose modules have other names


def find_class(place: str) -> Any:
    """Return the class at a place, such as ``"package.module:Class"``, and import its module."""
    if place in CLASSES:
        return CLASSES[place]
    return pkgutil.resolve_name(place)


@dataclass(frozen=True)
class AttentionVariant:
    """Row of the table: an attention variant.

    Attributes:
        choice: one of CHOICES; rows of the same choice exclude each other.
        source: the paper's name of it, and the paper.
        module: ``"file:Class"`` in ``modules/sublayers/attention_variants``, an
            :class:`~lazyformer_fairseq.modules.sublayers.attention_variants.interface.VariantModule`.
        settings: the first one switches it on; the others mean nothing without it. Rows may share those.
        why_not_causal, why_not_encoder: why causal models, or encoders, cannot have it; empty if they can.
        why_keys_stay: all settings by name -> why a ``k`` cannot read its keys and values, or "".
        why_no_memory: all settings by name -> why a causal model with it can have no memory, or "".
        why_no_segments: why a causal model with it carries no memory from one segment to the next, though it may attend
            to one of the whole text; empty if it may.
        excludes: names of first settings of other rows, or choices, that it cannot stand with, with the reason.
        refuses: what a network may put into all scores and it cannot stand with, "bias" or "mask", with the reason and
            the remedy.
        projects: all settings by name -> which of :data:`QUERIES` and :data:`KEYS` the ``s`` projects.
        has_probabilities: whether its distribution is one over the tokens alone, as a search mixes them.
        has_own_scores: whether each ``s`` learns what it adds to scores, or how they become weights.
        check: (all settings by name, whether for a causal model or None) -> for each mistake the name of a setting, and
            what is wrong with it beside the others.
    """

    choice: str
    source: str
    module: str
    settings: tuple[Setting, ...]
    why_not_causal: str = ""
    why_not_encoder: str = ""
    why_no_memory: Callable[[Mapping[str, Value]], str] = lambda _: ""
    why_no_segments: str = ""
    excludes: Mapping[str, str] = field(default_factory=dict)
    refuses: Mapping[str, str] = field(default_factory=dict)
    projects: Callable[[Mapping[str, Value]], frozenset[str]] = lambda _: frozenset({QUERIES, KEYS})
    has_probabilities: bool = True
    has_own_scores: bool = False
    why_keys_stay: Callable[[Mapping[str, Value]], str] = lambda _: ""
    check: Callable[[Mapping[str, Value], Optional[bool]], Checks] = lambda *_: ()

    def __reduce__(self) -> tuple[Callable[[str], "AttentionVariant"], tuple[str]]:
        """Copy and pickle a row as its name."""
        return row_of_name, (self.name,)

    @property
    def name(self) -> str:
        """Name of the setting that switches it on."""
        return self.settings[0].name

    def load(self) -> Any:
        """Its class; imports torch."""
        return find_class(self.place)

    @property
    def place(self) -> str:
        """The place of its class; see :func:`find_class`."""
        return f"lazyformer_fairseq.modules.sublayers.attention_variants.{self.module}"


GIVEN = "given"  # global tokens that the caller marks
_DILATED_HEADS = Setting("dilated_heads", 2, "how many heads, the last ones, have gaps", "heads", low=1)


def _check_window(values: Mapping[str, Value], causal: Optional[bool]) -> Checks:
    if values["dilation"] == 1 and values["dilated_heads"] != _DILATED_HEADS.default:
        yield "dilated_heads", "dilated_heads needs gaps, as in s[window=...,dilation=2,dilated_heads=...]"
    if causal and values["global"] == GIVEN:
        yield "global", "global=given is for encoders: a causal model reads streams, of which nobody gives positions"
    for other, why in _NOT_WITH_GLOBAL.items():
        if values["global"] and values.get(other):
            yield "global", f"global cannot stand with {other}: {why}"


def _why_no_memory_before_global_tokens(values: Mapping[str, Value]) -> str:
    if values["global"]:
        return "global tokens are the first of their segment, and a memory stands before it"
    return ""


_NOT_WITH_GLOBAL = {
    "synthesizer": "the queries and keys of global tokens are compared, its scores are not",
    "persistent": "global tokens have keys and values of their own, and nothing says which of the vectors are theirs",
}
# What both patterns of the Sparse Transformer have.
_PART = Setting(
    "part",
    "both",
    "keys near the query, those that summarise all, or both",
    choices=("both", "local", "summary"),
)
_HEADS = Setting(
    "heads",
    "merged",
    "split: local for the first half of the heads, summary for the others",
    choices=("merged", "split"),
)


def _check_parts(values: Mapping[str, Value], _causal: Optional[bool] = None) -> Checks:
    if values["heads"] == "split" and values["part"] != "both":
        yield "heads", f"heads=split gives each part heads of its own, but part={values['part']} leaves one part"


def _check_fixed(values: Mapping[str, Any], _causal: Optional[bool]) -> Checks:
    if values["part"] == "local" and values["summary"] != _SUMMARY.default:
        yield "summary", "part=local sees no summaries"
    block = values["fixed"]
    summary = values["summary"]
    if values["part"] != "local" and summary > block and summary != _SUMMARY.default:
        yield "summary", f"a block of {block} has no last {summary} positions: give summary={block} or less"
    yield from _check_parts(values)


_SUMMARY = Setting("summary", 8, "positions at the end of each block that all queries see", "tokens", low=1)
_LENGTH = Setting("length", 512, "longest input of a causal model", "tokens", low=1)


def _check_synthesizer(values: Mapping[str, Any], causal: Optional[bool]) -> Checks:
    terms = values["synthesizer"].split("+")
    if terms == ["dot"]:
        yield "synthesizer", "dot alone is what an s computes without settings: leave it out, or add a term"
    if values["rank"] != 8 and "factorised_random" not in terms:
        yield "rank", "rank is of factorised_random, which synthesizer does not name"
    if causal is False and values["length"] != _LENGTH.default:
        yield "length", "length is for causal models; an encoder's longest input is its --max-positions"
    if "dot" not in terms and values.get("persistent"):
        yield "persistent", "persistent vectors are compared with queries: add dot to the synthesizer"
    if values.get("qk_norm") and "dot" not in terms:
        yield "qk_norm", "qk_norm is for queries that meet keys: take a synthesizer with dot"
    if values.get("rope") and ("dot" not in terms or {"dense", "factorised_dense"} & {*terms}):
        yield "rope", "rope turns queries and keys for their products: take a synthesizer with dot, and none of dense"


def _projected_beside_synthesizer(values: Mapping[str, Any]) -> frozenset[str]:
    terms = set(values["synthesizer"].split("+"))
    if "dot" in terms:
        return frozenset({QUERIES, KEYS})
    if terms & {"dense", "factorised_dense"}:
        return frozenset({QUERIES})
    return frozenset()


def _check_buckets(values: Mapping[str, Value], _causal: Optional[bool]) -> Checks:
    if values["buckets"] % 2:
        yield "buckets", f"buckets must be even, as half of them are opposites, not {values['buckets']}"


ATTENTION_VARIANTS: tuple[AttentionVariant, ...] = (
    AttentionVariant(
        choice=MASK,
        source="Longformer: Beltagy et al., 2020, section 3.1",
        module="global_tokens:WindowWithGlobalTokens",
        settings=(
            Setting("window", 0, "keys to either side; in causal models to the left", "tokens", low=1),
            Setting("dilation", 1, "from each key of the window to the next; 1 for no gaps", "tokens", low=1),
            _DILATED_HEADS,
            Setting(
                "global",
                0,
                "first tokens that see and are seen by all, with projections of their own; given: those that the "
                "caller marks",
                "tokens",
                low=1,
                choices=(GIVEN,),
            ),
        ),
        why_no_memory=_why_no_memory_before_global_tokens,
        why_keys_stay=lambda values: "its global tokens have keys and values of their own" if values["global"] else "",
        check=_check_window,
    ),
    AttentionVariant(
        choice=MASK,
        source="Sparse Transformer, strided: Child et al., 2019, section 4.3",
        module="sparse:Strided",
        settings=(
            Setting(
                "strided",
                0,
                "keys to either side, and the step from each further key to the next",
                "tokens",
                low=1,
            ),
            _PART,
            _HEADS,
        ),
        check=_check_parts,
    ),
    AttentionVariant(
        choice=MASK,
        source="Sparse Transformer, fixed: Child et al., 2019, section 4.3",
        module="sparse:Fixed",
        settings=(Setting("fixed", 0, "positions of a block", "tokens", low=1), _SUMMARY, _PART, _HEADS),
        refuses={"mask": "blocks and their summaries are seen however far back they are: leave --same-length out"},
        check=_check_fixed,
    ),
    AttentionVariant(
        choice=MEMORY,
        source="Linformer: Wang et al., 2020, section 4",
        module="linformer:Linformer",
        settings=(
            Setting("linformer", 0, "keys and values that all positions are projected to", "positions", low=1),
            Setting(
                "share",
                "heads",
                "projections that are one: none; those of all heads; of keys and values too; of all layers too",
                choices=("none", "heads", "kv", "layers"),
            ),
        ),
        why_not_causal="each of its keys mixes all positions, those in the future too",
        excludes=dict.fromkeys(
            (SCORES, MASK, POSITIONS),
            "its keys mix all positions, so none has a place of its own among the tokens",
        ),
        refuses={
            "bias": "its keys mix all positions and have no distance to a query, which T5's bias needs; "
            "give --relative-position-buckets 0"
        },
    ),
    AttentionVariant(
        choice=SCORES,
        source="Synthesizer: Tay et al., 2020, section 3",
        module="synthesizer:Synthesizer",
        settings=(
            Setting(
                "synthesizer",
                "",
                "a sum of what makes scores; several are mixed by learned weights",
                choices=("dense", "random", "fixed", "factorised_dense", "factorised_random", "dot"),
                is_sum=True,
            ),
            Setting("rank", 8, "columns of the two factors of factorised_random", "columns", low=1),
            _LENGTH,
        ),
        why_no_memory=lambda _: "a synthesizer has scores for the positions of one segment alone",
        why_keys_stay=lambda _: "its scores are made for its own input, and a k has others",
        projects=_projected_beside_synthesizer,
        has_own_scores=True,
        excludes={"buckets": "hashing needs queries that are keys"},
        check=_check_synthesizer,
    ),
    AttentionVariant(
        choice=MASK,
        source="adaptive span: Sukhbaatar et al., 2019a, section 2.2",
        module="span:Span",
        settings=(
            Setting("span", 0, "the longest that a head may learn, its own position included", "tokens", low=1),
            Setting("ramp", 32, "over which a head's weights fall from 1 to 0", "tokens", low=1),
            Setting("span_loss", 2e-6, "loss, a predicted token, of each token of the mean span", "nats", low=0),
        ),
        has_own_scores=True,
    ),
    AttentionVariant(
        choice=MEMORY,
        source="all-attention: Sukhbaatar et al., 2019b, section 4",
        module="persistent:Persistent",
        settings=(Setting("persistent", 0, "learned keys and values of each head", "vectors", low=1),),
        has_probabilities=False,
    ),
    AttentionVariant(
        choice=WEIGHTS,
        source="adaptively sparse: Correia et al., 2019, section 3",
        module="entmax:Entmax",
        settings=(
            Setting(
                "entmax",
                0.0,
                "from 1.01 (near softmax) to 2 (sparsemax); learned: one for each head",
                "alpha",
                low=1.01,
                high=2,
                choices=("learned",),
            ),
        ),
        has_own_scores=True,
    ),
    AttentionVariant(
        choice=MASK,
        source="Reformer: Kitaev et al., 2020, section 2",
        module="reformer:Reformer",
        settings=(
            Setting("buckets", 0, "different hashes, an even number: half are opposites", "buckets", low=2),
            Setting("rounds", 1, "of hashing; a query sees what any of them shows it", "rounds", low=1),
            Setting("chunk", 64, "of the sorted positions; a query meets its own and its neighbours", "tokens", low=1),
        ),
        why_not_causal="its chunks are cut from a sort of all positions, those in the future too",
        excludes={
            "synthesizer": "it hashes queries and keys, and compares those that hash alike",
            "linformer": "it hashes the keys of tokens",
            "persistent": "vectors are no tokens, and so have no hash",
            "entmax": "rounds are joined as parts of one softmax",
            "qk_norm": "its queries are its keys, which it scales to one length itself",
        },
        refuses={
            "bias": "it finds keys by what they contain, wherever they are, and T5's bias would come too late: "
            "give --relative-position-buckets 0"
        },
        why_keys_stay=lambda _: "they are its queries too",
        projects=lambda _: frozenset({KEYS}),
        has_probabilities=False,
        check=_check_buckets,
    ),
    AttentionVariant(
        choice=VECTORS,
        source="ViT-22B: Dehghani et al., 2023, section 2",
        module="qk_norm:QKNorm",
        settings=(Setting("qk_norm", False, "RMSNorm of each head's queries and keys, with learned gains"),),
    ),
    AttentionVariant(
        choice=POSITIONS,
        source="RoFormer: Su et al., 2021, section 3.2",
        module="rope:Rope",
        settings=(Setting("rope", 0, "of rotary positions; 10000 is usual", "base", low=2),),
    ),
    AttentionVariant(
        choice=POSITIONS,
        source="GPT: Radford et al., 2018, section 4.1",
        module="absolute:Absolute",
        settings=(
            Setting("positions", "", "absolute: learned, of `length` places, at the embedding", choices=("absolute",)),
            _LENGTH,
        ),
        why_not_encoder="an encoder has learned positions already, unless --no-token-positional-embeddings",
        why_no_segments="absolute positions count from where a text starts",
    ),
)

SETTINGS = tuple(dict.fromkeys(setting for row in ATTENTION_VARIANTS for setting in row.settings))


def row_of_name(name: str) -> AttentionVariant:
    """Return the row that the setting `name` switches on."""
    return next(row for row in ATTENTION_VARIANTS if row.name == name)


def chosen_variants(values: Mapping[str, Value]) -> list[AttentionVariant]:
    """Return the rows that these settings of an ``s`` switch on, in the table's order."""
    return [row for row in ATTENTION_VARIANTS if values.get(row.name)]


def with_defaults(given: tuple[tuple[str, Value], ...]) -> dict[str, Value]:
    """Return all settings by name, from those that differ from the default."""
    return {setting.name: setting.default for setting in SETTINGS} | dict(given)


def check(values: Mapping[str, Value], causal: Optional[bool] = None) -> Optional[tuple[str, str]]:
    """Return (name of a setting, why) if the settings of an ``s`` conflict, else None.

    Args:
        values: defaults included.
        causal: for causal models, for encoders, or None for either.
    """
    chosen = chosen_variants(values)
    for setting in SETTINGS:
        needed = [row for row in ATTENTION_VARIANTS if setting in row.settings]
        if values[setting.name] != setting.default and not any(row in chosen for row in needed):
            names = " or ".join(row.name for row in needed)
            return setting.name, f"{setting.name} needs {names}, as in s[{needed[0].name}=...,{setting.name}=...]"
    return next(_conflicts(chosen, values, causal), None)


def _conflicts(
    chosen: Sequence[AttentionVariant],
    values: Mapping[str, Value],
    causal: Optional[bool],
) -> Iterator[tuple[str, str]]:
    for number, row in enumerate(chosen):
        if causal and row.why_not_causal:
            yield row.name, f"{row.name} is not for causal models: {row.why_not_causal}"
        if causal is False and row.why_not_encoder:
            yield row.name, f"{row.name} is not for encoders: {row.why_not_encoder}"
        for other in chosen:
            why = row.excludes.get(other.name) or row.excludes.get(other.choice)
            if why and other is not row:
                yield other.name, f"{other.name} cannot stand with {row.name}: {why}"
        for other in chosen[:number]:
            if other.choice == row.choice:
                yield row.name, f"{other.name} and {row.name} are both a choice of {row.choice}: take one of them"
        yield from row.check(values, causal)


def why_keys_stay(values: Mapping[str, Value]) -> str:
    """Return why a ``k`` cannot read keys and values of an ``s`` with these settings; "" if it can."""
    for row in chosen_variants(values):
        if why := row.why_keys_stay(values):
            return f"{row.name} keeps its keys and values for itself: {why}"
    return ""


def why_no_memory(values: Mapping[str, Value]) -> str:
    """Return why a causal model's ``s`` with these settings can attend to no memory; "" if it can."""
    return next(filter(None, (row.why_no_memory(values) for row in chosen_variants(values))), "")


def projected(values: Mapping[str, Value]) -> frozenset[str]:
    """Return which of :data:`QUERIES` and :data:`KEYS` an ``s`` of these settings projects."""
    return frozenset({QUERIES, KEYS}).intersection(*(row.projects(values) for row in chosen_variants(values)))


def has_positions(values: Mapping[str, Value]) -> bool:
    """Return whether the scores of an ``s`` of these settings depend on places by themselves."""
    return any(row.choice == POSITIONS for row in chosen_variants(values))
