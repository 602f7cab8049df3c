"""The table of sublayer kinds, with one row per letter of the pattern language.

A kind of sublayer consists of a row in this table and a file in ``modules/sublayers``. The parser, networks, cost
formulas, latency tables, searches, reports and help texts use the row. The file contains the module and the formulas
that count its costs.

Other packages can add kinds in modules that call :func:`register`. A package declares these modules as entry points in
the group :data:`ENTRY_POINTS`, or the user lists them in the environment variable :data:`VARIABLE`. The modules are
imported when the table is first accessed. ``docs/add_a_kind.md`` walks through an example.
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
# Outputs that a sublayer can pass to higher sublayers.
DISTRIBUTION = "distribution"
# The keys and values, and everything else that determines the scores, except for the queries.
KEYS_AND_VALUES = "keys and values"
# Forms of a convolution's filters.
DEPTHWISE = "depthwise"
LIGHTWEIGHT = "lightweight"
# Cells of a recurrence.
BRC = "brc"
NBRC = "nbrc"
MINGRU = "mingru"
# Types of norms; all sublayers of a network use the same type.
LAYER = "layer"
RMS = "rms"
NORMS = (LAYER, RMS)

ENTRY_POINTS = "lazyformer_fairseq.kinds"
VARIABLE = "LAZYFORMER_KINDS"

_RESERVED = "Mx()[],="


@dataclass(frozen=True, eq=False)
class Kind:
    """A sublayer kind, that is, one row of the table.

    Attributes:
        letter: The letter that represents the kind in patterns.
        name: The name shown in tables, pictures and lists of candidates.
        help: A one-line description of what the sublayer computes.
        source: The paper that introduced the kind.
        modules: The sublayer class for each direction, as ``"package.module:Class"`` or as the class itself. It must be
            a :class:`~lazyformer_fairseq.modules.sublayers.interface.Sublayer`. If there is no class for a direction,
            models of that direction reject the kind.
        settings: The settings that may follow the letter in brackets.
        check: A function that checks settings for conflicts. It takes the values of all settings by name and whether
            the model is causal (None if unknown). It returns the name of a conflicting setting and the reason, or None.
        hands_on: The outputs that higher sublayers may read, such as DISTRIBUTION.
        reads: The output that the sublayer reads from the nearest sublayer below that provides it.
        check_producer: A function that takes the producer's settings and returns why a sublayer of this kind cannot
            read from it, or "".
        is_identity: Whether the sublayer returns its input unchanged. Patterns found by a search omit such sublayers.
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
        """Copy and pickle the row by its letter, so copied plans and plans in other processes have the same row."""
        return row_of_letter, (self.letter,)

    def setting(self, name: str) -> Optional[Setting]:
        """Return the setting with this name, or None if the kind does not have it."""
        return next((setting for setting in self.settings if setting.name == name), None)

    @property
    def computes_scores(self) -> bool:
        """True if a back end computes query-key scores for the sublayer."""
        return DISTRIBUTION in self.hands_on or self.reads == KEYS_AND_VALUES

    @property
    def kept_for_consumers(self) -> tuple[str, ...]:
        """The outputs that are kept only for consumers. Keys and values are excluded, because they exist anyway."""
        return tuple(what for what in self.hands_on if what != KEYS_AND_VALUES)

    def module(self, direction: str) -> Any:
        """Import and return the class for a direction. This imports torch.

        Raises:
            UserError: If the kind is from another package and its class cannot be imported.
        """
        module = self.modules[direction]
        try:
            if isinstance(module, str):
                return find_class(module)
            return module
        except (ImportError, AttributeError, ValueError) as error:
            if str(module).startswith(_SUBLAYERS):
                raise
            raise UserError(
                f"{self.name} ({self.letter}): cannot import its class {module}: {_one_line(error)}"
            ) from error


_SUBLAYERS = "lazyformer_fairseq.modules.sublayers"


def _modules(encoder: str, causal: Optional[str] = None) -> dict[str, str]:
    """Return a row's classes by direction; causal models use the encoder's class unless `causal` is set."""
    return {ENCODER: f"{_SUBLAYERS}.{encoder}", CAUSAL: f"{_SUBLAYERS}.{causal or encoder}"}


_TABLE: dict[str, Kind] = {}


def register(kind: Kind) -> Kind:
    """Add a row to the table.

    Raises:
        ValueError: If the letter or name is already taken, or the letter already has a meaning in patterns.
    """
    has_meaning = kind.letter in _RESERVED or kind.letter.isspace() or kind.letter.isdigit()
    if len(kind.letter) != 1 or has_meaning:
        raise ValueError(
            f"a kind cannot have the letter {kind.letter!r}: it must be a single character without another meaning in "
            "patterns"
        )
    for other in _TABLE.values():
        if kind.letter == other.letter or kind.name == other.name:
            raise ValueError(f"{kind.letter} ({kind.name}) is taken: {other.letter} ({other.name}) already exists")
    _TABLE[kind.letter] = kind
    return kind


_mistakes: Optional[list[UserError]] = None  # errors in other packages' kinds; None before they are imported


def kinds() -> tuple[Kind, ...]:
    """Return all rows in the order used for tables and pictures, with other packages' rows last.

    Raises:
        UserError: If a module of another package cannot be imported or registers no valid kind. The message names the
            entry point or environment variable that lists it.
    """
    for mistake in _import_others():
        raise mistake
    return tuple(_TABLE.values())


def _import_others() -> list[UserError]:
    global _mistakes  # noqa: PLW0603 - imported once per process
    if _mistakes is None:
        _mistakes = []  # set first, because the imported modules may call `kinds` themselves
        listed = [module.strip() for module in os.environ.get(VARIABLE, "").split(",")]
        places = {f"{VARIABLE}={module}": module for module in listed if module}
        for point in metadata.entry_points(group=ENTRY_POINTS):
            package = point.dist.name if point.dist else "an unknown package"
            places[f"entry point {point.name} = {point.value} of {package}"] = point.module
        for place, module in places.items():
            mistake = _import_kinds(place, module)
            if mistake is not None:
                _mistakes.append(mistake)
    return _mistakes


def _import_kinds(place: str, module: str) -> Optional[UserError]:
    rows = len(_TABLE)
    is_new = module not in sys.modules
    try:
        importlib.import_module(module)
    except Exception as error:
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]
        if is_missing:
            remedy = "; install the module, or add its parent folder to PYTHONPATH"
        else:
            remedy = ""
        return UserError(f"{place}: {_one_line(error)}{remedy}")
    if is_new and len(_TABLE) == rows:
        return UserError(
            f"{place}: {module} does not register a kind of sublayer; see docs/add_a_kind.md for an example"
        )
    return None


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def find_kind(text: str) -> Optional[Kind]:
    """Return the row with this letter or name, or None if there is none."""
    for kind in kinds():
        if text in (kind.letter, kind.name):
            return kind
    return None


def row_of_letter(letter: str) -> Kind:
    """Return the row for a letter in a pickled model.

    Raises:
        UserError: If no row has this letter, because the package that registers it is not installed.
    """
    kind = find_kind(letter)
    if kind is None:
        raise UserError(
            f"the model has sublayers of kind {letter!r}, which is not registered here: install the package that "
            f"registers this kind, or list the package's module in {VARIABLE}"
        )
    return kind


def describe_letters() -> str:
    """Return all letters and names for help texts and messages, as in ``s (self-attention) or l (lazy attention)``."""
    _import_others()  # errors are ignored, so help texts work even if other packages are broken
    *most, last = [f"{kind.letter} ({kind.name})" for kind in _TABLE.values()]
    return f"{', '.join(most)} or {last}"


def _check_experts(values: Mapping[str, Value], _causal: Optional[bool]) -> Optional[tuple[str, str]]:
    if values["experts"]:
        return None
    for name, default in (("top", 2), ("capacity", 1.25)):
        if values[name] != default:
            return name, f"{name} needs experts, as in f[experts=8,{name}=...]"
    return None


def lazy_block(layers: int) -> str:
    """Expand ``Mb`` to one layer with self-attention and b - 1 layers that reuse its distribution.

    See LazyFormer, section 3.1.
    """
    return "sf" + "lf" * (layers - 1)


for _kind in (
    Kind(
        letter="s",
        name="self-attention",
        help="softmax(QK^T / sqrt(D) + bias) V; causal models use Transformer-XL's relative positions and memory",
        source="Vaswani et al., 2017; causal: Dai et al., 2019, section 3.3",
        modules=_modules("attention:SelfAttention", "attention:RelativeAttention"),
        settings=attention_variants.SETTINGS,
        check=attention_variants.check,
        hands_on=(DISTRIBUTION, KEYS_AND_VALUES),
    ),
    Kind(
        letter="l",
        name="lazy attention",
        help="its own values, weighted by the distribution of the nearest s below",
        source="LazyFormer, section 2",
        modules=_modules("attention:LazyAttention"),
        reads=DISTRIBUTION,
    ),
    Kind(
        letter="k",
        name="shared keys",
        help="its own queries, which attend to the keys and values of the nearest s below",
        source="Brandon et al., 2024 (cross-layer attention), section 2",
        modules=_modules("attention:SharedKeysAttention"),
        reads=KEYS_AND_VALUES,
        check_producer=attention_variants.why_keys_not_shared,
    ),
    Kind(
        letter="c",
        name="convolution",
        help="a gated linear unit, a filter over neighboring tokens, and a linear layer",
        source="Wu et al., 2019, section 3",
        modules=_modules("convolution:Convolution"),
        settings=(
            Setting("width", 7, "width of the filter, including the token itself", "tokens", low=1),
            Setting(
                "form",
                DEPTHWISE,
                "depthwise: one filter per channel; lightweight: one filter per head, normalized by a softmax",
                choices=(DEPTHWISE, LIGHTWEIGHT),
            ),
        ),
    ),
    Kind(
        letter="r",
        name="recurrence",
        help="a state, updated token by token through gates; in encoders, half of the state runs in each direction",
        source="Vecoven et al., 2020; mingru: Feng et al., 2024",
        modules=_modules("recurrent:Recurrent"),
        settings=(
            Setting(
                "cell",
                NBRC,
                "what each gate reads from the previous state: its own unit (brc), all units (nbrc), or nothing, so "
                "that all steps can be computed in parallel (mingru)",
                choices=(BRC, NBRC, MINGRU),
            ),
        ),
    ),
    Kind(
        letter="f",
        name="feed-forward",
        help="two linear layers with an activation in between; with a gate, a third layer runs parallel to the first",
        source="Vaswani et al., 2017, section 3.3; gated: Shazeer, 2020; experts: GShard, 2020, section 2.2",
        modules=_modules("feed_forward:FeedForward"),
        settings=(
            Setting(
                "gate",
                "",
                "activation of the gate, which multiplies the output of a second linear layer; both have the full "
                "feed-forward width",
                choices=("gelu", "silu", "relu"),
            ),
            Setting(
                "experts",
                0,
                "number of feed-forward networks (experts); a gate routes each token to some of them",
                low=2,
            ),
            Setting(
                "top",
                2,
                "number of experts per token; during training, the second expert is sometimes skipped at random",
                "experts",
                low=1,
                high=2,
            ),
            Setting(
                "capacity",
                1.25,
                "capacity factor: slots per expert during training, as a multiple of the number needed if each text's "
                "tokens were distributed evenly",
                "factor",
                low=0.01,
            ),
        ),
        check=_check_experts,
    ),
    Kind(
        letter="-",
        name="identity",
        help="its input, unchanged; a search may choose it to remove a sublayer",
        source="PAR Transformer, section 2.1",
        modules=_modules("feed_forward:Identity"),
        is_identity=True,
    ),
):
    register(_kind)


@dataclass(frozen=True)
class Sizes:
    """The sizes of a network, which together with its pattern determine its costs; available as ``network.sizes``.

    Attributes:
        vocab_size: V, the number of tokens in the vocabulary.
        embed_dim: C, the hidden size.
        ffn_embed_dim: W, the hidden size of the feed-forward sublayers.
        num_heads: N, the number of attention heads.
        norm: The type of all norms, LAYER or RMS.
        norm_bias: Whether LayerNorms have a bias.
        linear_bias: Whether the linear layers of the sublayers and the masked-LM head have biases.
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
    """The sizes of a masked language model with an :class:`~lazyformer_fairseq.modules.networks.encoder.Encoder`.

    Attributes:
        max_positions: The maximum input length, which is the number of rows in the table of absolute positions.
        relative_position_buckets: The number of buckets of T5's bias; 0 for no bias.
        token_types: The number of rows in the table of token types.
        no_token_positional_embeddings: Whether the model omits the table of absolute positions.
        plain_lm_head: Whether the masked-LM head consists only of the output projection.
        untied_lm_head: Whether the output projection has its own weights instead of sharing the word embedding.
        computes_all_tokens: Whether the feed-forward sublayers at the top process all tokens instead of only the
            predicted ones, as in reversible models and in other packages' models.
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
    """The sizes of a causal decoder and its adaptive softmax.

    See :class:`~lazyformer_fairseq.modules.networks.causal_decoder.CausalDecoder`.

    Attributes:
        cutoffs: The word ids at which new bands start; empty for a plain softmax.
        div_val: The factor by which the embedding width shrinks from band to band.
        normalize_before: Whether the model is pre-norm, which adds a final LayerNorm.
        untied_softmax: Whether the softmax has its own word vectors instead of sharing the embedding.
    """

    direction: ClassVar[str] = CAUSAL

    cutoffs: Sequence[int] = ()
    div_val: int = 1
    normalize_before: bool = False
    untied_softmax: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        # Sizes are cache keys of cost counts, so they must be hashable.
        object.__setattr__(self, "cutoffs", tuple(self.cutoffs))

    @property
    def bands(self) -> list[tuple[int, int]]:
        """The number of words and the embedding width of each band."""
        bounds = [0, *self.cutoffs, self.vocab_size]
        return [
            (upper - lower, self.embed_dim // self.div_val**number)
            for number, (lower, upper) in enumerate(pairwise(bounds))
        ]


def parse_cutoffs(text: str) -> tuple[int, ...]:
    """Parse the cutoffs of an adaptive softmax: ``"19997,39997"`` into ``(19997, 39997)``, and ``""`` into ``()``.

    Raises:
        UserError: If the text is not a comma-separated list of integers.
    """
    try:
        if text.strip():
            return tuple(int(part) for part in text.split(","))
        return ()
    except ValueError as error:
        raise UserError(
            f"--adaptive-softmax-cutoff {text!r} must be comma-separated integers, such as 19997,39997, or empty"
        ) from error


def sizes_of(options: Mapping[str, Any], vocab_size: int) -> Sizes:
    """Return the sizes of a model with these options. Options named ``encoder_...`` indicate an encoder.

    Args:
        options: The model's options by name, as values or as text.
        vocab_size: V, the number of tokens in the vocabulary.

    Raises:
        KeyError, ValueError: If the options are for a model from another package.
        UserError: If the adaptive softmax cutoffs are invalid; see :func:`parse_cutoffs`.
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
