"""The table of sublayer types, or kinds: one row for each letter of the pattern language.

A kind is a row here and a file in ``modules/sublayers``. Parser, networks, formulas, price lists, searches, reports and
help texts read the row; the file holds the module and, next to the code they count, the formulas.
Packages of others add theirs: the modules that their entry points of the group :data:`ENTRY_POINTS` name, or that the
variable :data:`VARIABLE` does, call :func:`register`, and are imported when the table is first asked.
``docs/add_a_kind.md`` walks through a new one.
"""

import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from itertools import pairwise
from typing import Any, ClassVar, Optional, Union

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.patterns import attention_variants
from lazyformer_fairseq.patterns.attention_variants import Setting, Value, find_class

# Directions: encoders see the whole input, causal language models see only the past.
ENCODER = "encoder"
CAUSAL = "causal"
# What a sublayer can hand on to those above.
DISTRIBUTION = "distribution"
# The keys and values that it attends to, and all that shapes its scores but the queries.
KEYS_AND_VALUES = "keys and values"
# Forms of a convolution's filters.
DEPTHWISE = "depthwise"
LIGHTWEIGHT = "lightweight"
# Cells of a recurrence.
BRC = "brc"
NBRC = "nbrc"
MINGRU = "mingru"
# Norms, of all sublayers of a network.
LAYER, RMS = NORMS = "layer", "rms"

ENTRY_POINTS = "lazyformer_fairseq.kinds"
VARIABLE = "LAZYFORMER_KINDS"

_RESERVED = "Mx()[],="


@dataclass(frozen=True, eq=False)
class Kind:
    """Row of the table: a sublayer type.

    Attributes:
        letter: in patterns.
        name: in tables, pictures and lists of candidates.
        help: what it computes, one line.
        source: where it comes from.
        modules: by direction, the class that computes it (a :class:`~lazyformer_fairseq.modules.sublayers.interface
            .Sublayer`) as ``"package.module:Class"``, or the class itself. Models of a missing direction refuse it.
        settings: what may stand in brackets.
        check: (all values by name, whether for a causal model or None) -> (name of a setting, what is wrong with it
            beside the others), or None.
        hands_on: what sublayers above may read, such as DISTRIBUTION.
        reads: what it takes from the nearest sublayer below that hands it on.
        check_producer: settings of the sublayer that it reads from -> why it cannot, or "".
        is_identity: whether it passes its input on unchanged; a found pattern leaves it out.
    """

    letter: str
    name: str
    help: str
    source: str
    modules: Mapping[str, Union[str, type]]
    settings: tuple[Setting, ...] = ()
    check: Optional[Callable[[Mapping[str, Value], Optional[bool]], Optional[tuple[str, str]]]] = None
    hands_on: tuple[str, ...] = ()
    reads: Optional[str] = None
    check_producer: Callable[[Mapping[str, Value]], str] = lambda _: ""
    is_identity: bool = False

    def __reduce__(self) -> tuple[Callable[[str], "Kind"], tuple[str]]:
        """Copy and pickle a row as its letter: a plan in another process, or a copy of one, has the table's own row."""
        return row_of_letter, (self.letter,)

    def setting(self, name: str) -> Optional[Setting]:
        """Return the setting of this name; None if there is none."""
        return next((setting for setting in self.settings if setting.name == name), None)

    @property
    def computes_scores(self) -> bool:
        """True if it computes scores of queries and keys, by a back end."""
        return DISTRIBUTION in self.hands_on or self.reads == KEYS_AND_VALUES

    @property
    def kept_for_consumers(self) -> tuple[str, ...]:
        """Outputs kept for consumers alone. Keys and values are there in any case."""
        return tuple(what for what in self.hands_on if what != KEYS_AND_VALUES)

    def module(self, direction: str) -> Any:
        """Return the class for a direction, which imports torch.

        Raises:
            UserError: somebody's package does not have it.
        """
        module = self.modules[direction]
        try:
            if isinstance(module, str):
                return find_class(module)
            return module
        except (ImportError, AttributeError, ValueError) as error:
            if str(module).startswith(_SUBLAYERS):
                raise
            raise UserError(f"{self.name} ({self.letter}): its class {module}: {_one_line(error)}") from error


_SUBLAYERS = "lazyformer_fairseq.modules.sublayers"


def _modules(encoder: str, causal: Optional[str] = None) -> dict[str, str]:
    """Return a row's classes by direction; one for both unless two are given."""
    return {ENCODER: f"{_SUBLAYERS}.{encoder}", CAUSAL: f"{_SUBLAYERS}.{causal or encoder}"}


_TABLE: dict[str, Kind] = {}


def register(kind: Kind) -> Kind:
    """Add a row to the table.

    Raises:
        ValueError: its letter is taken or means something else in a pattern, or its name is taken.
    """
    if len(kind.letter) != 1 or kind.letter in _RESERVED or kind.letter.isspace() or kind.letter.isdigit():
        raise ValueError(f"a kind's letter cannot be {kind.letter!r}")
    for other in _TABLE.values():
        if kind.letter == other.letter or kind.name == other.name:
            raise ValueError(f"{kind.letter} ({kind.name}): there is {other.letter} ({other.name}) already")
    _TABLE[kind.letter] = kind
    return kind


_mistakes: Optional[list[UserError]] = None  # in packages of others; None: they have not been imported yet


def kinds() -> tuple[Kind, ...]:
    """Return all rows, in the table's order, those of other packages last; tables and pictures use the same order.

    Raises:
        UserError: a package of others cannot be imported, or its row is refused; names the entry point or variable.
    """
    for mistake in _import_others():
        raise mistake
    return tuple(_TABLE.values())


def _import_others() -> list[UserError]:
    global _mistakes  # noqa: PLW0603 - imported once per process
    if _mistakes is None:
        _mistakes = []  # what is imported here may ask
        modules = filter(None, map(str.strip, os.environ.get(VARIABLE, "").split(",")))
        places = {f"{VARIABLE}={module}": module for module in modules}
        for point in metadata.entry_points(group=ENTRY_POINTS):
            package = point.dist.name if point.dist else "an unknown package"
            places[f"entry point {point.name} = {point.value} of {package}"] = point.module
        _mistakes += filter(None, (_import_kinds(place, module) for place, module in places.items()))
    return _mistakes


def _import_kinds(place: str, module: str) -> Optional[UserError]:
    rows = len(_TABLE)
    is_new = module not in sys.modules
    try:
        importlib.import_module(module)
    except Exception as error:
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]
        if is_missing:
            remedy = "; install it, or put the folder that holds it on PYTHONPATH"
        else:
            remedy = ""
        return UserError(f"{place}: {_one_line(error)}{remedy}")
    if is_new and len(_TABLE) == rows:
        return UserError(f"{place}: {module} registers no kind; docs/add_a_kind.md has an example")
    return None


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def find_kind(text: str) -> Optional[Kind]:
    """Return the row with this letter or name; None if there is none."""
    return next((kind for kind in kinds() if text in (kind.letter, kind.name)), None)


def row_of_letter(letter: str) -> Kind:
    """Return the row of a letter that a pickled model names.

    Raises:
        UserError: there is none; the package that registers it is not installed here.
    """
    kind = find_kind(letter)
    if kind is None:
        raise UserError(
            f"the model has sublayers {letter!r}, a kind that is not registered here: install the package that has it, "
            f"or name its module in {VARIABLE}"
        )
    return kind


def describe_letters() -> str:
    """Return all letters with their names, for help and messages: ``s (self-attention) or l (lazy attention)``."""
    _import_others()  # help is there whatever is wrong with them
    *most, last = [f"{kind.letter} ({kind.name})" for kind in _TABLE.values()]
    return f"{', '.join(most)} or {last}"


def _check_experts(values: Mapping[str, Value], _causal: Optional[bool]) -> Optional[tuple[str, str]]:
    given = next((name for name, default in (("top", 2), ("capacity", 1.25)) if values[name] != default), "")
    if given and not values["experts"]:
        return given, f"{given} needs experts, as in f[experts=8,{given}=...]"
    return None


def lazy_block(layers: int) -> str:
    """Return the sublayers of ``Mb``: a layer that attends, and b - 1 that reuse its distribution.

    See LazyFormer, section 3.1.
    """
    return "sf" + "lf" * (layers - 1)


for _kind in (
    Kind(
        letter="s",
        name="self-attention",
        help="softmax(QK^T / sqrt(D) + bias) V; causal models: Transformer-XL's relative positions and memory",
        source="Vaswani et al., 2017; causal: Dai et al., 2019, section 3.3",
        modules=_modules("attention:SelfAttention", "attention:RelativeAttention"),
        settings=attention_variants.SETTINGS,
        check=attention_variants.check,
        hands_on=(DISTRIBUTION, KEYS_AND_VALUES),
    ),
    Kind(
        letter="l",
        name="lazy attention",
        help="own values on the distribution of the nearest s below",
        source="LazyFormer, section 2",
        modules=_modules("attention:LazyAttention"),
        reads=DISTRIBUTION,
    ),
    Kind(
        letter="k",
        name="shared keys",
        help="own queries on the keys and values of the nearest s below",
        source="Brandon et al., 2024 (cross-layer attention), section 2",
        modules=_modules("attention:SharedKeysAttention"),
        reads=KEYS_AND_VALUES,
        check_producer=attention_variants.why_keys_stay,
    ),
    Kind(
        letter="c",
        name="convolution",
        help="gated linear unit, a filter over neighbouring tokens, and a linear map",
        source="Wu et al., 2019, section 3",
        modules=_modules("convolution:Convolution"),
        settings=(
            Setting("width", 7, "places of a filter, the token's own included", "tokens", low=1),
            Setting(
                "form",
                DEPTHWISE,
                "depthwise: each channel has a filter; lightweight: the channels of a head share one, a softmax",
                choices=(DEPTHWISE, LIGHTWEIGHT),
            ),
        ),
    ),
    Kind(
        letter="r",
        name="recurrence",
        help="a state that gates change token by token; in encoders half of it from either end",
        source="Vecoven et al., 2020; mingru: Feng et al., 2024",
        modules=_modules("recurrent:Recurrent"),
        settings=(
            Setting(
                "cell",
                NBRC,
                "gates of brc read their own number, nbrc's the whole state, mingru's none: all steps at once",
                choices=(BRC, NBRC, MINGRU),
            ),
        ),
    ),
    Kind(
        letter="f",
        name="feed-forward",
        help="two linear maps and an activation; gated, a third map beside the first",
        source="Vaswani et al., 2017, section 3.3; gated: Shazeer, 2020; experts: GShard, 2020, section 2.2",
        modules=_modules("feed_forward:FeedForward"),
        settings=(
            Setting(
                "gate",
                "",
                "activation of one map, which another is multiplied by; the width is that of each",
                choices=("gelu", "silu", "relu"),
            ),
            Setting("experts", 0, "feed-forwards in its place, of which a gate chooses for each token", low=2),
            Setting("top", 2, "that a token goes to; training draws whether to a second", "experts", low=1, high=2),
            Setting(
                "capacity",
                1.25,
                "an expert's slots in training; 1 is its equal part of a text",
                "parts",
                low=0.01,
            ),
        ),
        check=_check_experts,
    ),
    Kind(
        letter="-",
        name="identity",
        help="passes its input on: what a search may choose in place of a sublayer",
        source="PAR Transformer, section 2.1",
        modules=_modules("feed_forward:Identity"),
        is_identity=True,
    ),
):
    register(_kind)


@dataclass(frozen=True)
class Sizes:
    """Sizes of a network, on which costs depend besides its pattern. A network offers its own as ``network.sizes``.

    Attributes:
        vocab_size: V.
        embed_dim: C.
        ffn_embed_dim: W.
        num_heads: N.
        norm: of all norms, LAYER or RMS.
        norm_bias: whether LayerNorms have a bias.
        linear_bias: whether linear maps of sublayers, and of a masked-LM head, have biases.
    """

    direction: ClassVar[str]

    vocab_size: int
    embed_dim: int
    ffn_embed_dim: int
    num_heads: int
    norm: str = field(default=LAYER, kw_only=True)
    norm_bias: bool = field(default=True, kw_only=True)
    linear_bias: bool = field(default=True, kw_only=True)


@dataclass(frozen=True)
class EncoderSizes(Sizes):
    """Sizes of a masked language model on an :class:`~lazyformer_fairseq.modules.networks.encoder.Encoder`.

    Attributes:
        max_positions: the longest input, and rows of the table of absolute positions.
        relative_position_buckets: buckets of T5's bias; 0 for none.
        token_types: rows of the table of token types.
        no_token_positional_embeddings: whether there is no table of absolute positions.
        plain_lm_head: whether the masked-LM head is the output map alone.
        untied_lm_head: whether that map is not the word embedding.
        computes_all_tokens: whether feed-forwards at the top are computed for all tokens, as in reversible models and
            those of other packages; else for the predicted ones alone.
    """

    direction: ClassVar[str] = ENCODER

    max_positions: int = 512
    relative_position_buckets: int = 32
    token_types: int = 0
    no_token_positional_embeddings: bool = False
    plain_lm_head: bool = field(default=False, kw_only=True)
    untied_lm_head: bool = field(default=False, kw_only=True)
    computes_all_tokens: bool = field(default=False, kw_only=True)


@dataclass(frozen=True)
class CausalSizes(Sizes):
    """Sizes of a :class:`~lazyformer_fairseq.modules.networks.causal_decoder.CausalDecoder` with its adaptive softmax.

    Attributes:
        cutoffs: ids that start a new band of words; empty for a plain softmax.
        div_val: how many times narrower each band's vectors are than those of the band before.
        normalize_before: pre-norm, which adds a last LayerNorm.
        untied_softmax: whether the softmax has vectors of words of its own.
    """

    direction: ClassVar[str] = CAUSAL

    cutoffs: Sequence[int] = ()
    div_val: int = 1
    normalize_before: bool = False
    untied_softmax: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "cutoffs", tuple(self.cutoffs))  # counts are remembered by sizes

    @property
    def bands(self) -> list[tuple[int, int]]:
        """(words, width of their vectors) of each band."""
        bounds = [0, *self.cutoffs, self.vocab_size]
        return [
            (upper - lower, self.embed_dim // self.div_val**number)
            for number, (lower, upper) in enumerate(pairwise(bounds))
        ]


def parse_cutoffs(text: str) -> tuple[int, ...]:
    """``"19997,39997"`` -> ``(19997, 39997)``; nothing for an empty text.

    Raises:
        UserError: anything but whole numbers stands between the commas.
    """
    try:
        if text.strip():
            return tuple(int(part) for part in text.split(","))
        return ()
    except ValueError as error:
        raise UserError(
            f"--adaptive-softmax-cutoff {text!r}: must be whole numbers with commas, such as 19997,39997, or empty"
        ) from error


def sizes_of(options: Mapping[str, Any], vocab_size: int) -> Sizes:
    """Return the sizes of a model with these options; those of an encoder begin with ``encoder_``.

    Args:
        options: by name, as values or as text.
        vocab_size: V.

    Raises:
        KeyError, ValueError: the options are of another package's model.
        UserError: as :func:`parse_cutoffs`.
    """

    def is_on(name: str) -> bool:
        return str(options.get(name)) == "True"

    part = "encoder" if "encoder_embed_dim" in options else "decoder"
    common: dict[str, Any] = {
        "vocab_size": vocab_size,
        "embed_dim": int(options[f"{part}_embed_dim"]),
        "ffn_embed_dim": int(options[f"{part}_ffn_embed_dim"]),
        "num_heads": int(options[f"{part}_attention_heads"]),
        "norm": str(options.get("norm", LAYER)),
        "norm_bias": not is_on("no_norm_bias"),
        "linear_bias": not is_on("no_linear_bias"),
    }
    if part == "encoder":
        return EncoderSizes(
            max_positions=int(options.get("max_positions", 0)),
            relative_position_buckets=int(options.get("relative_position_buckets", 0)),
            token_types=int(options.get("token_types", 0)),
            no_token_positional_embeddings=is_on("no_token_positional_embeddings"),
            plain_lm_head=is_on("plain_lm_head"),
            untied_lm_head=is_on("untied_lm_head"),
            computes_all_tokens=is_on("reversible"),
            **common,
        )
    return CausalSizes(
        cutoffs=parse_cutoffs(options["adaptive_softmax_cutoff"]),
        div_val=int(options["adaptive_softmax_factor"]),
        normalize_before=is_on("decoder_normalize_before"),
        untied_softmax=is_on("untied_softmax"),
        **common,
    )
