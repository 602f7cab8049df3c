"""The BERT, RoBERTa, DistilBERT and ModernBERT families: the names of their weights and settings in transformers.

Import and export use the same table. This module also reads a model's folder without running code in it:

FOLDER/config.json
FOLDER/model.safetensors
"""

import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Optional

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from lazyformer_fairseq.errors import UserError, nearest
from lazyformer_fairseq.evaluation.match import LM_HEAD
from lazyformer_fairseq.huggingface.activations import ACTIVATIONS
from lazyformer_fairseq.modules.sublayers.feed_forward import GATES
from lazyformer_fairseq.storage.json_files import read_json

MULTI_LABEL = "multi_label_classification"  # a value of problem_type in transformers' configs
CONFIG_FILE = "config.json"
LARGEST_JSON = 64 * 2**20  # bytes
SAFE_FILE = "model.safetensors"
# Our own weight names.
ENCODER = "encoder.sentence_encoder."
HEAD = LM_HEAD
WORDS = f"{ENCODER}embed_tokens.weight"
POSITIONS = f"{ENCODER}embed_positions.weight"
TYPES = f"{ENCODER}embed_token_types.weight"
PARTS = ("weight", "bias")
MODERN = "modernbert"


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of transformers models: one entry of :data:`FAMILIES`.

    Attributes:
        prefix: The prefix of the encoder's weights in models with a head.
        keys: The names of settings in config.json, by our option names.
        words: The name of the word embeddings.
        positions: The name of the position embeddings; "" for none.
        types: The name of the token type embeddings; "" for none.
        norm: The name of the embedding LayerNorm.
        layers: The prefix that precedes the layer index.
        layer: The names of a layer's linear layers and LayerNorms, by our names, which begin with 0 in the s sublayer
            and with 1 in the f sublayer. If our model stacks several linear layers into one, all of their names are
            listed.
        head: The names of the masked-LM head's dense layer, LayerNorm, bias and decoder.
        pooler: The name of the pooler; "" for none.
        head_has_own_activation: Whether the masked-LM head always uses GELU instead of the sublayers' activation.
        counts_from_padding: Whether positions begin at the padding id + 1.
        padding: The padding id if config.json has none.
        final_norm: The name of the LayerNorm after all layers; "" for none.
        is_modern: Whether the models have rotary positions, gates, a LayerNorm before each sublayer except the first,
            and biases only if config.json enables them; see :func:`modern_options`.
        eps: The epsilon of LayerNorms if config.json has none.
        dropout: The rate of all dropouts if config.json has none.
    """

    prefix: str
    keys: Mapping[str, str]
    words: str
    positions: str = ""
    types: str = ""
    norm: str
    layers: str
    layer: Mapping[str, tuple[str, ...]]
    head: tuple[str, str, str, str]
    pooler: str = ""
    head_has_own_activation: bool = False
    counts_from_padding: bool = False
    padding: int = 0
    final_norm: str = ""
    is_modern: bool = False
    eps: float = 1e-12
    dropout: float = 0.1

    @property
    def tables(self) -> dict[str, str]:
        """The names of the family's embeddings, by our names."""
        found = {WORDS: self.words, POSITIONS: self.positions, TYPES: self.types}
        return {our_name: name for our_name, name in found.items() if name}

    def maps(self, layers: int) -> Iterator[tuple[str, list[str]]]:
        """Yield our name for each linear layer or LayerNorm in an encoder, and the transformers names stacked in it.

        Args:
            layers: The number of layers.
        """
        yield f"{ENCODER}embedding_layer_norm", [self.norm]
        if self.final_norm:
            yield f"{ENCODER}final_layer_norm", [self.final_norm]
        for number in range(layers):
            for our_name, names in self.layer.items():
                if self.is_modern and number == 0 and our_name == "0.layer_norm":
                    continue  # the embedding LayerNorm replaces it
                sublayer = 2 * number + int(our_name[0])
                part = our_name[1:]
                yield f"{ENCODER}sublayers.{sublayer}{part}", [f"{self.layers}.{number}.{name}" for name in names]


BERT_KEYS = {
    "encoder_embed_dim": "hidden_size",
    "encoder_ffn_embed_dim": "intermediate_size",
    "encoder_attention_heads": "num_attention_heads",
    "layers": "num_hidden_layers",
    "activation_fn": "hidden_act",
    "dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
    "pooler_dropout": "classifier_dropout",
    "layer_norm_eps": "layer_norm_eps",
}
BERT = Family(
    prefix="bert.",
    keys=BERT_KEYS,
    words="embeddings.word_embeddings",
    positions="embeddings.position_embeddings",
    types="embeddings.token_type_embeddings",
    norm="embeddings.LayerNorm",
    layers="encoder.layer",
    layer={
        "0.inner.qkv_proj": ("attention.self.query", "attention.self.key", "attention.self.value"),
        "0.inner.out_proj": ("attention.output.dense",),
        "0.layer_norm": ("attention.output.LayerNorm",),
        "1.inner.fc1": ("intermediate.dense",),
        "1.inner.fc2": ("output.dense",),
        "1.layer_norm": ("output.LayerNorm",),
    },
    head=(
        "cls.predictions.transform.dense",
        "cls.predictions.transform.LayerNorm",
        "cls.predictions.bias",
        "cls.predictions.decoder",
    ),
    pooler="pooler.dense",
)
ROBERTA = replace(
    BERT,
    prefix="roberta.",
    head=("lm_head.dense", "lm_head.layer_norm", "lm_head.bias", "lm_head.decoder"),
    head_has_own_activation=True,
    counts_from_padding=True,
    padding=1,
)
FAMILIES: Mapping[str, Family] = {
    "bert": BERT,
    "roberta": ROBERTA,
    "camembert": ROBERTA,
    "xlm-roberta": ROBERTA,
    "distilbert": Family(
        prefix="distilbert.",
        keys={
            "encoder_embed_dim": "dim",
            "encoder_ffn_embed_dim": "hidden_dim",
            "encoder_attention_heads": "n_heads",
            "layers": "n_layers",
            "activation_fn": "activation",
            "dropout": "dropout",
            "attention_dropout": "attention_dropout",
            "pooler_dropout": "seq_classif_dropout",
            "layer_norm_eps": "layer_norm_eps",
        },
        words="embeddings.word_embeddings",
        positions="embeddings.position_embeddings",
        norm="embeddings.LayerNorm",
        layers="transformer.layer",
        layer={
            "0.inner.qkv_proj": ("attention.q_lin", "attention.k_lin", "attention.v_lin"),
            "0.inner.out_proj": ("attention.out_lin",),
            "0.layer_norm": ("sa_layer_norm",),
            "1.inner.fc1": ("ffn.lin1",),
            "1.inner.fc2": ("ffn.lin2",),
            "1.layer_norm": ("output_layer_norm",),
        },
        head=("vocab_transform", "vocab_layer_norm", "vocab_projector.bias", "vocab_projector"),
    ),
    MODERN: Family(
        prefix="model.",
        keys={
            **BERT_KEYS,
            "activation_fn": "hidden_activation",
            "dropout": "embedding_dropout",
            "attention_dropout": "attention_dropout",
            "activation_dropout": "mlp_dropout",
            "layer_norm_eps": "norm_eps",
        },
        words="embeddings.tok_embeddings",
        norm="embeddings.norm",
        layers="layers",
        layer={
            "0.inner.qkv_proj": ("attn.Wqkv",),
            "0.inner.out_proj": ("attn.Wo",),
            "0.layer_norm": ("attn_norm",),
            "1.inner.fc1": ("mlp.Wi",),
            "1.inner.fc2": ("mlp.Wo",),
            "1.layer_norm": ("mlp_norm",),
        },
        head=("head.dense", "head.norm", "decoder.bias", "decoder"),
        padding=50283,
        final_norm="final_norm",
        is_modern=True,
        eps=1e-5,
        dropout=0.0,
    ),
}

SEED = 1  # the seed for a new head's weights


def fresh_head(shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Return the weights of a new masked-LM head, initialized as in BERT. Every call returns the same weights.

    Args:
        shapes: The shapes of the model's weights, by name.
    """
    found = {}
    for part in ("dense.weight", "dense.bias", "layer_norm.weight", "layer_norm.bias", "bias"):
        name = f"{HEAD}{part}"
        if name in shapes:
            found[name] = torch.zeros(shapes[name])
    if f"{HEAD}dense.weight" in found:
        generator = torch.Generator().manual_seed(SEED)
        found[f"{HEAD}dense.weight"].normal_(std=0.02, generator=generator)
        found[f"{HEAD}layer_norm.weight"].fill_(1)
    return found


@dataclass(frozen=True)
class ModelDescription:
    """A model as described by config.json.

    Attributes:
        family: The model's family.
        options: Our model's options, except for the pattern and options that depend on the weights.
        pattern: A function that builds the pattern. Call it only after the number of layers has been checked against
            the weights.
        layers: The number of layers.
        vocab_size: The number of tokens in the vocabulary.
        positions: The number of position embeddings.
        token_types: The number of token type embeddings; 0 if the family has none.
        padding: The id of the padding symbol.
        is_tied: Whether the masked-LM head's decoder is tied to the word embedding and may be missing from the file.
        architecture: The name of the class in transformers; "" if config.json does not name it.
    """

    family: Family
    options: dict[str, Any]
    pattern: Callable[[], str]
    layers: int
    vocab_size: int
    positions: int
    token_types: int
    padding: int
    is_tied: bool
    architecture: str

    @property
    def first_position(self) -> int:
        """The index of the first token's position embedding."""
        if self.family.counts_from_padding:
            return self.padding + 1
        return 0

    def parts(self, ours: str) -> Sequence[str]:
        """Return the parts of a linear layer or LayerNorm with our name `ours`: "weight", and "bias" if it has one."""
        without = "no_linear_bias"
        if ours.endswith("layer_norm"):
            without = "no_norm_bias"
        if self.options.get(without):
            return PARTS[:1]
        return PARTS


@dataclass(frozen=True)
class ConfigFile:
    """A reader of config.json that checks the values as it reads them.

    Attributes:
        path: The path of the file.
        values: The content of the file.
    """

    path: Path
    values: Mapping[str, Any]

    def read(self, name: str, wanted: str, is_right: Callable[[Any], bool], default: Any = None) -> Any:
        """Return a setting's value.

        Args:
            name: The key.
            wanted: A description of the valid values, for the message.
            is_right: A function that returns whether a value is valid.
            default: The value if the file has none. If None, the file must have one.

        Raises:
            UserError: The value is missing or invalid.
        """
        value = self.values.get(name)
        if value is None:
            value = default
        if value is None:
            raise UserError(f"{self.path} has no {name}, so the model cannot be built; download the folder again")
        if not is_right(value):
            raise UserError(f"{self.path}: {name} is {reprlib.repr(value)}, but must be {wanted}")
        return value

    def count(self, name: str, default: Optional[int] = None, low: int = 1) -> int:
        """Return a whole number of at least `low`."""
        wanted = f"a whole number of at least {low}"
        return self.read(name, wanted, lambda value: type(value) is int and value >= low, default)

    def share(self, name: str, default: float) -> float:
        """Return a fraction that is at least 0 and below 1."""

        def is_share(value: Any) -> bool:
            return _is_number(value) and 0 <= value < 1

        return float(self.read(name, "at least 0 and below 1", is_share, default))

    def activation(self, name: str, ours: Mapping[str, str]) -> str:
        """Return our name for an activation; `ours` maps transformers' names to ours."""

        def is_known(value: Any) -> bool:
            return isinstance(value, str) and value in ours

        wanted = f"one of {', '.join(ours)}"
        activation = self.read(name, wanted, is_known, "gelu")
        return ours[activation]


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def describe(folder: Path) -> ModelDescription:
    """Read and check a folder's config.json.

    Raises:
        UserError: The file is missing or damaged, or describes a model that none of our models can represent.
    """
    path = folder / CONFIG_FILE
    values = read_json_object(path)
    family = _family(path, values)
    _refuse_other_functions(path, values)
    config = ConfigFile(path, values)
    keys = family.keys
    layers = config.count(keys["layers"])
    epsilon = config.read(
        keys["layer_norm_eps"],
        "above 0 and below 1",
        lambda value: _is_number(value) and 0 < value < 1,
        family.eps,
    )
    options: dict[str, Any] = {"layer_norm_eps": float(epsilon), "relative_position_buckets": 0}
    for name in ("encoder_embed_dim", "encoder_ffn_embed_dim", "encoder_attention_heads"):
        options[name] = config.count(keys[name])
    for option, key in keys.items():
        if option.endswith("dropout"):
            options[option] = config.share(key, family.dropout)
    if values.get(keys["pooler_dropout"]) is None:
        options["pooler_dropout"] = options["dropout"]

    if family.is_modern:
        gate = config.activation(keys["activation_fn"], {name: name for name in GATES})
        options["head_activation_fn"] = config.activation("classifier_activation", ACTIVATIONS)
        options |= modern_options(path, values)
        pattern = partial(modern_pattern, config, gate, layers)
    else:
        options["activation_fn"] = config.activation(keys["activation_fn"], ACTIVATIONS)
        options["head_activation_fn"] = options["activation_fn"]
        if family.head_has_own_activation:
            options["head_activation_fn"] = "gelu"
        pattern = partial(str, f"(sf)x{layers}")

    token_types = 0
    if family.types:
        token_types = config.count("type_vocab_size", 2)
    names = values.get("architectures")
    architecture = ""
    if isinstance(names, list) and names and isinstance(names[0], str):
        architecture = names[0]
    described = ModelDescription(
        family=family,
        options=options,
        pattern=pattern,
        layers=layers,
        vocab_size=config.count("vocab_size"),
        positions=config.count("max_position_embeddings"),
        token_types=token_types,
        padding=config.count("pad_token_id", family.padding, low=0),
        is_tied=values.get("tie_word_embeddings", True) is not False,
        architecture=architecture,
    )
    first = described.first_position
    if described.positions <= first:
        raise UserError(
            f"{path}: max_position_embeddings is {described.positions}, but must be more than {first}, the index of "
            "the first token's position"
        )
    return described


FULL = "full_attention"
SLIDING = "sliding_attention"


def modern_options(path: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options common to every ModernBERT, and the options that determine whether it has biases.

    See Warner et al., 2024 (arXiv 2412.13663), section 2.1.1.

    Args:
        path: The config.json, for messages.
        values: The contents of config.json.

    Raises:
        UserError: The model has a combination of biases that our models do not support.
    """
    linear = {values.get(f"{name}_bias") is True for name in ("attention", "mlp", "classifier")}
    if len(linear) > 1 or values.get("decoder_bias", True) is not True:
        raise UserError(
            f"{path}: attention_bias, mlp_bias and classifier_bias must be the same, and decoder_bias must be true, "
            "because our models have biases in all linear layers or in none, except that the masked-LM head's output "
            "layer always has one"
        )
    return {
        "encoder_normalize_before": True,
        "embedding_norm": True,
        "no_token_positional_embeddings": True,
        "no_linear_bias": linear == {False},
        "no_norm_bias": values.get("norm_bias") is not True,
    }


def modern_pattern(config: ConfigFile, gate: str, layers: int) -> str:
    """Return a ModernBERT's pattern; its config.json may have the keys of transformers 5 or of earlier versions.

    Args:
        config: The config.json.
        gate: The gates' activation.
        layers: The number of layers.

    Raises:
        UserError: The model has layers other than full and sliding attention, or scaled positions.
    """
    values = config.values
    window = config.count("local_attention", 128, low=2) // 2
    full = _rotary_base(config, FULL, values.get("global_rope_theta") or 160_000)
    sliding = _rotary_base(config, SLIDING, values.get("local_rope_theta") or 10_000)
    layer_of = {
        FULL: f"s[rope={full}]f[gate={gate}]",
        SLIDING: f"s[window={window},rope={sliding}]f[gate={gate}]",
    }
    layer_types = values.get("layer_types")
    every = values.get("global_attn_every_n_layers") or 3
    if layer_types is None and type(every) is int and every > 0:
        layer_types = [SLIDING if number % every else FULL for number in range(layers)]
    is_whole = isinstance(layer_types, list) and len(layer_types) == layers
    if not is_whole or not all(layer_type in list(layer_of) for layer_type in layer_types):
        raise UserError(f"{config.path}: layer_types must list {layers} layers, each of type {' or '.join(layer_of)}")

    period = 1
    while layer_types[period:] != layer_types[: layers - period]:
        period += 1
    whole, rest = divmod(layers, period)
    of_layers = [layer_of[layer_type] for layer_type in layer_types]
    return f"({''.join(of_layers[:period])})x{whole} {''.join(of_layers[:rest])}".rstrip()


def _rotary_base(config: ConfigFile, layer_type: str, default: Any) -> int:
    """Return the base of one layer type's rotary positions."""
    given = config.values.get("rope_parameters") or {}
    if isinstance(given, dict):
        given = given.get(layer_type) or {}
    is_plain = isinstance(given, dict) and given.get("rope_type") in (None, "default")
    base = default
    if is_plain:
        base = given.get("rope_theta", default)
    is_whole = _is_number(base) and 1 <= base < 2**31 and base % 1 == 0
    if config.values.get("rope_scaling") or not is_plain or not is_whole:
        raise UserError(
            f"{config.path}: the rotary positions of {layer_type} layers are not supported ({given or base}); they "
            "must be unscaled, with an integer base"
        )
    return int(base)


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        UserError: The file cannot be read, is not a JSON object, or is too large to describe a model.
    """
    if path.is_file() and path.stat().st_size > LARGEST_JSON:
        raise UserError(f"{path} has {path.stat().st_size:,} bytes, which is too large for a model config")
    return read_json(path, "download the folder again")


def _family(path: Path, values: Mapping[str, Any]) -> Family:
    name = values.get("model_type")
    if name is None:
        raise UserError(
            f'{path} has no model_type; if the model is a BERT, add "model_type": "bert" (or "roberta" and so on)'
        )
    if not isinstance(name, str) or name not in FAMILIES:
        raise UserError(
            f"{path}: model_type {name!r} is not supported; these types can be imported: {', '.join(FAMILIES)}"
            f"{nearest(str(name), FAMILIES)}"
        )
    return FAMILIES[name]


def _refuse_other_functions(path: Path, values: Mapping[str, Any]) -> None:
    """Raise a UserError if settings make a supported model type compute something that our models cannot."""
    for name, why in (
        ("is_decoder", "the model is causal or generates text; only encoders can be imported"),
        ("add_cross_attention", "the model attends to another model's output, which is not supported"),
        ("pruned_heads", "some of the model's heads were pruned; import the unpruned model"),
        ("quantization_config", "the weights are quantized; import the unquantized model"),
    ):
        if values.get(name):
            raise UserError(f"{path}: {name} is {values[name]!r}, which means that {why}")
    position_type = values.get("position_embedding_type", "absolute")
    if position_type != "absolute":
        raise UserError(
            f"{path}: position_embedding_type is {position_type!r}, which our models do not support; only 'absolute' "
            "can be imported"
        )


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Return the weights in a folder's model.safetensors, by name.

    Raises:
        UserError: The file is missing or damaged.
    """
    path = folder / SAFE_FILE
    if not path.is_file():
        raise UserError(
            f"{folder} contains no {SAFE_FILE}; other formats and sharded weights are not supported. Load the model "
            "with transformers and save it with save_pretrained(folder, max_shard_size='100GB')"
        )
    try:
        return load_file(path)
    except (SafetensorError, OSError, RuntimeError, ValueError, TypeError, MemoryError, OverflowError) as error:
        raise UserError(f"{path}: truncated, damaged or not a safetensors file ({error})") from None
