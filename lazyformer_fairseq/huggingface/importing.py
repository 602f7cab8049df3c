"""What ``lazyformer import`` does: reads a model of whatever kind, and writes it as a checkpoint of ours.

Weights of a BERT become those of our model, by name. What has no place in ours is named, or refused.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Optional

import torch
from torch import Tensor, nn

from lazyformer_fairseq.arguments import CHECKPOINTS, checkpoint_at
from lazyformer_fairseq.data.glue import TASKS
from lazyformer_fairseq.data.labelled_files import TaskDescription
from lazyformer_fairseq.data.text.interface import TextTokenizer
from lazyformer_fairseq.data.text.library_tokenizer import adopt_tokenizer
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation import checkpoints, loading
from lazyformer_fairseq.evaluation.export import write_model
from lazyformer_fairseq.evaluation.match import PREFIX, dictionary_hash, heads_in_checkpoint
from lazyformer_fairseq.extras import refuse_without_extra
from lazyformer_fairseq.huggingface import families
from lazyformer_fairseq.huggingface.own_folder import is_own, read_own
from lazyformer_fairseq.modules.networks.heads import NEXT_SENTENCE, POOLER, SPAN
from lazyformer_fairseq.modules.networks.options import MaskedLMOptions, read_options
from lazyformer_fairseq.progress import Progress
from lazyformer_fairseq.storage.atomic import atomic_folder
from lazyformer_fairseq.training.warm_start.options import WarmOptions
from lazyformer_fairseq.training.warm_start.start import Trained, write_record

KEEP = "keep"
FOLD = "fold"
AUTO = "auto"
SPANS, FOLLOWS = "qa_outputs", "cls.seq_relationship"  # heads beside the masked-LM head and the classifier
SPAN_HEAD = "squad"  # what task squad calls its head
_BUFFERS = re.compile(r"embeddings\.(position_ids|token_type_ids)")
# Heads of other tasks, which have no place in ours.
_OTHER_HEADS = re.compile(r"(cls\.seq_relationship|qa_outputs|classifier|pre_classifier|head)\.")
_OLD_NAMES = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}


def import_to(
    path: Path,
    out: Path,
    token_types: str = AUTO,
    head_name: Optional[str] = None,
    warm: Optional[WarmOptions] = None,
    tokenizer_folder: Optional[Path] = None,
) -> list[str]:
    """Writes the model at `path` to the folder `out`, whole or not at all. Returns what a user should know of it.

    Args:
        path: a folder as the Hub has it, a checkpoint of ours, or a folder of such. Nothing that it holds is run.
        out: must not exist yet, or be empty.
        token_types, head_name: of a model from the Hub; see :class:`Conversion`.
        tokenizer_folder: of a model of ours that transformers saved, see :func:`~.own_folder.read_own`.
        warm: what changes of the model; then ``warm_start.json`` and ``warm_start.md`` say what became what.

    Raises:
        UserError: the model is missing or damaged, or has no use for an option, or none of ours computes the same; what
            :meth:`WarmOptions.start` raises; or `out` exists.
    """
    if not path.exists():
        raise UserError(
            f"{path}: no such file or folder; if it is a model's name on the Hub, download it first: "
            f"hf download {path} --local-dir {path.name}"
        )
    if token_types == AUTO:
        types = None
    else:
        types = token_types
    given = {"--token-types": types, "--head-name": head_name, "--tokenizer": tokenizer_folder}
    _refuse_unused([flag for flag, value in given.items() if value is not None], path)
    with TemporaryDirectory(prefix="lazyformer") as scratch:
        notes: list[str] = []
        tasks = None
        if is_ours(path):
            loaded = loading.load(checkpoint_at(path))
            cfg = loaded.model.cfg
            weights = loaded.model.state_dict()
            tokenizer = loaded.tokenizer
            tasks = loaded.tasks
        else:
            refuse_without_extra("huggingface", "lazyformer import")
            taken = head_name in (POOLER, NEXT_SENTENCE) or hasattr(nn.ModuleDict(), head_name or "")
            if head_name is not None and (not re.fullmatch(r"[^\W\d][\w-]*", head_name) or taken):
                names = f"{POOLER}, {NEXT_SENTENCE} or a name of torch's, such as keys"
                raise UserError(f"--head-name {head_name!r}: must be letters, digits, _ and -, and not {names}")
            if is_own(path):
                own = read_own(path, tokenizer_folder, head_name)
            else:
                own = None
            read = own or _read_hub(path, Path(scratch) / "tokenizer", token_types, head_name)
            cfg, weights, tokenizer, notes = read
            tasks = name_classes(path, weights)
        start = None
        if warm is not None:
            start = warm.start(Trained(cfg, weights, tokenizer.dictionary), tokenizer, path.absolute().name)
            cfg = start.new.cfg
            weights = start.new.weights
        loaded = loading.trained_model(cfg, weights, tokenizer, path, tasks)
        with atomic_folder(out) as unfinished:
            write_model(loaded, unfinished)
            if start is not None:
                write_record(unfinished, start.record)
    return notes


def name_classes(folder: Path, weights: dict[str, Tensor]) -> dict[str, TaskDescription]:
    """By head, the classes as config.json calls them; those of a task of GLUE's come into its order, in place."""
    called = families.read_json_object(folder / families.CONFIG_FILE).get("id2label")
    if isinstance(called, dict):
        names = list(called.values())
    else:
        names = []
    if len({str(name).lower() for name in names}) < max(2, len(names)) or names[0] == "LABEL_0":
        return {}
    found = {}
    for head, saved in heads_in_checkpoint(weights).items():
        if saved.kind == SPAN or head in (POOLER, NEXT_SENTENCE) or saved.outputs != len(names):
            continue
        words = [str(called.get(str(place), place)) for place in range(len(names))]
        lower = [word.lower() for word in words]
        labels = next((task.labels for task in TASKS.values() if task.head_name == head), ())
        if sorted(lower) == sorted(labels):
            for part in ("weight", "bias"):
                name = f"{PREFIX}{head}.out_proj.{part}"
                weights[name] = weights[name][[lower.index(label) for label in labels]]
        else:
            found[head] = TaskDescription(head, {}, (), tuple(words))
    return found


def _refuse_unused(flags: Sequence[str], path: Path) -> None:
    """Raises a UserError for the first flag that this kind of model has no use for."""
    kind = "a model of the Hub"
    used = ("--token-types", "--head-name")
    if is_ours(path):
        kind = "a checkpoint of this package"
        used = ()
    elif is_own(path):
        kind = "a LazyFormer that transformers saved"
        used = ("--head-name", "--tokenizer")
    for flag in flags:
        if flag not in used:
            raise UserError(f"{flag}: {path} is {kind}, which has no use for it; leave it out")


def is_ours(path: Path) -> bool:
    """Whether it is a checkpoint of this package, or a folder of such, by the looks of it."""
    if path.is_file():
        return path.suffix == ".pt" or path.name == checkpoints.WEIGHTS_FILE
    config = path / families.CONFIG_FILE
    if config.is_file():
        return families.read_json_object(config).get("format") == checkpoints.FORMAT
    return any((path / name).is_file() for name in CHECKPOINTS)


def _read_hub(
    folder: Path,
    tokenizer_folder: Path,
    token_types: str,
    head_name: Optional[str],
) -> tuple[MaskedLMOptions, dict[str, Tensor], TextTokenizer, list[str]]:
    """Options, weights, tokenizer (which is written to its folder), and notes."""
    if not folder.is_dir():
        raise UserError(
            f"{folder}: is a file, and no checkpoint of this package; give the folder with {families.CONFIG_FILE}"
        )
    described = families.describe(folder)
    conversion = Conversion(described, families.Weights(folder), token_types, head_name)
    tokenizer = adopt_tokenizer(folder, tokenizer_folder, described.vocab_size)
    dictionary = tokenizer.dictionary
    if described.family.counts_from_padding and dictionary.pad() != described.padding:
        raise UserError(
            f"{folder}: its tokenizer pads with id {dictionary.pad()}, {families.CONFIG_FILE} says {described.padding} "
            "(pad_token_id), from which its positions count"
        )
    options: dict[str, Any] = {
        **described.options,
        "sublayer_pattern": described.pattern(),
        "max_positions": described.positions - described.first_position,
        "token_types": conversion.token_types,
    }
    try:
        cfg = read_options(MaskedLMOptions, options)
        with torch.device("meta"):  # sizes first, without memory
            model = loading.model_of(cfg, dictionary)
            if conversion.classes:
                model.register_classification_head(conversion.head_name, conversion.classes)
            if conversion.has_spans:
                model.register_classification_head(conversion.head_name, 2, SPAN)
            if conversion.has_next_sentence:
                model.register_next_sentence_head()
            if conversion.has_pooler:
                model.register_pooler()
    except (ValueError, RuntimeError, TypeError, OverflowError) as error:
        raise UserError(f"{folder / families.CONFIG_FILE}: describes no model that can be built ({error})") from None
    weights = conversion.convert({name: weight.shape for name, weight in model.state_dict().items()})
    weights["dictionary_sha256"] = dictionary_hash(dictionary)
    return cfg, weights, tokenizer, conversion.notes()


class Conversion:
    """From one folder's names to ours.

    Args:
        described: its config.
        weights: its weights.
        token_types: KEEP them as a table of our model, FOLD those of the first type into the positions, or AUTO: keep
            where there are several.
        head_name: for the classification or span head; by default "classifier", or "squad", as task squad looks for.

    Attributes:
        token_types: rows of the table that our model gets.
        has_lm_head: whether the folder has a masked-LM head.
        has_next_sentence: whether it has BERT's head that tells whether a text follows another one.
        classes: of its classification head; 0 for none.
        has_spans: whether it has a head that tells where answers start and end.
        places: for each of our weights their names, one below the other.

    Raises:
        UserError: a weight is missing, or there is one that none of our models has.
    """

    def __init__(
        self,
        described: families.Described,
        weights: families.Weights,
        token_types: str,
        head_name: Optional[str],
    ):
        self.described = described
        self.weights = weights
        self._name_of = self._plain_names()
        self._check_layers()
        family = described.family
        rows = described.token_types
        width = described.options["encoder_embed_dim"]
        words, positions, types, _ = (f"{name}.weight" for name in family.embeddings)
        self._expect(words, (described.vocab_size, width), "vocab_size and the width")
        if family.embeddings[1]:
            self._expect(positions, (described.positions, width), "the positions and the width")
        if rows:
            self._expect(types, (rows, width), "type_vocab_size and the width")
        if token_types == KEEP or (token_types == AUTO and rows > 1):
            self.token_types = rows
        else:
            self.token_types = 0
        if rows and not self.token_types:
            self._folded = types
        else:
            self._folded = None
        # ModernBERT's classifiers have the head's dense map and LayerNorm too.
        if family.is_modern:
            signs = family.head[2]
        else:
            signs = family.head
        self.has_lm_head = any(name.startswith(signs) for name in self._name_of)
        self.classes = self._count_classes()
        self.has_spans = described.architecture.endswith("ForQuestionAnswering") and self._has_map(SPANS, 2)
        self.head_name = head_name or (SPAN_HEAD if self.has_spans else "classifier")
        self.has_pooler = bool(family.pooler) and f"{family.pooler}.weight" in self._name_of
        self.has_next_sentence = self.has_pooler and self._has_map(FOLLOWS, 2)
        self.places = dict(self._find_places())
        self._left_out = self._find_left_out()

    def notes(self) -> list[str]:
        """What a user should know of the result, a sentence each."""
        is_inexact = self._folded is not None and self._shape(self._folded)[0] > 1
        found = {
            "it has no masked-LM head, so that this one starts fresh: pre-train it before fill_mask": (
                not self.has_lm_head
            ),
            f"its {self.token_types} token types are kept: GLUE's pairs get them, single texts and masked LM have "
            "type 0": self.token_types,
            "its token types are folded into the positions, as type 0: single texts are exact, the second texts of "
            "pairs are not (--token-types keep)": is_inexact,
            f"its classifier of {self.classes} outputs is the classification head {self.head_name!r}": self.classes,
            f"its {SPANS} is the span head {self.head_name!r}: lazyformer predict asks it": self.has_spans,
            f"its {FOLLOWS} is the head {NEXT_SENTENCE!r}, on the pooler: --next-sentence goes on with it": (
                self.has_next_sentence
            ),
            f"its pooler is kept as the head {POOLER!r}: new dense classification heads start from it": self.has_pooler,
            f"left out: {', '.join(self._left_out)}": self._left_out,
        }
        return [note for note, holds in found.items() if holds]

    def convert(self, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
        """Our weights, in float32.

        Args:
            shapes: of our model's weights; what it has besides (the dictionary's hash) is left to the caller.

        Raises:
            UserError: a weight has another shape than the config says, or holds what is no number.
        """
        for ours, theirs in self.places.items():
            first, *others = (self._shape(name) for name in theirs)
            rows = sum(shape[0] if shape else 0 for shape in (first, *others)) - self._first_row(ours)
            if (rows, *first[1:]) != tuple(shapes[ours]) or not all(s and s[1:] == first[1:] for s in (first, *others)):
                raise UserError(
                    f"{self.weights.folder}: {self._name_of[theirs[0]]} is {first}, by config.json it must give "
                    f"{tuple(shapes[ours])}; download the folder again"
                )
        found = {}
        for ours, theirs in Progress(self.places.items(), desc="read", unit=" weights", delay=2, leave=False):
            found[ours] = torch.cat([self._read(name) for name in theirs])[self._first_row(ours) :].clone()
        if self._folded:
            found[families.POSITIONS] += self._read(self._folded)[0]
        if self.has_lm_head:
            self._check_decoder(found)
        else:
            found |= families.fresh_head(shapes)
        found[f"{families.HEAD}weight"] = found[families.WORDS]
        return found

    def _first_row(self, ours: str) -> int:
        """Rows before it are left out."""
        if ours == families.POSITIONS:
            return self.described.first_position
        return 0

    def _plain_names(self) -> dict[str, str]:
        """Names without prefix, and with LayerNorm's later names -> those in the file."""
        found: dict[str, str] = {}
        for name in self.weights.shapes:
            plain = name.removeprefix(self.described.family.prefix)
            for old, new in _OLD_NAMES.items():
                if plain.endswith(old):
                    plain = plain.removesuffix(old) + new
            if plain in found:
                raise UserError(f"{self.weights.folder}: {name} and {found[plain]} are the same weight; keep one")
            found[plain] = name
        return found

    def _check_layers(self) -> None:
        """Before anything counts up to a number that only config.json says."""
        start = f"{self.described.family.layers}."
        numbers = {name[len(start) :].split(".")[0] for name in self._name_of if name.startswith(start)}
        if len(numbers) != self.described.layers:
            raise UserError(
                f"{self.weights.folder}: has the weights of {len(numbers)} layers, config.json says "
                f"{self.described.layers}; download the folder again"
            )

    def _shape(self, name: str) -> tuple[int, ...]:
        if name not in self._name_of:
            family = self.described.family
            of_encoder = (
                "embeddings.",
                f"{family.layers}.",
                family.pooler or "pooler.",
                family.final_norm or "final_norm",
            )
            is_encoders = name.startswith(of_encoder)
            raise UserError(
                f"{self.weights.folder}: lacks the weight {family.prefix if is_encoders else ''}{name}; download the "
                "folder again, or save the model with transformers' save_pretrained"
            )
        return self.weights.shapes[self._name_of[name]]

    def _expect(self, name: str, shape: tuple[int, ...], what: str) -> None:
        if self._shape(name) != shape:
            raise UserError(
                f"{self.weights.folder}: {self._name_of[name]} is {self._shape(name)}, by config.json {what} are "
                f"{shape}; download the folder again"
            )

    def _read(self, name: str) -> Tensor:
        return self.weights.read(self._name_of[name])

    def _count_classes(self) -> int:
        if not self.described.architecture.endswith("ForSequenceClassification"):
            return 0
        for name in ("classifier.out_proj.weight", *(["classifier.weight"] if self.described.family.pooler else [])):
            if name in self._name_of:
                if 0 in self._shape(name) or not self._shape(name):
                    raise UserError(f"{self.weights.folder}: {name} is {self._shape(name)}; download the folder again")
                return self._shape(name)[0]
        return 0

    def _has_map(self, name: str, outputs: int) -> bool:
        shape = (outputs, self.described.options["encoder_embed_dim"])
        return self.weights.shapes.get(self._name_of.get(f"{name}.weight", "")) == shape

    def _find_places(self) -> Iterator[tuple[str, list[str]]]:
        family = self.described.family
        for ours, theirs in zip(
            (families.WORDS, families.POSITIONS, families.TYPES),
            family.embeddings[:3],
            strict=True,
        ):
            if theirs and (ours != families.TYPES or self.token_types):
                yield ours, [f"{theirs}.weight"]
        maps = list(family.maps(self.described.layers))
        head = f"{PREFIX}{self.head_name}."
        if self.has_lm_head:
            dense, head_norm, bias, decoder = family.head
            maps += [(f"{families.HEAD}dense", [dense]), (f"{families.HEAD}layer_norm", [head_norm])]
            has_bias = bias in self._name_of or f"{decoder}.bias" not in self._name_of
            yield f"{families.HEAD}bias", [bias if has_bias else f"{decoder}.bias"]
        if self.has_pooler:
            maps.append((f"{PREFIX}{POOLER}.dense", [family.pooler]))
        if self.has_next_sentence:
            maps.append((f"{PREFIX}{NEXT_SENTENCE}.dense", [family.pooler]))
            maps.append((f"{PREFIX}{NEXT_SENTENCE}.out_proj", [FOLLOWS]))
        if self.classes:  # BERT's pooler and linear map, or RoBERTa's two maps: our dense head
            is_roberta = "classifier.out_proj.weight" in self._name_of
            maps.append((f"{head}dense", ["classifier.dense" if is_roberta else family.pooler]))
            maps.append((f"{head}out_proj", ["classifier.out_proj" if is_roberta else "classifier"]))
        if self.has_spans:
            maps.append((f"{head}span_proj", [SPANS]))
        for ours, theirs in maps:
            for part in self.described.parts(ours):
                yield f"{ours}.{part}", [f"{name}.{part}" for name in theirs]

    def _find_left_out(self) -> list[str]:
        """Heads of other tasks; raises a UserError for a weight that computes something and has no place."""
        known = {name for theirs in self.places.values() for name in theirs}
        _, _, bias, decoder = self.described.family.head
        known |= {self._folded, bias, f"{decoder}.weight", f"{decoder}.bias"}
        others = [name for name in self._name_of if name not in known and not _BUFFERS.fullmatch(name)]
        unknown = [name for name in others if not _OTHER_HEADS.match(name)]
        if unknown:
            if len(unknown) > 1:
                more = f" and {len(unknown) - 1} more"
            else:
                more = ""
            raise UserError(
                f"{self.weights.folder}: has the weight {self._name_of[unknown[0]]}{more}, which no model of ours has: "
                "without it the model would compute something else"
            )
        return [self._name_of[name] for name in others]

    def _check_decoder(self, found: Mapping[str, Tensor]) -> None:
        """Raises a UserError where the head's output is not the word embedding, or it has two biases."""
        _, _, bias, decoder = self.described.family.head
        if not self.described.is_tied:
            self._shape(f"{decoder}.weight")  # must be there
        for name, ours in ((f"{decoder}.weight", families.WORDS), (f"{decoder}.bias", f"{families.HEAD}bias")):
            if name in self._name_of and not (
                self._shape(name) == found[ours].shape and torch.equal(self._read(name), found[ours])
            ):
                raise UserError(
                    f"{self.weights.folder}: {self._name_of[name]} differs from "
                    f"{'the word embeddings' if ours == families.WORDS else bias}: our masked-LM head is tied to them"
                )
