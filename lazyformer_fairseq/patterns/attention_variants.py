"""The table of attention variants, which are selected by the settings of an ``s``.

Attention involves six design choices. Each row of the table makes one of them, so rows that make different choices can
be combined:

| choice | default | determines |
|---|---|---|
| scores | QK^T / sqrt(D) | how scores are computed |
| mask | all keys, in causal models the past | which keys a query sees |
| weights | softmax | how scores become a distribution |
| memory | the tokens | what keys and values are computed from |
| vectors | the projections | what happens to queries and keys before their matmul |
| positions | T5's bias, in causal models Transformer-XL's | how scores depend on positions |

A row's first setting enables its variant. ``modules/sublayers/attention_variants`` contains the modules of the rows.
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
LARGEST = 2**31 - 1  # the largest value of a setting; kernels can add two of them without overflow
Checks = Iterable[tuple[str, str]]  # (name of a setting, why it is invalid)


@dataclass(frozen=True)
class Setting:
    """A setting in square brackets after a letter, as in ``s[window=256]``.

    Attributes:
        name: The setting's name in patterns.
        default: The value if the setting is omitted. All values have the default's type, except words from `choices`
            that replace a number. The defaults 0 and "" may mean "off" even if they are outside the bounds or the
            choices. A default of False makes the setting a switch, which is written without a value.
        help: A one-line description.
        unit: The unit of a number, such as tokens.
        low, high: The inclusive bounds of a number.
        choices: The words that the setting accepts; if its values are numbers, it accepts these words in addition.
        is_sum: Whether several choices can be summed, as in ``dense+dot``.
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
            ValueError: If the text is not a valid value; the message states the reason.
        """
        if isinstance(self.default, str) or text in self.choices:
            return self._word(text)
        type_ = type(self.default)
        try:
            value = type_(text)
        except ValueError:
            number = "a whole number" if type_ is int else "a number"
            needed = " or ".join([number, *self.choices])
            raise ValueError(f"{self.name} needs {needed}, not {text!r}") from None
        if abs(value) > LARGEST or not self.low <= value <= self.high:  # also true for NaN
            shown = f"{text[:20]}..." if len(text) > 20 else text
            raise ValueError(f"{self.name} must be {self.bounds}, not {shown}")
        return value

    def _word(self, text: str) -> str:
        terms = [text]
        if self.is_sum:
            terms = [term.strip() for term in text.split("+")]
        if unknown := [term for term in terms if term not in self.choices]:
            some = "a sum of some" if self.is_sum else "one"
            raise ValueError(f"{self.name} must be {some} of {', '.join(self.choices)}, not {unknown[0]!r}")
        if len(set(terms)) < len(terms):
            raise ValueError(f"{self.name} contains a duplicate term")
        return "+".join(sorted(terms, key=self.choices.index))

    @property
    def bounds(self) -> str:
        """A description of a number's bounds."""
        if math.isfinite(self.low) and math.isfinite(self.high):
            return f"from {self.low:g} to {self.high:g}"
        if math.isfinite(self.low):
            return f"{self.low:g} or more"
        if math.isfinite(self.high):
            return f"{self.high:g} or less"
        return "a finite number"


CLASSES: dict[str, Any] = {}  # classes by location; filled by exported models, where modules have different names


def find_class(place: str) -> Any:
    """Import and return the class at a location such as ``"package.module:Class"``."""
    if place in CLASSES:
        return CLASSES[place]
    return pkgutil.resolve_name(place)


@dataclass(frozen=True)
class AttentionVariant:
    """An attention variant, that is, one row of the table.

    Attributes that are functions take the values of all settings by name, including defaults.

    Attributes:
        choice: The design choice that the variant makes, one of CHOICES. Rows that make the same choice are mutually
            exclusive.
        source: The variant's name in its paper, and the paper.
        module: The variant's class, as ``"file:Class"`` in ``modules/sublayers/attention_variants``. It must be a
            :class:`~lazyformer_fairseq.modules.sublayers.attention_variants.interface.VariantModule`.
        settings: The variant's settings. The first one enables the variant, and the others are only valid with it.
            Several rows may share settings other than their first.
        why_not_causal, why_not_encoder: The reason why causal models or encoders do not support the variant; empty if
            they do.
        why_no_memory: A function that returns why a causal model with this variant cannot have a memory, or "".
        why_no_segments: The reason why a causal model with this variant, although it can remember a text from the
            beginning, cannot carry its memory from one segment to the next; empty if there is no such reason.
        excludes: The reasons why the variant cannot be combined with others, keyed by the other row's first setting or
            its choice.
        refuses: The reasons why the variant does not support terms that a network adds to all scores, keyed by the term
            ("bias" or "mask"). Each reason includes a remedy.
        projects: A function that returns which of :data:`QUERIES` and :data:`KEYS` the ``s`` projects.
        has_probabilities: Whether the attention weights are a distribution over the tokens only. A search can mix the
            distributions of candidates only if this is true for all of them.
        has_own_scores: Whether each ``s`` has learned weights of its own that are added to its scores or determine how
            scores become weights.
        why_keys_not_shared: A function that returns why a ``k`` cannot read the keys and values of the ``s``, or "".
        check: A function that takes the settings' values and whether the model is causal (None if unknown). For each
            conflict among the settings, it returns the name of a setting and the reason.
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
    why_keys_not_shared: Callable[[Mapping[str, Value]], str] = lambda _: ""
    check: Callable[[Mapping[str, Value], Optional[bool]], Checks] = lambda *_: ()

    def __reduce__(self) -> tuple[Callable[[str], "AttentionVariant"], tuple[str]]:
        """Copy and pickle the row by its name."""
        return row_of_name, (self.name,)

    @property
    def name(self) -> str:
        """The name of the setting that enables the variant."""
        return self.settings[0].name

    def load(self) -> Any:
        """Import and return the variant's class. This imports torch."""
        return find_class(self.place)

    @property
    def place(self) -> str:
        """The location of the variant's class, for :func:`find_class`."""
        return f"lazyformer_fairseq.modules.sublayers.attention_variants.{self.module}"


GIVEN = "given"  # the caller marks the global tokens
_DILATED_HEADS = Setting(
    "dilated_heads", 2, "number of heads with dilation, counted from the last head", "heads", low=1
)


def _check_window(values: Mapping[str, Value], causal: Optional[bool]) -> Checks:
    if values["dilation"] == 1 and values["dilated_heads"] != _DILATED_HEADS.default:
        yield "dilated_heads", "dilated_heads needs a dilation, as in s[window=...,dilation=2,dilated_heads=...]"
    if causal and values["global"] == GIVEN:
        yield "global", "global=given is for encoders: causal models read text streams, which have no marked tokens"
    for other, why in _NOT_WITH_GLOBAL.items():
        if values["global"] and values.get(other):
            yield "global", f"global cannot be combined with {other}: {why}"


def _why_no_memory_before_global_tokens(values: Mapping[str, Value]) -> str:
    if values["global"]:
        return "global tokens are the first tokens of a segment, but a memory would precede them"
    return ""


_NOT_WITH_GLOBAL = {
    "synthesizer": "the scores of global tokens are computed from queries and keys, not by a synthesizer",
    "persistent": "global tokens have separate keys and values, so it is undefined which persistent vectors they see",
}
# Settings shared by both patterns of the Sparse Transformer.
_PART = Setting(
    "part",
    "both",
    "keys that a query sees: nearby keys (local), keys that summarize the text (summary), or both",
    choices=("both", "local", "summary"),
)
_HEADS = Setting(
    "heads",
    "merged",
    "merged: each head sees both parts; split: the first half of the heads sees local keys, the others summary keys",
    choices=("merged", "split"),
)


def _check_parts(values: Mapping[str, Value], _causal: Optional[bool] = None) -> Checks:
    if values["heads"] == "split" and values["part"] != "both":
        yield "heads", f"heads=split gives each part its own heads, but part={values['part']} leaves only one part"


def _check_fixed(values: Mapping[str, Any], _causal: Optional[bool]) -> Checks:
    if values["part"] == "local" and values["summary"] != _SUMMARY.default:
        yield "summary", "summary has no effect, because part=local sees no summaries"
    block = values["fixed"]
    summary = values["summary"]
    if values["part"] != "local" and summary > block and summary != _SUMMARY.default:
        yield "summary", f"summary={summary} is longer than the block of {block} positions: use summary={block} or less"
    yield from _check_parts(values)


_SUMMARY = Setting("summary", 8, "number of positions at the end of each block; all queries see them", "tokens", low=1)
_LENGTH = Setting("length", 512, "maximum input length of a causal model", "tokens", low=1)


def _check_synthesizer(values: Mapping[str, Any], causal: Optional[bool]) -> Checks:
    terms = values["synthesizer"].split("+")
    if terms == ["dot"]:
        yield "synthesizer", "dot alone is the default of an s: remove the setting, or add a term"
    if values["rank"] != 8 and "factorised_random" not in terms:
        yield "rank", "rank applies only to factorised_random, which this synthesizer does not contain"
    if causal is False and values["length"] != _LENGTH.default:
        yield "length", "length is for causal models; --max-positions sets the maximum input length of an encoder"
    if "dot" not in terms and values.get("persistent"):
        yield "persistent", "persistent vectors are compared with queries: add dot to the synthesizer"
    if values.get("qk_norm") and "dot" not in terms:
        yield "qk_norm", "qk_norm applies to dot products of queries and keys: use a synthesizer with dot"
    has_dense = "dense" in terms or "factorised_dense" in terms
    if values.get("rope") and ("dot" not in terms or has_dense):
        yield "rope", "rope applies to dot products of queries and keys: use a synthesizer with dot and no dense term"


def _projected_beside_synthesizer(values: Mapping[str, Any]) -> frozenset[str]:
    terms = set(values["synthesizer"].split("+"))
    if "dot" in terms:
        return frozenset({QUERIES, KEYS})
    if terms & {"dense", "factorised_dense"}:
        return frozenset({QUERIES})
    return frozenset()


def _check_buckets(values: Mapping[str, Value], _causal: Optional[bool]) -> Checks:
    if values["buckets"] % 2:
        yield "buckets", f"buckets must be even, not {values['buckets']}: half of them are the negatives of the others"


ATTENTION_VARIANTS: tuple[AttentionVariant, ...] = (
    AttentionVariant(
        choice=MASK,
        source="Longformer: Beltagy et al., 2020, section 3.1",
        module="global_tokens:WindowWithGlobalTokens",
        settings=(
            Setting(
                "window",
                0,
                "number of keys visible on each side of a query; in causal models, only on the left",
                "tokens",
                low=1,
            ),
            Setting("dilation", 1, "distance between the keys in the window; 1 for no gaps", "tokens", low=1),
            _DILATED_HEADS,
            Setting(
                "global",
                0,
                "number of initial tokens that see all tokens, are seen by all tokens and have separate projections; "
                "given: the caller marks these tokens",
                "tokens",
                low=1,
                choices=(GIVEN,),
            ),
        ),
        why_no_memory=_why_no_memory_before_global_tokens,
        why_keys_not_shared=lambda values: (
            "its global tokens have separate keys and values" if values["global"] else ""
        ),
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
                "number of keys visible on each side of a query, and the distance between visible keys further away",
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
        settings=(Setting("fixed", 0, "block length", "tokens", low=1), _SUMMARY, _PART, _HEADS),
        refuses={"mask": "queries see blocks and summaries at any distance: omit --same-length"},
        check=_check_fixed,
    ),
    AttentionVariant(
        choice=MEMORY,
        source="Linformer: Wang et al., 2020, section 4",
        module="linformer:Linformer",
        settings=(
            Setting("linformer", 0, "length to which keys and values are projected", "positions", low=1),
            Setting(
                "share",
                "heads",
                "none: each head has its own projections; heads: all heads share them; kv: keys and values also share "
                "them; layers: all layers also share them",
                choices=("none", "heads", "kv", "layers"),
            ),
        ),
        why_not_causal="each of its keys mixes all positions, including future positions",
        excludes=dict.fromkeys(
            (SCORES, MASK, POSITIONS),
            "each of its keys mixes all positions, so no key has a position",
        ),
        refuses={
            "bias": "each of its keys mixes all positions, so the distances for T5's bias are undefined: use "
            "--relative-position-buckets 0"
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
                "score functions, joined by + and mixed with learned weights",
                choices=("dense", "random", "fixed", "factorised_dense", "factorised_random", "dot"),
                is_sum=True,
            ),
            Setting("rank", 8, "number of columns in the two factors of factorised_random", "columns", low=1),
            _LENGTH,
        ),
        why_no_memory=lambda _: "a synthesizer has scores only for the positions of one segment",
        why_keys_not_shared=lambda _: "its scores are computed for its own input, but a k has a different input",
        projects=_projected_beside_synthesizer,
        has_own_scores=True,
        excludes={"buckets": "hashing requires the queries and the keys to be the same vectors"},
        check=_check_synthesizer,
    ),
    AttentionVariant(
        choice=MASK,
        source="adaptive span: Sukhbaatar et al., 2019a, section 2.2",
        module="span:Span",
        settings=(
            Setting("span", 0, "maximum span that a head can learn, including the query's position", "tokens", low=1),
            Setting("ramp", 32, "distance over which a head's weights ramp down from 1 to 0", "tokens", low=1),
            Setting(
                "span_loss",
                2e-6,
                "span penalty: the loss of each predicted token increases by this value times the mean span",
                "nats",
                low=0,
            ),
        ),
        has_own_scores=True,
    ),
    AttentionVariant(
        choice=MEMORY,
        source="all-attention: Sukhbaatar et al., 2019b, section 4",
        module="persistent:Persistent",
        settings=(Setting("persistent", 0, "number of learned keys and values per head", "vectors", low=1),),
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
                "alpha, from 1.01 (close to softmax) to 2 (sparsemax); learned: each head learns its own alpha",
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
            Setting(
                "buckets",
                0,
                "number of hash buckets; they come in pairs, one for a random direction and one for its negative",
                "buckets",
                low=2,
            ),
            Setting("rounds", 1, "number of hashing rounds; a query sees the keys found in any round", "rounds", low=1),
            Setting(
                "chunk",
                64,
                "size of the chunks into which the sorted positions are divided; a query sees its own chunk and the "
                "neighboring chunks",
                "tokens",
                low=1,
            ),
        ),
        why_not_causal="its chunks come from sorting all positions, including future positions",
        excludes={
            "synthesizer": "buckets hashes queries and keys, and computes scores only between equal hashes",
            "linformer": "buckets hashes the keys of individual tokens",
            "persistent": "persistent vectors are not tokens, so they have no hash",
            "entmax": "the hashing rounds are combined as parts of a single softmax",
            "qk_norm": "with buckets, the queries are also the keys, which are already normalized",
        },
        refuses={
            "bias": "it finds keys by their content, regardless of distance, before T5's bias has an effect: use "
            "--relative-position-buckets 0"
        },
        why_keys_not_shared=lambda _: "its keys are also its queries",
        projects=lambda _: frozenset({KEYS}),
        has_probabilities=False,
        check=_check_buckets,
    ),
    AttentionVariant(
        choice=VECTORS,
        source="ViT-22B: Dehghani et al., 2023, section 2",
        module="qk_norm:QKNorm",
        settings=(Setting("qk_norm", False, "RMSNorm on each head's queries and keys, with learned gains"),),
    ),
    AttentionVariant(
        choice=POSITIONS,
        source="RoFormer: Su et al., 2021, section 3.2",
        module="rope:Rope",
        settings=(Setting("rope", 0, "base of the rotary position embeddings, usually 10000", "base", low=2),),
    ),
    AttentionVariant(
        choice=POSITIONS,
        source="GPT: Radford et al., 2018, section 4.1",
        module="absolute:Absolute",
        settings=(
            Setting(
                "positions", "", "absolute: a learned embedding for each of `length` positions", choices=("absolute",)
            ),
            _LENGTH,
        ),
        why_not_encoder="an encoder already has learned positions, unless --no-token-positional-embeddings is set",
        why_no_segments="absolute positions are counted from the beginning of a text",
    ),
)

SETTINGS = tuple(dict.fromkeys(setting for row in ATTENTION_VARIANTS for setting in row.settings))


def row_of_name(name: str) -> AttentionVariant:
    """Return the row enabled by the setting `name`."""
    return next(row for row in ATTENTION_VARIANTS if row.name == name)


def chosen_variants(values: Mapping[str, Value]) -> list[AttentionVariant]:
    """Return the rows enabled by these settings of an ``s``, in table order."""
    return [row for row in ATTENTION_VARIANTS if values.get(row.name)]


def with_defaults(given: tuple[tuple[str, Value], ...]) -> dict[str, Value]:
    """Return the values of all settings by name, with defaults for settings that are not in `given`."""
    return {setting.name: setting.default for setting in SETTINGS} | dict(given)


def check(values: Mapping[str, Value], causal: Optional[bool] = None) -> Optional[tuple[str, str]]:
    """Check the settings of an ``s``; return the name of an invalid setting and the reason, or None.

    Args:
        values: The values of all settings by name, including defaults.
        causal: Whether the model is causal. None limits the check to conflicts that apply to both encoders and causal
            models.
    """
    chosen = chosen_variants(values)
    for setting in SETTINGS:
        needed = [row for row in ATTENTION_VARIANTS if setting in row.settings]
        is_set = values[setting.name] != setting.default
        if is_set and not any(row in chosen for row in needed):
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
                yield other.name, f"{other.name} cannot be combined with {row.name}: {why}"
        for other in chosen[:number]:
            if other.choice == row.choice:
                yield row.name, f"{other.name} and {row.name} both determine the {row.choice}: use only one of them"
        yield from row.check(values, causal)


def why_keys_not_shared(values: Mapping[str, Value]) -> str:
    """Return why a ``k`` cannot use the keys and values of an ``s`` with these settings, or "" if it can."""
    for row in chosen_variants(values):
        if why := row.why_keys_not_shared(values):
            return f"{row.name} does not share its keys and values: {why}"
    return ""


def why_no_memory(values: Mapping[str, Value]) -> str:
    """Return why an ``s`` with these settings cannot attend to a causal model's memory, or "" if it can."""
    for row in chosen_variants(values):
        if why := row.why_no_memory(values):
            return why
    return ""


def projected(values: Mapping[str, Value]) -> frozenset[str]:
    """Return which of :data:`QUERIES` and :data:`KEYS` an ``s`` with these settings projects."""
    by_variant = [row.projects(values) for row in chosen_variants(values)]
    return frozenset({QUERIES, KEYS}).intersection(*by_variant)


def has_positions(values: Mapping[str, Value]) -> bool:
    """Return whether the scores of an ``s`` with these settings depend on positions."""
    return any(row.choice == POSITIONS for row in chosen_variants(values))
