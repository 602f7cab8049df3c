"""config.json of a BERT -> the options of our model that computes the same."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from lazyformer_fairseq.errors import UserError, nearest
from lazyformer_fairseq.huggingface.reading.families import ACTIVATIONS, FAMILIES, REFUSED, Family
from lazyformer_fairseq.huggingface.reading.folder import CONFIG_FILE, read_json_object

SENTENCE_CLASSIFIER, SPAN_READER = "ForSequenceClassification", "ForQuestionAnswering"
_MISSING = object()


@dataclass(frozen=True)
class Described:
    """What config.json says of a model.

    Attributes:
        options: of our model, but for those that the weights decide.
        layers: how many.
        positions, token_types: rows of their tables; 0 for a family without token types.
        padding: id of the padding symbol.
        is_tied: whether the masked-LM head's output is the word embedding without saying so.
        architecture: transformers' name of the class, "" where it says nothing.
    """

    family: Family
    options: dict[str, Any]
    layers: int
    vocab_size: int
    positions: int
    token_types: int
    padding: int
    is_tied: bool
    architecture: str

    @property
    def first_position(self) -> int:
        """The row of the first token's position."""
        return self.padding + 1 if self.family.counts_from_padding else 0


class _Config:
    """The values of config.json, each checked where it is read."""

    def __init__(self, path: Path):
        self.path = path
        self.values = read_json_object(path)

    def error(self, name: str, wanted: str) -> UserError:
        return UserError(f"{self.path}: {name} is {self.values.get(name)!r}, must be {wanted}")

    def whole(self, name: str, default: Any = _MISSING, low: int = 1) -> int:
        value = self.values.get(name, default)
        if value is _MISSING:
            raise UserError(f"{self.path}: has no {name}, so the model cannot be built; download the folder again")
        if type(value) is not int or value < low:
            raise self.error(name, f"a whole number from {low} on")
        return value

    def share(self, name: str, default: float) -> float:
        value = self.values.get(name, default)
        if type(value) not in (int, float) or not 0 <= value < 1:
            raise self.error(name, "from 0 to below 1")
        return float(value)

    def word(self, name: str, default: str) -> str:
        value = self.values.get(name, default)
        if not isinstance(value, str):
            raise self.error(name, "a word")
        return value


def describe(folder: Path) -> Described:
    """Reads and checks config.json.

    Raises:
        UserError: it is missing or damaged, or describes a model that none of ours can be.
    """
    config = _Config(folder / CONFIG_FILE)
    family = _family(config)
    _refuse_other_functions(config)
    keys = family.keys
    padding = config.values.get("pad_token_id", family.padding)
    if padding is None:
        padding = family.padding
    elif type(padding) is not int or padding < 0:
        raise config.error("pad_token_id", "a whole number from 0 on")
    activation = config.word(keys["activation_fn"], "gelu")
    if activation not in ACTIVATIONS:
        raise config.error(keys["activation_fn"], f"one of {', '.join(ACTIVATIONS)}")
    layers = config.whole(keys["layers"])
    dropout = config.share(keys["dropout"], 0.1)
    pooler = keys["pooler_dropout"]
    described = Described(
        family=family,
        options={
            **{name: config.whole(keys[name]) for name in _WIDTHS},
            "activation_fn": ACTIVATIONS[activation],
            "head_activation_fn": "gelu" if family.head_has_own_activation else ACTIVATIONS[activation],
            "layer_norm_eps": _epsilon(config, family),
            "dropout": dropout,
            "attention_dropout": config.share(keys["attention_dropout"], 0.1),
            "pooler_dropout": dropout if config.values.get(pooler) is None else config.share(pooler, dropout),
            "relative_position_buckets": 0,
        },
        layers=layers,
        vocab_size=config.whole("vocab_size"),
        positions=config.whole(keys["positions"]),
        token_types=config.whole("type_vocab_size", 2) if family.embeddings[2] else 0,
        padding=padding,
        is_tied=config.values.get("tie_word_embeddings", True) is not False,
        architecture=_architecture(config),
    )
    if described.positions <= described.first_position:
        raise config.error(keys["positions"], f"more than the {described.first_position} rows before the first token")
    return described


_WIDTHS = ("encoder_embed_dim", "encoder_ffn_embed_dim", "encoder_attention_heads")


def _family(config: _Config) -> Family:
    name = config.values.get("model_type")
    if name is None:
        raise UserError(
            f'{config.path}: has no model_type; if it is a BERT, add "model_type": "bert", or "roberta" and so on'
        )
    if not isinstance(name, str) or name not in FAMILIES:
        reason = f" ({REFUSED[name]})" if isinstance(name, str) and name in REFUSED else ""
        close = nearest(name, FAMILIES) if isinstance(name, str) and not reason else ""
        raise UserError(
            f"{config.path}: model_type {name!r} is another architecture{reason}; can be imported: "
            f"{', '.join(FAMILIES)}{close}"
        )
    return FAMILIES[name]


def _refuse_other_functions(config: _Config) -> None:
    """Raises a UserError for settings under which a model of a known type computes something else."""
    values = config.values
    for name, why in (
        ("is_decoder", "it is a causal model, or one that generates; encoders can be imported"),
        ("add_cross_attention", "it attends to another model's output"),
        ("pruned_heads", "some of its heads are gone; give the model before it was pruned"),
        ("quantization_config", "its weights are quantised; give the model before that"),
    ):
        if values.get(name):
            raise UserError(f"{config.path}: {name} is {values[name]!r}: {why}")
    kind = values.get("position_embedding_type", "absolute")
    if kind != "absolute":
        raise UserError(
            f"{config.path}: position_embedding_type is {kind!r}: its scores have terms that none of our models has; "
            "only 'absolute' can be imported"
        )


def _epsilon(config: _Config, family: Family) -> float:
    value = config.values.get("layer_norm_eps", family.layer_norm_eps)
    if type(value) not in (int, float) or not 0 < value < 1:
        raise config.error("layer_norm_eps", "above 0 and below 1")
    return float(value)


def _architecture(config: _Config) -> str:
    names: Optional[Any] = config.values.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
