"""BERT, RoBERTa, DistilBERT and ModernBERT: what transformers calls their weights and settings, and a folder of one.

Export reads the same rows from the other side. Nothing in a folder is run, nothing outside it is read by its names.

FOLDER/config.json
FOLDER/model.safetensors             or pytorch_model.bin, which is read as weights alone
FOLDER/model.safetensors.index.json  or pytorch_model.bin.index.json: which of several files holds which weight
"""

import os
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Optional

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lazyformer_fairseq.errors import UserError, nearest
from lazyformer_fairseq.evaluation.match import LM_HEAD
from lazyformer_fairseq.huggingface.activations import ACTIVATIONS
from lazyformer_fairseq.modules.sublayers.feed_forward import GATES
from lazyformer_fairseq.storage import checkpoint_file
from lazyformer_fairseq.storage.json_files import read_json

CONFIG_FILE = "config.json"
LARGEST_JSON = 64 * 2**20  # bytes
LONGEST_NAME = 255  # bytes of a file's name, on the file systems that there are
SAFE_FILE = "model.safetensors"
PICKLED_FILE = "pytorch_model.bin"
INDEX = ".index.json"
NUMBERS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
WHOLE_NUMBERS = ("I64", "I32", "I16", "I8", "U8", "BOOL")  # of buffers
# What we call them.
ENCODER = "encoder.sentence_encoder."
HEAD = LM_HEAD
WORDS, POSITIONS, TYPES = (f"{ENCODER}embed_{what}.weight" for what in ("tokens", "positions", "token_types"))
PARTS = ("weight", "bias")
MODERN = "modernbert"


@dataclass(frozen=True)
class Family:
    """A row.

    Attributes:
        prefix: of the encoder's weights, where a head stands beside it.
        keys: names in config.json by the option of ours.
        embeddings: names of words, positions and token types ("" for none), and LayerNorm.
        layers: what stands before a layer's number.
        layer: of each map and LayerNorm of a layer, theirs, one below the other, by ours; 0 is the s, 1 the f.
        head: of the masked-LM head: dense, LayerNorm, bias, decoder.
        pooler: "" for none.
        head_has_own_activation: whether the head's is GELU whatever the sublayers have; else theirs.
        counts_from_padding: whether positions begin at the id of padding + 1.
        padding: its id, where config.json has none.
        final_norm: behind all layers; "" for none.
        is_modern: rotary positions, gates, LayerNorms before sublayers but the first, maps and LayerNorms without
            biases where config.json says so: see :func:`modern_options`.
        eps, dropout: LayerNorm's epsilon and all shares of dropout, where config.json has none.
    """

    prefix: str
    keys: Mapping[str, str]
    embeddings: tuple[str, ...]
    layers: str
    layer: Mapping[str, tuple[str, ...]]
    head: tuple[str, ...]
    pooler: str = ""
    head_has_own_activation: bool = False
    counts_from_padding: bool = False
    padding: int = 0
    final_norm: str = ""
    is_modern: bool = False
    eps: float = 1e-12
    dropout: float = 0.1

    def maps(self, layers: int) -> Iterator[tuple[str, list[str]]]:
        """Each map and LayerNorm of an encoder: our name, and theirs, one below the other."""
        yield f"{ENCODER}embedding_layer_norm", [self.embeddings[3]]
        if self.final_norm:
            yield f"{ENCODER}final_layer_norm", [self.final_norm]
        for number in range(layers):
            for ours, theirs in self.layer.items():
                if self.is_modern and number == 0 and ours == "0.layer_norm":
                    continue  # the embeddings have it
                name = f"{ENCODER}sublayers.{2 * number + int(ours[0])}{ours[1:]}"
                yield name, [f"{self.layers}.{number}.{each}" for each in theirs]


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
_BERT_LAYER = {
    "0.inner.qkv_proj": ("attention.self.query", "attention.self.key", "attention.self.value"),
    "0.inner.out_proj": ("attention.output.dense",),
    "0.layer_norm": ("attention.output.LayerNorm",),
    "1.inner.fc1": ("intermediate.dense",),
    "1.inner.fc2": ("output.dense",),
    "1.layer_norm": ("output.LayerNorm",),
}
_DISTILBERT_KEYS = (
    "dim hidden_dim n_heads n_layers activation dropout attention_dropout seq_classif_dropout layer_norm_eps".split()
)
_DISTILBERT_LAYER = {
    "0.inner.qkv_proj": ("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    "0.inner.out_proj": ("attention.out_lin",),
    "0.layer_norm": ("sa_layer_norm",),
    "1.inner.fc1": ("ffn.lin1",),
    "1.inner.fc2": ("ffn.lin2",),
    "1.layer_norm": ("output_layer_norm",),
}


def _bert(prefix: str, head: str, *parts: str, **others: Any) -> Family:
    tables = "embeddings.word_embeddings embeddings.position_embeddings embeddings.token_type_embeddings".split()
    names = (*tables, "embeddings.LayerNorm")
    of_head = tuple(f"{head}.{part}" for part in parts)
    return Family(prefix, BERT_KEYS, names, "encoder.layer", _BERT_LAYER, of_head, "pooler.dense", **others)


_ROBERTA = _bert(
    "roberta.", "lm_head", "dense", "layer_norm", "bias", "decoder",
    head_has_own_activation=True, counts_from_padding=True, padding=1,
)  # fmt: skip
FAMILIES: Mapping[str, Family] = {
    "bert": _bert("bert.", "cls.predictions", "transform.dense", "transform.LayerNorm", "bias", "decoder"),
    "roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "distilbert": Family(
        "distilbert.",
        dict(zip(BERT_KEYS, _DISTILBERT_KEYS, strict=True)),
        ("embeddings.word_embeddings", "embeddings.position_embeddings", "", "embeddings.LayerNorm"),
        "transformer.layer",
        _DISTILBERT_LAYER,
        ("vocab_transform", "vocab_layer_norm", "vocab_projector.bias", "vocab_projector"),
    ),
    MODERN: Family(
        "model.",
        {
            **BERT_KEYS,
            "activation_fn": "hidden_activation",
            "dropout": "embedding_dropout",
            "attention_dropout": "attention_dropout",
            "activation_dropout": "mlp_dropout",
            "layer_norm_eps": "norm_eps",
        },
        ("embeddings.tok_embeddings", "", "", "embeddings.norm"),
        "layers",
        {
            "0.inner.qkv_proj": ("attn.Wqkv",),
            "0.inner.out_proj": ("attn.Wo",),
            "0.layer_norm": ("attn_norm",),
            "1.inner.fc1": ("mlp.Wi",),
            "1.inner.fc2": ("mlp.Wo",),
            "1.layer_norm": ("mlp_norm",),
        },
        ("head.dense", "head.norm", "decoder.bias", "decoder"),
        padding=50283,
        final_norm="final_norm",
        is_modern=True,
        eps=1e-5,
        dropout=0.0,
    ),
}

REFUSED = {
    "electra": "an ELECTRA's discriminator has no masked-LM head, and its embeddings may be narrower than the rest",
    "albert": "an ALBERT shares the weights of all layers, and its embeddings are narrower than the rest",
    "deberta": "its attention adds scores of relative positions",
    "deberta-v2": "its attention adds scores of relative positions",
    "roberta-prelayernorm": "it normalises the embeddings too, as none of our pre-norm models does",
    "mobilebert": "its layers have bottlenecks",
    "lazyformer": "it came from a checkpoint of this package: give that one",
}

SEED = 1  # of a head that starts fresh


def fresh_head(shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """A masked-LM head as BERT initialises it; the same each time."""
    names = [
        f"{HEAD}{name}"
        for name in ("dense.weight", "dense.bias", "layer_norm.weight", "layer_norm.bias", "bias")
        if f"{HEAD}{name}" in shapes
    ]
    found = {name: torch.zeros(shapes[name]) for name in names}
    if f"{HEAD}dense.weight" in found:
        found[f"{HEAD}dense.weight"].normal_(std=0.02, generator=torch.Generator().manual_seed(SEED))
        found[f"{HEAD}layer_norm.weight"].fill_(1)
    return found


@dataclass(frozen=True)
class Described:
    """What config.json says of a model.

    Attributes:
        options: of our model, but for the pattern and those that the weights decide.
        pattern: makes it, once the weights are known to have so many layers.
        layers: how many.
        positions, token_types: rows of their tables; 0 for a family without token types.
        padding: id of the padding symbol.
        is_tied: whether the masked-LM head's output is the word embedding without saying so.
        architecture: transformers' name of the class, "" where it says nothing.
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
        """The row of the first token's position."""
        if self.family.counts_from_padding:
            return self.padding + 1
        return 0

    def parts(self, ours: str) -> Sequence[str]:
        """Of a map or LayerNorm of the encoder or of the masked-LM head: its weight, and its bias if it has one."""
        without = self.options.get("no_norm_bias" if ours.endswith("layer_norm") else "no_linear_bias")
        if without:
            return PARTS[:1]
        return PARTS


def describe(folder: Path) -> Described:
    """Reads and checks config.json.

    Raises:
        UserError: it is missing or damaged, or describes a model that none of ours can be.
    """
    path = folder / CONFIG_FILE
    values = read_json_object(path)
    family = _family(path, values)
    _refuse_other_functions(path, values)

    def read(name: str, wanted: str, is_right: Any, default: Any = None) -> Any:
        if values.get(name) is None:
            value = default
        else:
            value = values[name]
        if value is None:
            raise UserError(f"{path}: has no {name}, so the model cannot be built; download the folder again")
        if not is_right(value):
            raise UserError(f"{path}: {name} is {reprlib.repr(value)}, must be {wanted}")
        return value

    def count(name: str, default: Optional[int] = None, low: int = 1) -> int:
        return read(name, f"a whole number from {low} on", lambda value: type(value) is int and value >= low, default)

    def share(name: str, default: float) -> float:
        is_right = lambda value: type(value) in (int, float) and 0 <= value < 1  # noqa: E731
        return float(read(name, "from 0 to below 1", is_right, default))

    def activation(name: str, ours: Mapping[str, str]) -> str:
        return ours[read(name, f"one of {', '.join(ours)}", lambda value: value in list(ours), "gelu")]

    keys = family.keys
    of_sublayers = activation(
        keys["activation_fn"], {name: name for name in GATES} if family.is_modern else ACTIVATIONS
    )
    if not family.head_has_own_activation:
        of_head = of_sublayers
    else:
        of_head = "gelu"
    dropouts = {ours: share(theirs, family.dropout) for ours, theirs in keys.items() if ours.endswith("dropout")}
    if values.get(keys["pooler_dropout"]) is None:
        dropouts["pooler_dropout"] = dropouts["dropout"]
    layers = count(keys["layers"])
    others: dict[str, Any] = {"activation_fn": of_sublayers}
    pattern: Callable[[], str] = lambda: f"(sf)x{layers}"  # noqa: E731
    if family.is_modern:
        of_head = activation("classifier_activation", ACTIVATIONS)
        others = modern_options(path, values)
        pattern = partial(modern_pattern, path, values, count("local_attention", 128, low=2) // 2, of_sublayers, layers)
    is_epsilon = lambda value: type(value) in (int, float) and 0 < value < 1  # noqa: E731
    names = values.get("architectures")
    described = Described(
        family=family,
        options={
            **{name: count(keys[name]) for name in list(keys)[:3]},
            **others,
            "head_activation_fn": of_head,
            "layer_norm_eps": float(read(keys["layer_norm_eps"], "above 0 and below 1", is_epsilon, family.eps)),
            **dropouts,
            "relative_position_buckets": 0,
        },
        pattern=pattern,
        layers=layers,
        vocab_size=count("vocab_size"),
        positions=count("max_position_embeddings"),
        token_types=count("type_vocab_size", 2) if family.embeddings[2] else 0,
        padding=count("pad_token_id", family.padding, low=0),
        is_tied=values.get("tie_word_embeddings", True) is not False,
        architecture=names[0] if isinstance(names, list) and names and isinstance(names[0], str) else "",
    )
    if described.positions <= (first := described.first_position):
        raise UserError(
            f"{path}: max_position_embeddings is {described.positions}, must be more than the {first} rows before the "
            "first token"
        )
    return described


FULL, SLIDING = LAYER_TYPES = ("full_attention", "sliding_attention")


def modern_options(path: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    """What is the same in every ModernBERT, and where it has biases; UserError for places where ours has none or must.

    Warner et al., 2024 (arXiv 2412.13663), section 2.1.1.
    """
    has = {name: values.get(f"{name}_bias", name == "decoder") is True for name in ("attention", "mlp", "classifier",
                                                                                   "norm", "decoder")}  # fmt: skip
    linear = {has[name] for name in ("attention", "mlp", "classifier")}
    if len(linear) > 1 or not has["decoder"]:
        raise UserError(
            f"{path}: attention_bias, mlp_bias and classifier_bias must be the same, and decoder_bias true: a model "
            "of ours has biases in all linear maps or in none, and in the masked-LM head's output"
        )
    flags = ("encoder_normalize_before", "embedding_norm", "no_token_positional_embeddings")
    return {**dict.fromkeys(flags, True), "no_linear_bias": linear == {False}, "no_norm_bias": not has["norm"]}


def modern_pattern(path: Path, values: Mapping[str, Any], window: int, gate: str, layers: int) -> str:
    """Of config.json as transformers 5 writes it, or with the names that it had before.

    Raises:
        UserError: other kinds of layers than the two, or scaled positions.
    """
    given = values.get("rope_parameters") or {}
    bases = dict(zip(LAYER_TYPES, (("global_rope_theta", 160_000), ("local_rope_theta", 10_000)), strict=True))
    attention = {}
    for kind, (old, default) in bases.items():
        rope = (given.get(kind) if isinstance(given, dict) else given) or {}
        if isinstance(rope, dict):
            base = rope.get("rope_theta", values.get(old) or default)
        else:
            base = None
        is_scaled = values.get("rope_scaling") or not isinstance(rope, dict) or rope.get("rope_type") not in (
            None, "default",
        )  # fmt: skip
        if is_scaled or type(base) not in (int, float) or not 1 <= base < 2**31 or base % 1:
            raise UserError(f"{path}: rotary positions of {kind} are {rope or base}: must be plain, of a whole base")
        attention[kind] = f"s[rope={int(base)}]" if kind == FULL else f"s[window={window},rope={int(base)}]"
    every = values.get("global_attn_every_n_layers") or 3
    kinds = values.get("layer_types")
    if kinds is None and type(every) is int and every > 0:
        kinds = [SLIDING if number % every else FULL for number in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in LAYER_TYPES for kind in kinds):
        raise UserError(f"{path}: layer_types must be {layers} of {' or '.join(LAYER_TYPES)}")
    period = next(size for size in range(1, layers + 1) if kinds[size:] == kinds[: layers - size])
    of_layers = [f"{attention[kind]}f[gate={gate}]" for kind in kinds]
    rest = "".join(of_layers[: layers % period])
    return f"({''.join(of_layers[:period])})x{layers // period}{' ' if rest else ''}{rest}"


def read_json_object(path: Path) -> dict[str, Any]:
    """Raises a UserError where it is no JSON object, or too large for one that describes a model."""
    if path.is_file() and path.stat().st_size > LARGEST_JSON:
        raise UserError(f"{path}: {path.stat().st_size:,} bytes, too many for what describes a model")
    return read_json(path, "download the folder again")


def _family(path: Path, values: Mapping[str, Any]) -> Family:
    name = values.get("model_type")
    if name is None:
        raise UserError(f'{path}: has no model_type; if it is a BERT, add "model_type": "bert", or "roberta" and so on')
    if isinstance(name, str):
        word = name
    else:
        word = ""
    if word not in FAMILIES:
        if word in REFUSED:
            reason = f" ({REFUSED[word]})"
        else:
            reason = ""
        if word and not reason:
            close = nearest(word, FAMILIES)
        else:
            close = ""
        raise UserError(
            f"{path}: model_type {name!r} is another architecture{reason}; can be imported: "
            f"{', '.join(FAMILIES)}{close}"
        )
    return FAMILIES[word]


def _refuse_other_functions(path: Path, values: Mapping[str, Any]) -> None:
    """Raises a UserError for settings under which a model of a known type computes something else."""
    for name, why in (
        ("is_decoder", "it is a causal model, or one that generates; encoders can be imported"),
        ("add_cross_attention", "it attends to another model's output"),
        ("pruned_heads", "some of its heads are gone; give the model before it was pruned"),
        ("quantization_config", "its weights are quantised; give the model before that"),
    ):
        if values.get(name):
            raise UserError(f"{path}: {name} is {values[name]!r}: {why}")
    kind = values.get("position_embedding_type", "absolute")
    if kind != "absolute":
        raise UserError(
            f"{path}: position_embedding_type is {kind!r}: its scores have terms that none of our models has; "
            "only 'absolute' can be imported"
        )


class Weights:
    """A folder's weights by name; each is read when it is asked for.

    Attributes:
        folder: for messages.
        shapes: of all.

    Raises:
        UserError: a file is missing, damaged, holds more than weights, or a name in an index leads elsewhere.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._safe: dict[str, Any] = {}
        self._pickled: dict[str, Tensor] = {}
        for path, wanted in _files(folder):
            is_safe = path.name.endswith(checkpoint_file.SAFETENSORS)
            if is_safe:
                found = self._open_safe(path)
            else:
                found = self._open_pickled(path)
            if missing := sorted(wanted - found):
                raise UserError(f"{path}: lacks {missing[0]}, which the index says it holds; download the folder again")

    def read(self, name: str) -> Tensor:
        """A weight in float32.

        Raises:
            UserError: it holds other numbers than floating-point ones, or NaN or Inf.
        """
        if name in self._pickled:
            weight = self._pickled[name]
        else:
            weight = self._safe[name].get_tensor(name)
        if weight.dtype not in NUMBERS.values():
            raise UserError(f"{self.folder}: {name} holds {weight.dtype}; give the model before it was quantised")
        if not weight.isfinite().all():
            raise UserError(f"{self.folder}: {name} holds NaN or Inf; download the folder again, or take another")
        return weight.float().clone(memory_format=torch.contiguous_format)

    def _open_safe(self, path: Path) -> set[str]:
        try:
            file = safe_open(path, framework="pt")
            for name in file.keys():  # noqa: SIM118 (it is no dict)
                part = file.get_slice(name)
                if part.get_dtype() not in (*NUMBERS, *WHOLE_NUMBERS):
                    raise UserError(f"{path}: {name} holds {part.get_dtype()}; give the model before it was quantised")
                self._add(name, tuple(part.get_shape()), path)
                self._safe[name] = file
            return set(file.keys())
        except (SafetensorError, OSError, RuntimeError, ValueError, TypeError, MemoryError, OverflowError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"{path}: truncated, damaged or no safetensors file ({error})") from None

    def _open_pickled(self, path: Path) -> set[str]:
        checkpoint_file.forbid_unsafe_loads(os.environ)
        with checkpoint_file.named_errors(path):
            checkpoint_file.check(path)
            with open(path, "rb") as file:
                is_archive = file.read(2) == b"PK"  # else older than torch 1.6, and cannot be mapped
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=is_archive)
        if not isinstance(content, dict) or not all(
            isinstance(name, str) and isinstance(weight, Tensor) for name, weight in content.items()
        ):
            raise UserError(f"{path}: holds something else than weights by name; give the model's own {PICKLED_FILE}")
        for name, weight in content.items():
            if weight.layout is not torch.strided or weight.device.type != "cpu" or weight.is_quantized:
                raise UserError(f"{path}: {name} is quantised or sparse; give the model before that")
            if weight.untyped_storage().nbytes() < weight.numel() * weight.element_size():
                raise UserError(f"{path}: {name} says it is larger than the file; do not use it")
            self._add(name, tuple(weight.shape), path)
            self._pickled[name] = weight
        return set(content)

    def _add(self, name: str, shape: tuple[int, ...], path: Path) -> None:
        if name in self.shapes:
            raise UserError(f"{path}: {name} is in two files; download the folder again")
        self.shapes[name] = shape


def _files(folder: Path) -> list[tuple[Path, set[str]]]:
    """The files with weights, each with the names that an index says it holds."""
    for name in (SAFE_FILE, PICKLED_FILE):
        if (folder / name).is_file():
            return [(folder / name, set())]
        if (folder / f"{name}{INDEX}").is_file():
            return _files_of_index(folder / f"{name}{INDEX}", Path(name).suffix)
    raise UserError(
        f"{folder}: holds no {SAFE_FILE} or {PICKLED_FILE}; weights of TensorFlow or Flax are not read, save the model "
        "with transformers' save_pretrained"
    )


def _files_of_index(path: Path, suffix: str) -> list[tuple[Path, set[str]]]:
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{path}: has no weight_map; download the folder again")
    files: dict[str, set[str]] = {}
    for weight, file in weight_map.items():
        is_name = isinstance(file, str) and file.endswith(suffix) and Path(file).name == file and "\0" not in file
        if not is_name or len(file.encode(errors="replace")) > LONGEST_NAME:
            raise UserError(
                f"{path}: refused, nothing was read: {weight} is to be in {reprlib.repr(file)}, which is no file "
                f"*{suffix} of this folder; do not use it"
            )
        files.setdefault(file, set()).add(weight)
    for file in files:
        if not (path.parent / file).is_file():
            raise UserError(f"{path.parent / file}: no such file, but the index names it; download the folder again")
    return [(path.parent / file, weights) for file, weights in sorted(files.items())]
