"""Language models that score sentences: this package's models, transformers' models, and n-gram models of a corpus."""

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lazyformer_fairseq.arguments import checkpoint_at, named_path
from lazyformer_fairseq.data.count_model import CountModel, ngram, read_tokens
from lazyformer_fairseq.data.shards import data_folders, tokenizer_of
from lazyformer_fairseq.data.text.interface import TextTokenizer, cut_input
from lazyformer_fairseq.data.text.tokenizer import load_tokenizer
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation import checkpoints, loading
from lazyformer_fairseq.extras import needs_transformers
from lazyformer_fairseq.storage.json_files import read_json
from lazyformer_fairseq.zero_shot.scoring import EncodedSentence, LanguageModel

PSEUDO = "pseudo-log-likelihood"
NO_LIMIT = 10**6  # a transformers tokenizer without a maximum length reports a larger number

Prepare = Callable[[nn.Module], nn.Module]  # moves a model to the device and converts it to the requested precision


def name_of(model: str) -> str:
    """Return a model's name in reports: the NAME in NAME=PATH, or else the last component of the path."""
    name, path = named_path(model)
    if name:
        return name
    if path.name.startswith("checkpoint_"):
        path = path.parent
    return path.name or str(path)


def load_model(model: str, prepare: Prepare) -> LanguageModel:
    """Load a language model from a MODEL argument.

    Args:
        model: a checkpoint from this package, its folder, an export, a folder that transformers can load, or the name
            of a model on the Hugging Face Hub; optionally prefixed by ``NAME=``.
        prepare: moves the model to the device and converts it to the requested precision.

    Raises:
        UserError: the model does not exist, is damaged or is not a language model, or its tokenizer is missing.
    """
    name, path = named_path(model)
    if not path.exists() and (name or path.suffix or path.is_absolute()):
        raise UserError(f"{path}: no such file or folder")
    config = path / "config.json"
    if not path.exists() or (config.is_file() and "model_type" in read_json(config)):
        return _load_by_transformers(str(path), prepare)
    return _load_own(checkpoint_at(path), prepare)


def count_model(corpus: Path, order: int) -> LanguageModel:
    """Train an n-gram model on a corpus's training text, using the corpus's tokenizer."""
    folders = data_folders(str(corpus))
    tokenizer = load_tokenizer(tokenizer_of(folders[0]))
    text = read_tokens((Path(folder) / "train" for folder in folders), most=sys.maxsize)
    return LanguageModel(
        encode=lambda sentence: _encode(tokenizer, sentence, NO_LIMIT, tokenizer.special.eos),
        log_probabilities=CountModel(ngram(order), len(tokenizer.symbols), text).log_probabilities,
        weights={"text": torch.from_numpy(text)},
        name=f"log-likelihood by interpolated counts, n = {order}",
    )


def _load_own(checkpoint: Path, prepare: Prepare) -> LanguageModel:
    """Load one of this package's models; causal models read ``</s> sentence``, as if another text had just ended."""
    tokenizer = loading.load_tokenizer_beside(checkpoint)
    state = checkpoints.load(checkpoint)
    model = prepare(loading.build(state, tokenizer.dictionary, checkpoint))
    device = model.dictionary_sha256.device

    @torch.inference_mode()
    def masked(ids_BT: np.ndarray, at_BT: np.ndarray, targets: np.ndarray) -> np.ndarray:
        ids = torch.from_numpy(ids_BT).to(device)
        places = torch.from_numpy(np.flatnonzero(at_BT)).to(device)
        logits_MV, _ = model(ids, masked_tokens=places, has_padding=False)
        return log_softmax_at(logits_MV, targets)

    @torch.inference_mode()
    def causal(ids_BT: np.ndarray, at_BT: np.ndarray, _targets: np.ndarray) -> np.ndarray:
        ids = torch.from_numpy(ids_BT).to(device)
        nll_BT, _ = model(ids[:, :-1], target=ids[:, 1:])
        return -nll_BT.double().cpu().numpy()[at_BT[:, 1:]]

    if loading.is_causal(state):
        first = tokenizer.special.eos
        return LanguageModel(
            encode=lambda sentence: _encode(tokenizer, sentence, NO_LIMIT, first),
            log_probabilities=causal,
            weights=model.state_dict(),
        )
    return LanguageModel(
        encode=lambda sentence: _encode(tokenizer, sentence, model.max_positions()),
        log_probabilities=masked,
        weights=model.state_dict(),
        mask=tokenizer.special.mask,
        name=PSEUDO,
    )


def _encode(tokenizer: TextTokenizer, sentence: str, longest: int, first: Optional[int] = None) -> EncodedSentence:
    """Encode ``<s> sentence </s>``, truncated to `longest` ids; if `first` is not None, it replaces ``<s>``."""
    whole = np.array(tokenizer.build_input(sentence))
    ids = cut_input(whole, longest, tokenizer.special.eos)
    is_scored = np.ones(len(ids), dtype=bool)
    is_scored[[0, -1]] = False
    begins_word = tokenizer.starts_of_words(ids)
    if first is not None:
        ids[0] = first
    return EncodedSentence(
        ids=ids,
        is_scored=is_scored,
        begins_word=begins_word,
        is_cut=len(ids) < len(whole),
        is_unknown=tokenizer.special.unk in whole,
    )


def log_softmax_at(logits_MV: Tensor, targets: np.ndarray) -> np.ndarray:
    """Return the log-probabilities of the targets, float64 (M,)."""
    wanted = torch.from_numpy(targets).to(logits_MV.device)
    nll_M = F.cross_entropy(logits_MV.float(), wanted, reduction="none")
    return -nll_M.double().cpu().numpy()


def _load_by_transformers(name: str, prepare: Prepare) -> LanguageModel:
    """Load a masked or causal LM with transformers, without running code from its folder."""
    needs_transformers(f"evaluating {name}")
    import transformers
    from safetensors import SafetensorError

    import lazyformer_fairseq.huggingface  # noqa: F401 - registers our own exports with transformers

    try:
        config = transformers.AutoConfig.from_pretrained(name)
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        is_causal = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
        if type(config) in transformers.MODEL_FOR_MASKED_LM_MAPPING:
            is_causal = is_causal and not any(each.endswith("MaskedLM") for each in config.architectures or ())
        elif not is_causal:
            raise UserError(f"{name}: transformers has neither a masked nor a causal LM of type {config.model_type}")
        auto = transformers.AutoModelForCausalLM if is_causal else transformers.AutoModelForMaskedLM
        model = prepare(auto.from_pretrained(name))
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        if isinstance(error, UserError):
            raise
        reason = str(error).strip().split("\n", maxsplit=1)[0]
        raise UserError(f"{name}: transformers cannot load the model ({reason})") from None
    first = None
    if is_causal:
        first = tokenizer.bos_token_id
        if first is None:
            first = tokenizer.eos_token_id
    if first is None and (is_causal or tokenizer.mask_token_id is None):
        wanted = "beginning-of-text token" if is_causal else "mask token"
        raise UserError(f"{name}: the tokenizer has no {wanted}, which is needed for scoring")

    @torch.inference_mode()
    def log_probabilities(ids_BT: np.ndarray, at_BT: np.ndarray, targets: np.ndarray) -> np.ndarray:
        logits_BTV = model(input_ids=torch.from_numpy(ids_BT).to(model.device)).logits
        is_target_BT = torch.from_numpy(at_BT)
        if is_causal:
            logits_BTV = logits_BTV[:, :-1]
            is_target_BT = is_target_BT[:, 1:]
        return log_softmax_at(logits_BTV[is_target_BT], targets)

    longest = tokenizer.model_max_length
    if longest >= NO_LIMIT:
        longest = getattr(config, "max_position_embeddings", NO_LIMIT)
    if is_causal:
        return LanguageModel(
            encode=lambda sentence: _encode_by_transformers(tokenizer, sentence, longest, first),
            log_probabilities=log_probabilities,
            weights=model.state_dict(),
        )
    return LanguageModel(
        encode=lambda sentence: _encode_by_transformers(tokenizer, sentence, longest),
        log_probabilities=log_probabilities,
        weights=model.state_dict(),
        mask=tokenizer.mask_token_id,
        name=PSEUDO,
    )


def _encode_by_transformers(
    tokenizer: Any,
    sentence: str,
    longest: int,
    first: Optional[int] = None,
) -> EncodedSentence:
    """Encode a sentence with a transformers tokenizer, truncated to `longest` ids.

    If `first` is an id, it precedes the sentence instead of the tokenizer's special tokens, and the first token is
    predicted from it. Otherwise the sentence is enclosed in the tokenizer's special tokens.
    """
    encoding = tokenizer(sentence, return_special_tokens_mask=True)
    is_cut = len(encoding["input_ids"]) > longest
    if is_cut:
        encoding = tokenizer(sentence, return_special_tokens_mask=True, truncation=True, max_length=longest)
    ids = np.array(encoding["input_ids"], dtype=np.int64)
    is_scored = np.array(encoding["special_tokens_mask"]) == 0
    begins_word = np.ones(len(ids), dtype=bool)
    if tokenizer.is_fast:
        words = encoding.word_ids()
        for place, (before, word) in enumerate(itertools.pairwise(words), start=1):
            begins_word[place] = word is None or word != before
    if first is not None:
        own = np.flatnonzero(is_scored)
        is_cut = is_cut or len(own) >= longest
        own = own[: longest - 1]
        ids = np.concatenate([[first], ids[own]])
        is_scored = np.arange(len(ids)) > 0
        begins_word = np.concatenate([[True], begins_word[own]])
    unknown = tokenizer.unk_token_id
    is_unknown = unknown is not None and bool((ids[is_scored] == unknown).any())
    return EncodedSentence(ids, is_scored, begins_word, is_cut, is_unknown)
