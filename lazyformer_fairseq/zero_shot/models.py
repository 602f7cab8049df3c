"""The language models that score sentences: ours, those that transformers loads, and counts of a corpus."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import numpy as np
import torch
from torch import Tensor, nn

from lazyformer_fairseq.arguments import checkpoint_at, named_path
from lazyformer_fairseq.data.count_model import CountModel, ngram, read_tokens
from lazyformer_fairseq.data.shards import data_folders, tokenizer_of
from lazyformer_fairseq.data.text.interface import TextTokenizer, cut_input
from lazyformer_fairseq.data.text.tokenizer import load_tokenizer
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation import checkpoints, loading
from lazyformer_fairseq.evaluation.costs.machine import PRECISIONS, device_named
from lazyformer_fairseq.extras import needs_transformers
from lazyformer_fairseq.storage.json_files import read_json
from lazyformer_fairseq.zero_shot.scoring import (
    CausalScorer,
    EncodedSentence,
    MaskedScorer,
    SentenceScorer,
    log_softmax_at,
)

NO_LIMIT = 10**6  # a tokenizer of transformers that knows no longest input names a larger number


@dataclass(frozen=True)
class ScorerSettings:
    """The way models are run.

    Attributes:
        masks_rest_of_word: see :class:`~lazyformer_fairseq.zero_shot.scoring.MaskedScorer`.
        device: cpu or cuda; None for cuda where there is one.
        precision: fp32, bf16 or fp16.
    """

    masks_rest_of_word: bool = False
    device: Optional[str] = None
    precision: str = "fp32"


def name_of(model: str) -> str:
    """Return the name that a MODEL argument has in reports: NAME of NAME=PATH, else the path's last parts."""
    name, path = named_path(model)
    if name:
        return name
    if path.name.startswith("checkpoint_"):
        path = path.parent
    return path.name or str(path)


def load_scorer(model: str, settings: ScorerSettings) -> SentenceScorer:
    """Load a MODEL argument.

    Args:
        model: a checkpoint, its folder or an export of ours, a folder that transformers loads, or the name of a model
            on its hub; ``NAME=`` may stand before it.
        settings: how it is run.

    Raises:
        UserError: there is no such model, it is damaged or no language model, or its tokenizer is missing.
    """
    name, path = named_path(model)
    if not path.exists():
        if name or path.suffix or path.is_absolute():
            raise UserError(f"{path}: no such file or folder")
        return _transformers_scorer(str(path), settings)
    config = path / "config.json"
    if config.is_file() and "model_type" in read_json(config):
        return _transformers_scorer(str(path), settings)
    return _own_scorer(checkpoint_at(path), settings)


def _own_scorer(checkpoint: Path, settings: ScorerSettings) -> SentenceScorer:
    tokenizer = loading.tokenizer_beside(checkpoint)
    state = checkpoints.load(checkpoint)
    model = _prepare(loading.build(state, tokenizer.dictionary, checkpoint), settings)
    if loading.is_causal(state):
        return OwnCausalLM(model, tokenizer)
    return OwnMaskedLM(model, tokenizer, settings.masks_rest_of_word)


def _prepare(model: nn.Module, settings: ScorerSettings) -> nn.Module:
    """Return a model ready to predict, on its device and in its precision."""
    return model.to(device_named(settings.device), PRECISIONS[settings.precision]).eval()


def _encode(tokenizer: TextTokenizer, sentence: str, longest: int) -> EncodedSentence:
    """Return ``<s> sentence </s>`` by a tokenizer of ours, cut to `longest` ids."""
    whole = np.array(tokenizer.build_input(sentence))
    ids = cut_input(whole, longest, tokenizer.special.eos)
    scored = np.arange(1, len(ids) - 1)
    return EncodedSentence(
        ids=ids,
        scored=scored,
        begins_word=tokenizer.starts_of_words(ids)[scored],
        is_cut=len(ids) < len(whole),
        unknown=int((whole == tokenizer.special.unk).sum()),
    )


class OwnMaskedLM(MaskedScorer):
    """A masked LM of this package."""

    def __init__(self, model: nn.Module, tokenizer: TextTokenizer, masks_rest_of_word: bool = False):
        super().__init__(tokenizer.special.mask, masks_rest_of_word)
        self.model = model
        self.tokenizer = tokenizer

    def weights(self) -> Mapping[str, Tensor]:
        """Return the weights of the model."""
        return self.model.state_dict()

    def encode(self, sentence: str) -> EncodedSentence:
        """Return ``<s> sentence </s>``."""
        return _encode(self.tokenizer, sentence, self.model.max_positions())

    @torch.inference_mode()
    def log_probabilities(self, ids_BT: np.ndarray, places: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Return log P of a target at a place in each row, (B,); the head computes these places alone."""
        device = self.model.dictionary_sha256.device
        rows, length = ids_BT.shape
        at_places = torch.from_numpy(np.arange(rows) * length + places).to(device)
        logits_BV, _ = self.model(torch.from_numpy(ids_BT).to(device), masked_tokens=at_places, has_padding=False)
        return log_softmax_at(logits_BV, targets)


class OwnCausalLM(CausalScorer):
    """A causal LM of this package, which reads ``</s> sentence``."""

    def __init__(self, model: nn.Module, tokenizer: TextTokenizer):
        self.model = model
        self.tokenizer = tokenizer

    def weights(self) -> Mapping[str, Tensor]:
        """Return the weights of the model."""
        return self.model.state_dict()

    def encode(self, sentence: str) -> EncodedSentence:
        """Return ``</s> sentence``: each text of the training data begins behind the ``</s>`` of the one before."""
        encoded = _encode(self.tokenizer, sentence, longest=NO_LIMIT)
        ids = np.concatenate([[self.tokenizer.special.eos], encoded.ids[encoded.scored]])
        return EncodedSentence(ids, encoded.scored, encoded.begins_word, unknown=encoded.unknown)

    @torch.inference_mode()
    def token_log_probabilities(self, ids_BT: np.ndarray) -> np.ndarray:
        """Return log P of each token but the first, (B, T - 1)."""
        ids = torch.from_numpy(ids_BT).to(self.model.dictionary_sha256.device)
        nll_BT, _ = self.model(ids[:, :-1], target=ids[:, 1:])
        return -nll_BT.double().cpu().numpy()


class CountScorer(CausalScorer):
    """An n-gram model of a corpus, over the tokens of its tokenizer.

    Args:
        corpus: what `lazyformer corpus` wrote.
        order: n.
    """

    def __init__(self, corpus: Path, order: int):
        folders = data_folders(str(corpus))
        self.tokenizer = load_tokenizer(tokenizer_of(folders[0]))
        self.text = read_tokens((Path(folder) / "train" for folder in folders), most=sys.maxsize)
        self.model = CountModel(ngram(order), len(self.tokenizer.symbols), self.text)
        self.method = f"log-likelihood by interpolated counts, n = {order}"

    def weights(self) -> Mapping[str, Tensor]:
        """Return the text that was counted."""
        return {"text": torch.from_numpy(self.text)}

    def encode(self, sentence: str) -> EncodedSentence:
        """Return ``</s> sentence``."""
        encoded = _encode(self.tokenizer, sentence, longest=NO_LIMIT)
        ids = np.concatenate([[self.tokenizer.special.eos], encoded.ids[encoded.scored]])
        return EncodedSentence(ids, encoded.scored, encoded.begins_word, unknown=encoded.unknown)

    def token_log_probabilities(self, ids_BT: np.ndarray) -> np.ndarray:
        """Return log P of each token but the first, (B, T - 1)."""
        at_BT = np.ones(ids_BT.shape, dtype=bool)
        at_BT[:, 0] = False
        targets = ids_BT[at_BT]
        return self.model.log_probabilities(ids_BT, at_BT, targets).reshape(len(ids_BT), -1)


def _transformers_scorer(name: str, settings: ScorerSettings) -> SentenceScorer:
    """Load a masked or a causal LM by transformers, without running code from its folder."""
    needs_transformers(f"evaluating {name}")
    import transformers
    from safetensors import SafetensorError

    import lazyformer_fairseq.huggingface  # noqa: F401 - makes transformers know our own exports

    try:
        config = transformers.AutoConfig.from_pretrained(name)
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        is_masked = type(config) in transformers.MODEL_FOR_MASKED_LM_MAPPING
        is_causal = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
        architectures = config.architectures or []
        if is_masked and (not is_causal or any(each.endswith("MaskedLM") for each in architectures)):
            model = transformers.AutoModelForMaskedLM.from_pretrained(name)
        elif is_causal:
            model = transformers.AutoModelForCausalLM.from_pretrained(name)
        else:
            raise UserError(f"{name}: transformers has no masked and no causal LM of type {config.model_type}")
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        if isinstance(error, UserError):
            raise
        reason = str(error).strip().split("\n", maxsplit=1)[0]
        raise UserError(f"{name}: transformers cannot load it ({reason})") from None
    model = _prepare(model, settings)
    if isinstance(model, tuple(transformers.MODEL_FOR_MASKED_LM_MAPPING.values())):
        if tokenizer.mask_token_id is None:
            raise UserError(f"{name}: its tokenizer has no mask token, which scoring a masked LM needs")
        return TransformersMaskedLM(model, tokenizer, settings.masks_rest_of_word)
    return TransformersCausalLM(model, tokenizer)


def _encode_by_transformers(tokenizer: Any, sentence: str, longest: Optional[int]) -> EncodedSentence:
    """Return a sentence as a tokenizer of transformers encodes it, special tokens included."""
    whole = tokenizer(sentence)["input_ids"]
    is_cut = longest is not None and len(whole) > longest
    encoding = tokenizer(
        sentence,
        truncation=is_cut,
        max_length=longest if is_cut else None,
        return_special_tokens_mask=True,
    )
    ids = np.array(encoding["input_ids"], dtype=np.int64)
    scored = np.flatnonzero(np.array(encoding["special_tokens_mask"]) == 0)
    begins_word = np.ones(len(scored), dtype=bool)
    if tokenizer.is_fast:
        words = np.array([encoding.word_ids()[place] for place in scored])
        begins_word[1:] = words[1:] != words[:-1]
    unknown = 0
    if tokenizer.unk_token_id is not None:
        unknown = int((ids[scored] == tokenizer.unk_token_id).sum())
    return EncodedSentence(ids, scored, begins_word, is_cut, unknown)


def _longest_of(model: Any, tokenizer: Any) -> Optional[int]:
    """Return how many tokens a model reads, by its tokenizer or else its positions; None for any number."""
    if tokenizer.model_max_length < NO_LIMIT:
        return tokenizer.model_max_length
    return getattr(model.config, "max_position_embeddings", None)


class TransformersMaskedLM(MaskedScorer):
    """A masked LM of transformers."""

    def __init__(self, model: Any, tokenizer: Any, masks_rest_of_word: bool = False):
        super().__init__(tokenizer.mask_token_id, masks_rest_of_word)
        if masks_rest_of_word and not tokenizer.is_fast:
            raise UserError(
                f"{tokenizer.name_or_path}: its tokenizer does not say where words begin, which --mask-rest-of-word "
                "needs; leave the option out"
            )
        self.model = model
        self.tokenizer = tokenizer

    def weights(self) -> Mapping[str, Tensor]:
        """Return the weights of the model."""
        return self.model.state_dict()

    def encode(self, sentence: str) -> EncodedSentence:
        """Return a sentence between the special tokens of the model."""
        return _encode_by_transformers(self.tokenizer, sentence, _longest_of(self.model, self.tokenizer))

    @torch.inference_mode()
    def log_probabilities(self, ids_BT: np.ndarray, places: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Return log P of a target at a place in each row, (B,)."""
        ids = torch.from_numpy(ids_BT).to(self.model.device)
        logits_BTV = self.model(input_ids=ids).logits
        return log_softmax_at(logits_BTV[torch.arange(len(ids)), torch.from_numpy(places)], targets)


class TransformersCausalLM(CausalScorer):
    """A causal LM of transformers."""

    def __init__(self, model: Any, tokenizer: Any):
        self.model = model
        self.tokenizer = tokenizer
        self.first = tokenizer.bos_token_id
        if self.first is None:
            self.first = tokenizer.eos_token_id
        if self.first is None:
            raise UserError(f"{tokenizer.name_or_path}: its tokenizer has no token that a text begins with")

    def weights(self) -> Mapping[str, Tensor]:
        """Return the weights of the model."""
        return self.model.state_dict()

    def encode(self, sentence: str) -> EncodedSentence:
        """Return a sentence behind the token that a text begins with, by which the first word is predicted."""
        longest = _longest_of(self.model, self.tokenizer)
        encoded = _encode_by_transformers(self.tokenizer, sentence, longest)
        own = encoded.ids[encoded.scored]
        if longest is not None:
            own = own[: longest - 1]
        return EncodedSentence(
            ids=np.concatenate([[self.first], own]),
            scored=np.arange(1, len(own) + 1),
            begins_word=encoded.begins_word[: len(own)],
            is_cut=encoded.is_cut or len(own) < len(encoded.scored),
            unknown=encoded.unknown,
        )

    @torch.inference_mode()
    def token_log_probabilities(self, ids_BT: np.ndarray) -> np.ndarray:
        """Return log P of each token but the first, (B, T - 1)."""
        ids = torch.from_numpy(ids_BT).to(self.model.device)
        logits_BTV = self.model(input_ids=ids[:, :-1]).logits
        targets = ids_BT[:, 1:]
        return log_softmax_at(logits_BTV.flatten(0, 1), targets.flatten()).reshape(targets.shape)
