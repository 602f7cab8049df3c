"""Weights of a BERT -> those of our model, by name. What has no place in ours is named, or refused."""

import re
from collections.abc import Iterator
from typing import NamedTuple, Optional

import torch
from torch import Tensor
from tqdm import tqdm

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.models.checkpoint_match import PREFIX
from lazyformer_fairseq.huggingface.hub_folder import (
    ENCODER,
    HEAD,
    POSITIONS,
    SENTENCE_CLASSIFIER,
    SPAN_READER,
    TYPES,
    WORDS,
    Described,
    Weights,
)
from lazyformer_fairseq.modules.networks.heads import NEXT_SENTENCE, POOLER

KEEP, FOLD, AUTO = "keep", "fold", "auto"
SPANS, FOLLOWS = "qa_outputs", "cls.seq_relationship"  # heads beside the masked-LM head and the classifier
SPAN_HEAD = "squad"  # what task squad calls its head
SEED = 1  # of a head that starts fresh
_BUFFERS = re.compile(r"embeddings\.(position_ids|token_type_ids)")
# Heads of other tasks, which have no place in ours.
_OTHER_HEADS = re.compile(r"(cls\.seq_relationship|qa_outputs|classifier|pre_classifier)\.")
_OLD_NAMES = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
_PARTS = ("weight", "bias")


class Place(NamedTuple):
    """Where one of our weights comes from.

    Attributes:
        theirs: their names, one below the other.
        first_row: rows before it are left out.
    """

    theirs: list[str]
    first_row: int = 0


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

    Raises:
        UserError: a weight is missing, or there is one that none of our models has.
    """

    def __init__(
        self, described: Described, weights: Weights, token_types: str = AUTO, head_name: Optional[str] = None
    ):
        self.described, self.weights = described, weights
        self._name_of = self._plain_names()
        self._check_layers()
        family = described.family
        words, positions, types, _ = (f"{name}.weight" for name in family.embeddings)
        width = described.options["encoder_embed_dim"]
        self._expect(words, (described.vocab_size, width), "vocab_size and the width")
        self._expect(positions, (described.positions, width), "the positions and the width")
        rows = described.token_types
        if rows:
            self._expect(types, (rows, width), "type_vocab_size and the width")
        self.token_types = rows if token_types == KEEP or (token_types == AUTO and rows > 1) else 0
        self._folded = types if rows and not self.token_types else None
        self.has_lm_head = any(name.startswith(family.head) for name in self._name_of)
        self.classes = self._count_classes()
        self.has_spans = self.described.architecture.endswith(SPAN_READER) and self._has_map(SPANS, 2)
        self.head_name = head_name or (SPAN_HEAD if self.has_spans else "classifier")
        self.has_pooler = bool(family.pooler) and f"{family.pooler}.weight" in self._name_of
        self.has_next_sentence = self.has_pooler and self._has_map(FOLLOWS, 2)
        self.places = dict(self._find_places())
        self._refuse_others()

    def notes(self) -> list[str]:
        """What a user should know of the result, a sentence each."""
        found = []
        if not self.has_lm_head:
            found.append("it has no masked-LM head, so that this one starts fresh: pre-train it before fill_mask")
        if self.token_types:
            found.append(
                f"its {self.token_types} token types are kept: GLUE's pairs get them, single texts and masked LM have "
                "type 0"
            )
        elif self._folded and self._shape(self._folded)[0] > 1:
            found.append(
                "its token types are folded into the positions, as type 0: single texts are exact, the second texts of "
                "pairs are not (--token-types keep)"
            )
        if self.classes:
            found.append(f"its classifier of {self.classes} outputs is the classification head {self.head_name!r}")
        if self.has_spans:
            found.append(f"its {SPANS} is the span head {self.head_name!r}: lazyformer predict asks it")
        if self.has_next_sentence:
            found.append(f"its {FOLLOWS} is the head {NEXT_SENTENCE!r}, on the pooler: --next-sentence goes on with it")
        if self.has_pooler:
            found.append(f"its pooler is kept as the head {POOLER!r}: new dense classification heads start from it")
        if self._left_out:
            found.append(f"left out: {', '.join(self._left_out)}")
        return found

    def convert(self, shapes: dict[str, torch.Size]) -> dict[str, Tensor]:
        """Our weights, in float32.

        Args:
            shapes: of our model's weights; what it has besides (the dictionary's hash) is left to the caller.

        Raises:
            UserError: a weight has another shape than the config says, or holds what is no number.
        """
        for ours, place in self.places.items():
            found = self._converted_shape(place)
            if tuple(shapes[ours]) != found:
                raise UserError(
                    f"{self.weights.folder}: {self._name_of[place.theirs[0]]} is {self._shape(place.theirs[0])}, by "
                    f"config.json it must give {tuple(shapes[ours])}; download the folder again"
                )
        found = {}
        for ours, place in tqdm(self.places.items(), desc="read", unit=" weights", delay=2, disable=None, leave=False):
            found[ours] = torch.cat([self._read(name) for name in place.theirs])[place.first_row :].clone()
        if self._folded:
            found[POSITIONS] += self._read(self._folded)[0]
        if self.has_lm_head:
            self._check_decoder(found)
        else:
            found |= _fresh_head(shapes)
        found[f"{HEAD}weight"] = found[WORDS]
        return found

    def _plain_names(self) -> dict[str, str]:
        """Names without prefix, and with LayerNorm's later names -> those in the file."""
        found: dict[str, str] = {}
        for name in self.weights.shapes:
            plain = name.removeprefix(self.described.family.prefix)
            for old, new in _OLD_NAMES.items():
                plain = re.sub(rf"{re.escape(old)}$", new, plain)
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
            is_encoders = name.startswith(("embeddings.", f"{family.layers}.", family.pooler or "pooler."))
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
        if not self.described.architecture.endswith(SENTENCE_CLASSIFIER):
            return 0
        for name in ("classifier.out_proj.weight", "classifier.weight"):
            if name in self._name_of and "pre_classifier.weight" not in self._name_of:
                if 0 in self._shape(name) or not self._shape(name):
                    raise UserError(f"{self.weights.folder}: {name} is {self._shape(name)}; download the folder again")
                return self._shape(name)[0]
        return 0

    def _has_map(self, name: str, outputs: int) -> bool:
        shape = (outputs, self.described.options["encoder_embed_dim"])
        return self.weights.shapes.get(self._name_of.get(f"{name}.weight", "")) == shape

    def _find_places(self) -> Iterator[tuple[str, Place]]:
        family = self.described.family
        words, positions, types, norm = family.embeddings
        yield WORDS, Place([f"{words}.weight"])
        yield POSITIONS, Place([f"{positions}.weight"], self.described.first_position)
        if self.token_types:
            yield TYPES, Place([f"{types}.weight"])
        maps = [(f"{ENCODER}embedding_layer_norm", [norm])]
        for number in range(self.described.layers):
            maps += family.layer(number)
        if self.has_lm_head:
            dense, head_norm, bias, decoder = family.head
            maps += [(f"{HEAD}dense", [dense]), (f"{HEAD}layer_norm", [head_norm])]
            has_bias = bias in self._name_of or f"{decoder}.bias" not in self._name_of
            yield f"{HEAD}bias", Place([bias if has_bias else f"{decoder}.bias"])
        if self.has_pooler:
            maps.append((f"{PREFIX}{POOLER}.dense", [family.pooler]))
        if self.has_next_sentence:
            head = f"{PREFIX}{NEXT_SENTENCE}."
            maps += [(f"{head}dense", [family.pooler]), (f"{head}out_proj", [FOLLOWS])]
        if self.classes:
            maps += self._classifier()
        if self.has_spans:
            maps.append((f"{PREFIX}{self.head_name}.span_proj", [SPANS]))
        for ours, theirs in maps:
            for part in _PARTS:
                yield f"{ours}.{part}", Place([f"{name}.{part}" for name in theirs])

    def _classifier(self) -> list[tuple[str, list[str]]]:
        """BERT's pooler and linear map, or RoBERTa's two maps: our dense head."""
        is_roberta = "classifier.out_proj.weight" in self._name_of
        dense = "classifier.dense" if is_roberta else self.described.family.pooler
        output = "classifier.out_proj" if is_roberta else "classifier"
        return [(f"{PREFIX}{self.head_name}.dense", [dense]), (f"{PREFIX}{self.head_name}.out_proj", [output])]

    def _refuse_others(self) -> None:
        """Raises a UserError for a weight that computes something and has no place."""
        known = {name for place in self.places.values() for name in place.theirs}
        _, _, bias, decoder = self.described.family.head
        known |= {self._folded, bias, f"{decoder}.weight", f"{decoder}.bias"}
        others = [name for name in self._name_of if name not in known and not _BUFFERS.fullmatch(name)]
        unknown = [name for name in others if not _OTHER_HEADS.match(name)]
        if unknown:
            more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
            raise UserError(
                f"{self.weights.folder}: has the weight {self._name_of[unknown[0]]}{more}, which no model of ours has: "
                "without it the model would compute something else"
            )
        self._left_out = [self._name_of[name] for name in others]

    def _converted_shape(self, place: Place) -> Optional[tuple[int, ...]]:
        """None where the parts cannot stand one below the other."""
        first, *others = (self._shape(name) for name in place.theirs)
        if not first or any(shape[1:] != first[1:] or not shape for shape in others):
            return None
        return sum(self._shape(name)[0] for name in place.theirs) - place.first_row, *first[1:]

    def _check_decoder(self, found: dict[str, Tensor]) -> None:
        """Raises a UserError where the head's output is not the word embedding, or it has two biases."""
        _, _, bias, decoder = self.described.family.head
        if not self.described.is_tied:
            self._shape(f"{decoder}.weight")  # must be there
        for name, ours in ((f"{decoder}.weight", WORDS), (f"{decoder}.bias", f"{HEAD}bias")):
            if name in self._name_of and not (
                self._shape(name) == found[ours].shape and torch.equal(self._read(name), found[ours])
            ):
                raise UserError(
                    f"{self.weights.folder}: {self._name_of[name]} differs from "
                    f"{'the word embeddings' if ours == WORDS else bias}: our masked-LM head is tied to them"
                )


def _fresh_head(shapes: dict[str, torch.Size]) -> dict[str, Tensor]:
    """A masked-LM head as BERT initialises it; the same each time."""
    width = shapes[f"{HEAD}layer_norm.weight"]
    generator = torch.Generator().manual_seed(SEED)
    return {
        f"{HEAD}dense.weight": torch.empty(shapes[f"{HEAD}dense.weight"]).normal_(std=0.02, generator=generator),
        f"{HEAD}dense.bias": torch.zeros(width),
        f"{HEAD}layer_norm.weight": torch.ones(width),
        f"{HEAD}layer_norm.bias": torch.zeros(width),
        f"{HEAD}bias": torch.zeros(shapes[f"{HEAD}bias"]),
    }
