"""``lazyformer import``: imports a model in any supported format as a lazyformer_fairseq checkpoint.

A BERT's weights are renamed to our model's names. Heads for tasks that our models do not support are skipped and
listed; any other weight without a counterpart in our model is an error.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Optional

import torch
from torch import Tensor, nn

from lazyformer_fairseq.arguments import CHECKPOINTS
from lazyformer_fairseq.data.glue import TASKS
from lazyformer_fairseq.data.labelled_files import TaskDescription
from lazyformer_fairseq.data.text.library_tokenizer import adopt_tokenizer
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation import checkpoints, loading
from lazyformer_fairseq.evaluation.export import write_model
from lazyformer_fairseq.evaluation.match import PREFIX, dictionary_hash, heads_in_checkpoint
from lazyformer_fairseq.extras import refuse_without_extra
from lazyformer_fairseq.huggingface import families
from lazyformer_fairseq.huggingface.saved_lazyformer import (
    NO_HEAD,
    ReadModel,
    is_saved_lazyformer,
    read_saved_lazyformer,
)
from lazyformer_fairseq.modules.networks.heads import NEXT_SENTENCE, POOLER, SPAN, TAGS, TokenHead
from lazyformer_fairseq.modules.networks.options import MaskedLMOptions, read_options
from lazyformer_fairseq.storage.atomic import atomic_folder
from lazyformer_fairseq.training.warm_start.options import WarmOptions
from lazyformer_fairseq.training.warm_start.start import Trained, write_record

SPANS = "qa_outputs"
FOLLOWS = "cls.seq_relationship"
BUFFERS = re.compile(r"embeddings\.(position_ids|token_type_ids)")
# Heads that are skipped if our models have no counterpart.
OTHER_HEADS = re.compile(r"(cls\.seq_relationship|qa_outputs|classifier|pre_classifier|head)\.")
OLD_NAMES = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
PRECISIONS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def import_to(
    path: Path,
    out: Path,
    head_name: Optional[str] = None,
    warm: Optional[WarmOptions] = None,
    tokenizer_folder: Optional[Path] = None,
) -> list[str]:
    """Write the model at `path` to the folder `out`, either completely or not at all.

    Args:
        path: A folder in the Hub's format, a lazyformer_fairseq checkpoint, or a folder of checkpoints. No code in it
            is run.
        out: The folder to write, which must not exist or must be empty.
        head_name: The name for the model's head; None for the default.
        warm: Changes to the model. If set, ``warm_start.json`` and ``warm_start.md`` map the old sublayers to the new
            ones.
        tokenizer_folder: The tokenizer folder, for one of our models saved by transformers.

    Returns:
        Notes for the user, one sentence each.

    Raises:
        UserError: The model is missing, damaged or not equivalent to any of ours, an option does not apply to the
            model, the changes are impossible (see :meth:`WarmOptions.start`), or `out` exists.
    """
    if not path.exists():
        raise UserError(
            f"{path}: no such file or folder; if this names a model on the Hub, download the model first: "
            f"hf download {path} --local-dir {path.name}"
        )
    if not ((path / families.CONFIG_FILE).is_file() or is_ours(path)):
        raise UserError(f"{path} contains neither {families.CONFIG_FILE} nor a checkpoint; pass a model's folder")
    _refuse_unused({"--head-name": head_name, "--tokenizer": tokenizer_folder}, path)

    notes: list[str] = []
    with TemporaryDirectory(prefix="lazyformer") as scratch:
        if is_ours(path):
            loaded = loading.load(path)
            options = loaded.model.cfg
            weights = loaded.model.state_dict()
            tokenizer = loaded.tokenizer
            tasks = loaded.tasks
        else:
            refuse_without_extra("huggingface", "lazyformer import")
            _check_head_name(head_name)
            if is_saved_lazyformer(path):
                found = read_saved_lazyformer(path, tokenizer_folder, head_name)
            else:
                found = _read_hub(path, Path(scratch) / "tokenizer", head_name)
            options, weights, tokenizer, notes = found
            tasks = name_classes(path, weights)
        start = None
        if warm is not None:
            trained = Trained(options, weights, tokenizer.dictionary)
            start = warm.start(trained, tokenizer, path.absolute().name)
            options = start.new.cfg
            weights = start.new.weights
        loaded = loading.trained_model(options, weights, tokenizer, path, tasks)
        with atomic_folder(out) as unfinished:
            write_model(loaded, unfinished)
            if start is not None:
                write_record(unfinished, start.record)
    return notes


def _refuse_unused(given: Mapping[str, Any], path: Path) -> None:
    """Raise a UserError for the first flag that does not apply to the type of model at `path`."""
    what = "a model from the Hub"
    used: tuple[str, ...] = ("--head-name",)
    if is_ours(path):
        what = "a lazyformer_fairseq checkpoint"
        used = ()
    elif is_saved_lazyformer(path):
        what = "a LazyFormer saved by transformers"
        used = ("--head-name", "--tokenizer")
    for flag, value in given.items():
        if value is not None and flag not in used:
            raise UserError(f"{flag} does not apply to {path}, which is {what}; omit the option")


def is_ours(path: Path) -> bool:
    """Return whether a path looks like a lazyformer_fairseq checkpoint or a folder of checkpoints."""
    if path.is_file():
        return path.suffix == ".pt" or path.name == checkpoints.WEIGHTS_FILE
    config = path / families.CONFIG_FILE
    if config.is_file():
        return families.read_json_object(config).get("format") == checkpoints.FORMAT
    return any((path / name).is_file() for name in CHECKPOINTS)


def _check_head_name(name: Optional[str]) -> None:
    if name is None:
        return
    is_taken = name in (POOLER, NEXT_SENTENCE) or hasattr(nn.ModuleDict(), name)
    if is_taken or not re.fullmatch(r"[^\W\d][\w-]*", name):
        raise UserError(
            f"--head-name {name!r} must start with a letter or _ and consist of letters, digits, _ and -, and it must "
            f"not be {POOLER}, {NEXT_SENTENCE} or an attribute of torch's ModuleDict, such as keys"
        )


def name_classes(folder: Path, weights: dict[str, Tensor]) -> dict[str, TaskDescription]:
    """Return descriptions of the heads' classes, with the names from config.json.

    A GLUE task's head gets no description. Instead, its outputs in `weights` are reordered in place to match the task's
    labels.

    Args:
        folder: The folder with config.json.
        weights: The model's weights, by our names.
    """
    config = families.read_json_object(folder / families.CONFIG_FILE)
    called = config.get("id2label")
    if not isinstance(called, dict):
        return {}
    names = list(map(str, called.values()))
    distinct = {name.lower() for name in names}
    if len(names) < 2 or len(distinct) < len(names) or names[0] == "LABEL_0":
        return {}

    words = [str(called.get(str(place), place)) for place in range(len(names))]
    lower = [word.lower() for word in words]
    found = {}
    for head, saved in heads_in_checkpoint(weights).items():
        if saved.type == SPAN or head in (POOLER, NEXT_SENTENCE) or saved.outputs != len(names):
            continue
        labels = next((task.labels for task in TASKS.values() if task.head_name == head), ())
        if saved.type == TAGS:
            found[head] = TaskDescription(head, {}, (), tuple(words), tags_words=True)
        elif sorted(lower) == sorted(labels):
            for part in families.PARTS:
                name = f"{PREFIX}{head}.out_proj.{part}"
                weights[name] = weights[name][[lower.index(label) for label in labels]]
        else:
            is_multi_label = config.get("problem_type") == families.MULTI_LABEL
            found[head] = TaskDescription(head, {}, (), tuple(words), is_multi_label=is_multi_label)
    return found


def _read_hub(folder: Path, tokenizer_folder: Path, head_name: Optional[str]) -> ReadModel:
    """Read a folder in the Hub's format, and write its tokenizer to `tokenizer_folder`."""
    if not folder.is_dir():
        raise UserError(
            f"{folder} is a file, but not a lazyformer_fairseq checkpoint; pass the folder that contains "
            f"{families.CONFIG_FILE}"
        )
    described = families.describe(folder)
    conversion = Conversion(folder, described, head_name)
    tokenizer = adopt_tokenizer(folder, tokenizer_folder, described.vocab_size)
    dictionary = tokenizer.dictionary
    if described.family.counts_from_padding and dictionary.pad() != described.padding:
        raise UserError(
            f"{folder}: the tokenizer pads with id {dictionary.pad()}, but the pad_token_id in {families.CONFIG_FILE}, "
            f"from which positions are counted, is {described.padding}"
        )
    try:
        options = read_options(
            MaskedLMOptions,
            {
                **described.options,
                "sublayer_pattern": described.pattern(),
                "max_positions": described.positions - described.first_position,
                "token_types": conversion.token_types,
            },
        )
        with torch.device("meta"):  # allocates no memory, because only the sizes are needed
            model = loading.model_of(options, dictionary)
            if conversion.classes:
                model.register_classification_head(conversion.head_name, conversion.classes)
            if conversion.tags:
                model.register_classification_head(conversion.head_name, conversion.tags, TAGS)
            if conversion.has_spans:
                model.register_classification_head(conversion.head_name, 2, SPAN)
            if conversion.has_next_sentence:
                model.register_next_sentence_head()
            if conversion.has_pooler:
                model.register_pooler()
    except (ValueError, RuntimeError, TypeError, OverflowError) as error:
        raise UserError(f"{folder / families.CONFIG_FILE}: the described model cannot be built ({error})") from None
    shapes = {name: weight.shape for name, weight in model.state_dict().items()}
    weights = conversion.convert(shapes)
    weights["dictionary_sha256"] = dictionary_hash(dictionary)
    return ReadModel(options, weights, tokenizer, conversion.notes())


class Conversion:
    """The conversion of a folder's weights to our model's weights.

    Args:
        folder: The folder.
        described: The description in its config.json.
        head_name: The name for the classification, tag or span head. None for the default, which is "squad" for spans,
            as the squad task expects, and "classifier" for classes and tags.

    Attributes:
        token_types: The number of token type embeddings in our model. A single token type is folded into the position
            embeddings, so our model then has no token types.
        has_lm_head: Whether the folder has a masked-LM head.
        has_next_sentence: Whether it has BERT's next-sentence head.
        classes: The classification head's number of outputs; 0 for none.
        tags: The token classification head's number of tags; 0 for none.
        has_spans: Whether it has a span head, which predicts the start and end of answers.
        places: The folder's weights that are stacked to form each of our weights, by our names.

    Raises:
        UserError: A weight is missing or has no counterpart in our models.
    """

    def __init__(self, folder: Path, described: families.ModelDescription, head_name: Optional[str]):
        self.folder = folder
        self.described = described
        family = described.family
        self._take_weights(families.read_weights(folder))
        self._check_layers()
        width = described.options["encoder_embed_dim"]
        rows_of = {
            families.WORDS: (described.vocab_size, "vocab_size"),
            families.POSITIONS: (described.positions, "the positions"),
            families.TYPES: (described.token_types, "type_vocab_size"),
        }
        for our_name, table in family.tables.items():
            rows, what = rows_of[our_name]
            name = f"{table}.weight"
            shape = self._shape(name)
            if shape != (rows, width):
                raise UserError(
                    f"{folder}: {self._full[name]} has the shape {shape}, but in config.json {what} and "
                    f"the width are {(rows, width)}; download the folder again"
                )

        self.token_types = described.token_types
        self._folded = ""
        if described.token_types == 1:
            self.token_types = 0
            self._folded = f"{family.types}.weight"

        signs: Any = family.head
        if family.is_modern:  # classifiers also have the masked-LM head's dense layer and LayerNorm
            signs = family.head[2]
        self.has_lm_head = any(name.startswith(signs) for name in self._weights)
        self.classes = 0
        self.tags = 0
        if described.architecture.endswith("ForSequenceClassification"):
            names = ["classifier.out_proj.weight"]
            if family.pooler:
                names.append("classifier.weight")
            self.classes = self._count_outputs(names)
        elif described.architecture.endswith("ForTokenClassification") and not family.is_modern:
            self.tags = self._count_outputs(["classifier.weight"])
        self.has_spans = described.architecture.endswith("ForQuestionAnswering") and self._has_map(SPANS)
        self.head_name = "classifier"
        if self.has_spans:
            self.head_name = "squad"
        if head_name is not None:
            self.head_name = head_name
        self.has_pooler = bool(family.pooler) and f"{family.pooler}.weight" in self._weights
        self.has_next_sentence = self.has_pooler and self._has_map(FOLLOWS)
        self.places = dict(self._find_places())
        self._left_out = self._find_left_out()

    def notes(self) -> list[str]:
        """Return notes on the imported model for the user, one sentence each."""
        found = []
        if not self.has_lm_head:
            found.append(NO_HEAD)
        if self.token_types:
            found.append(
                f"the model's {self.token_types} token types are kept: GLUE uses them for text pairs, whereas all "
                "tokens of single texts and of masked LM have type 0"
            )
        if self.classes:
            found.append(
                f"the model's {self.classes}-output classifier became the classification head {self.head_name!r}"
            )
        if self.tags:
            found.append(
                f"the model's {self.tags}-tag classifier became the head {self.head_name!r}, which lazyformer predict "
                "uses"
            )
        if self.has_spans:
            found.append(f"the model's {SPANS} became the span head {self.head_name!r}, which lazyformer predict uses")
        if self.has_next_sentence:
            found.append(
                f"the model's {FOLLOWS} became the head {NEXT_SENTENCE!r}, which includes the pooler; --next-sentence "
                "trains this head further"
            )
        if self.has_pooler:
            found.append(
                f"the model's pooler is kept as the head {POOLER!r}, which initializes new dense classification heads"
            )
        if self._left_out:
            found.append(f"not imported: {', '.join(self._left_out)}")
        return found

    def convert(self, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
        """Return our weights by name, in float32.

        The model also stores the dictionary's hash, which the caller must add.

        Args:
            shapes: The shapes of our model's weights, by name.

        Raises:
            UserError: A weight has a shape that does not match config.json, or contains NaN or Inf.
        """
        found = {}
        for our_name, names in self.places.items():
            first_row = 0
            if our_name == families.POSITIONS:
                first_row = self.described.first_position

            parts = [self._shape(name) for name in names]
            rows = sum(shape[0] if shape else 0 for shape in parts) - first_row
            row_shape = parts[0][1:]
            is_stack = all(shape and shape[1:] == row_shape for shape in parts)
            wanted = tuple(shapes[our_name])
            if (rows, *row_shape) != wanted or not is_stack:
                raise UserError(
                    f"{self.folder}: {self._full[names[0]]} has the shape {parts[0]}, which does not match "
                    f"{wanted} from config.json; download the folder again"
                )
            stacked = torch.cat([self._read(name) for name in names])
            found[our_name] = stacked[first_row:].clone()
            del stacked  # free the memory before the next weight is read
        if self._folded:
            found[families.POSITIONS] += self._read(self._folded)[0]
        if self.has_lm_head:
            self._check_decoder(found)
        else:
            found |= families.fresh_head(shapes)
        found[f"{families.HEAD}weight"] = found[families.WORDS]
        return found

    def _take_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Store the weights by their names without the prefix; LayerNorm's weights get their current names."""
        self._weights: dict[str, Tensor] = {}
        self._full: dict[str, str] = {}  # the names in the file
        for name, weight in weights.items():
            plain = name.removeprefix(self.described.family.prefix)
            for old, new in OLD_NAMES.items():
                if plain.endswith(old):
                    plain = plain.removesuffix(old) + new
            if plain in self._full:
                raise UserError(f"{self.folder}: {name} and {self._full[plain]} are the same weight; keep only one")
            self._weights[plain] = weight
            self._full[plain] = name

    def _check_layers(self) -> None:
        """Compare the number of layers in config.json with the weights.

        This check comes first, because the number in a damaged config.json may be too large to loop over.
        """
        start = f"{self.described.family.layers}."
        numbers = set()
        for name in self._weights:
            if name.startswith(start):
                number, _, _ = name.removeprefix(start).partition(".")
                numbers.add(number)
        if len(numbers) != self.described.layers:
            raise UserError(
                f"{self.folder} has weights for {len(numbers)} layers, but config.json specifies "
                f"{self.described.layers}; download the folder again"
            )

    def _shape(self, name: str) -> tuple[int, ...]:
        if name not in self._weights:
            family = self.described.family
            full = name
            if not name.startswith((*family.head, "classifier", SPANS, FOLLOWS)):
                full = f"{family.prefix}{name}"
            raise UserError(
                f"{self.folder} lacks the weight {full}; download the folder again, or save the model with "
                "transformers' save_pretrained"
            )
        return tuple(self._weights[name].shape)

    def _read(self, name: str) -> Tensor:
        """Return a weight in float32.

        Raises:
            UserError: The weight is not floating-point, or contains NaN or Inf.
        """
        weight = self._weights[name]
        if weight.dtype not in PRECISIONS:
            raise UserError(
                f"{self.folder}: {self._full[name]} contains {weight.dtype}; import the model as it was before "
                "quantization"
            )
        if not weight.isfinite().all():
            raise UserError(f"{self.folder}: {self._full[name]} contains NaN or Inf; download the folder again")
        return weight.float()

    def _count_outputs(self, names: Sequence[str]) -> int:
        """Return the number of outputs of the first existing linear layer; 0 if none exists."""
        for name in names:
            if name in self._weights:
                shape = self._shape(name)
                if 0 in shape or not shape:
                    raise UserError(f"{self.folder}: {name} has the shape {shape}; download the folder again")
                return shape[0]
        return 0

    def _has_map(self, name: str) -> bool:
        """Return whether the folder has a linear layer with this name and two outputs."""
        weight = self._weights.get(f"{name}.weight")
        return weight is not None and weight.shape == (2, self.described.options["encoder_embed_dim"])

    def _find_places(self) -> Iterator[tuple[str, list[str]]]:
        family = self.described.family
        for our_name, table in family.tables.items():
            if our_name != families.TYPES or self.token_types:
                yield our_name, [f"{table}.weight"]
        maps = dict(family.maps(self.described.layers))
        if self.has_lm_head:
            dense, norm, bias, decoder = family.head
            maps[f"{families.HEAD}dense"] = [dense]
            maps[f"{families.HEAD}layer_norm"] = [norm]
            if bias not in self._weights and f"{decoder}.bias" in self._weights:
                bias = f"{decoder}.bias"
            yield f"{families.HEAD}bias", [bias]
        if self.has_pooler:
            maps[f"{PREFIX}{POOLER}.dense"] = [family.pooler]
        if self.has_next_sentence:
            maps[f"{PREFIX}{NEXT_SENTENCE}.dense"] = [family.pooler]
            maps[f"{PREFIX}{NEXT_SENTENCE}.out_proj"] = [FOLLOWS]
        head = f"{PREFIX}{self.head_name}"
        if self.classes and "classifier.out_proj.weight" in self._weights:  # RoBERTa's two linear layers
            maps[f"{head}.dense"] = ["classifier.dense"]
            maps[f"{head}.out_proj"] = ["classifier.out_proj"]
        elif self.classes:  # BERT's pooler and linear layer
            maps[f"{head}.dense"] = [family.pooler]
            maps[f"{head}.out_proj"] = ["classifier"]
        if self.tags:
            maps[f"{head}.{TokenHead.MAP}"] = ["classifier"]
        if self.has_spans:
            maps[f"{head}.span_proj"] = [SPANS]
        for our_name, names in maps.items():
            for part in self.described.parts(our_name):
                yield f"{our_name}.{part}", [f"{name}.{part}" for name in names]

    def _find_left_out(self) -> list[str]:
        """Return the weights of heads that are not imported.

        Raises:
            UserError: One of the encoder's weights has no counterpart in our model.
        """
        known = {name for names in self.places.values() for name in names}
        _, _, bias, decoder = self.described.family.head
        known |= {self._folded, bias, f"{decoder}.weight", f"{decoder}.bias"}
        others = [name for name in self._weights if name not in known and not BUFFERS.fullmatch(name)]
        for name in others:
            if not OTHER_HEADS.match(name):
                raise UserError(
                    f"{self.folder} has the weight {self._full[name]}, which none of our models has; without this "
                    "weight, the model's outputs would differ"
                )
        return [self._full[name] for name in others]

    def _check_decoder(self, found: Mapping[str, Tensor]) -> None:
        """Raise a UserError if the head's decoder is not the word embedding, or if it has two different biases."""
        _, _, bias, decoder = self.described.family.head
        if not self.described.is_tied:
            self._shape(f"{decoder}.weight")  # must exist
        tied = {
            f"{decoder}.weight": (families.WORDS, "the word embeddings"),
            f"{decoder}.bias": (f"{families.HEAD}bias", bias),
        }
        for name, (our_name, what) in tied.items():
            if name in self._weights and not torch.equal(self._read(name), found[our_name]):
                raise UserError(
                    f"{self.folder}: {self._full[name]} differs from {what}, which our masked-LM head is tied to"
                )
