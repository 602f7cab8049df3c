"""Scores of sentences: by hand, against plain loops over transformers' models, and whatever the batch."""

import math

import numpy as np
import pytest
import torch
from helpers import ROOT
from hypothesis import given
from hypothesis import strategies as st
from in_process import invoke

import lazyformer_fairseq
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.zero_shot.models import load_model, name_of
from lazyformer_fairseq.zero_shot.scoring import EncodedSentence, LanguageModel, score

ENCODER = ROOT / "tests/fixtures/checkpoints/encoder"
SENTENCES = ["Anna sees Ben near the river.", "The old house of Otto.", "Otto sees the river.", "Ben."]
MASK = 99


def encode_by_hand(sentence: str) -> EncodedSentence:
    """Ids are numbers; 5+6 is a word of two tokens."""
    ids = np.array([0, *map(int, sentence.replace("+", " ").split()), 0])
    words = [is_first for group in sentence.split() for is_first in [True, *[False] * group.count("+")]]
    is_scored = np.array([False, *[True] * len(words), False])
    return EncodedSentence(ids, is_scored, np.array([True, *words, True]))


def count_what_is_visible(ids_BT, at_BT, targets):
    """A masked model that gives a token one over one more than the number of tokens that it can see."""
    assert (ids_BT[at_BT] == MASK).all()
    assert (targets < MASK).all()
    return -np.log(1 + (ids_BT != MASK).sum(axis=1))


@pytest.mark.parametrize(
    ("masks_rest_of_word", "sentence", "visible"),
    [
        (False, "5 6 7", [4, 4, 4]),
        (False, "5+6+7 8", [5, 5, 5, 5]),
        (True, "5 6 7", [4, 4, 4]),
        (True, "5+6+7 8", [3, 4, 5, 5]),
        (True, "5 6+7", [4, 3, 4]),
    ],
)
def test_pseudo_log_likelihoods_by_hand(masks_rest_of_word, sentence, visible):
    """Each token is masked in turn; with the option, the tokens of its word on the right of it are masked too."""
    model = LanguageModel(encode_by_hand, count_what_is_visible, {}, mask=MASK)
    scores = score(model, [sentence], "by hand", masks_rest_of_word=masks_rest_of_word)
    assert scores.nats[sentence] == pytest.approx(-sum(math.log(1 + count) for count in visible))


def test_log_likelihoods_by_hand():
    """A causal model, whose next token is the same as the last one with a probability of 0.75."""

    def encode(sentence):
        ids = np.array([0, *map(int, sentence.split())])
        return EncodedSentence(ids, np.arange(len(ids)) > 0, np.ones(len(ids), dtype=bool))

    def log_probabilities(ids_BT, at_BT, targets):
        assert (targets == ids_BT[at_BT]).all()
        return np.log(np.where(ids_BT[:, 1:] == ids_BT[:, :-1], 0.75, 0.25))[at_BT[:, 1:]]

    scores = score(LanguageModel(encode, log_probabilities, {}), ["0 0", "1 0 1"], "by hand")
    assert scores.nats["0 0"] == pytest.approx(2 * math.log(0.75)), "the first token is predicted too"
    assert scores.nats["1 0 1"] == pytest.approx(3 * math.log(0.25))
    assert scores.tokens == 5


def load(model: object) -> LanguageModel:
    return load_model(str(model), torch.nn.Module.eval)


@pytest.fixture(scope="module")
def own():
    return load(ENCODER)


@given(
    chosen=st.lists(st.sampled_from(SENTENCES), min_size=1, unique=True),
    max_tokens=st.sampled_from([1, 30, 10_000]),
)
def test_a_score_does_not_depend_on_the_batch(own, chosen, max_tokens):
    """Neither on the sentences beside it nor on how many tokens are read at once."""
    alone = {sentence: score(own, [sentence], "alone").nats[sentence] for sentence in chosen}
    together = score(own, chosen, "together", max_tokens).nats
    for sentence in chosen:
        assert together[sentence] == pytest.approx(alone[sentence], abs=1e-5)


def test_our_masked_lm_against_a_plain_loop(own):
    """The same sum, token after token, from the logits of all positions."""
    trained = lazyformer_fairseq.load(ENCODER)
    for sentence in SENTENCES:
        ids = trained.encode(sentence)
        total = 0.0
        for place in range(1, ids.size(1) - 1):
            masked = ids.clone()
            masked[0, place] = trained.tokenizer.mask_index
            with torch.no_grad():
                logits, _ = trained.model(masked)
            total += logits[0, place].log_softmax(-1)[ids[0, place]].item()
        assert score(own, [sentence], "own").nats[sentence] == pytest.approx(total, abs=1e-5)


def test_exports_score_as_their_checkpoints(own, tmp_path):
    """Ours, and transformers', which asks nothing; a causal one is loaded too."""
    pytest.importorskip("transformers")
    expected = score(own, SENTENCES, "own").nats
    invoke("export", ENCODER, tmp_path / "own")
    invoke("export", ENCODER, tmp_path / "theirs", "--to", "huggingface")
    assert score(load(tmp_path / "own"), SENTENCES, "own").nats == expected
    assert score(load(tmp_path / "theirs"), SENTENCES, "theirs").nats == pytest.approx(expected, abs=1e-5)
    invoke("export", ROOT / "tests/fixtures/checkpoints/language_model", tmp_path / "causal", "--to", "huggingface")
    causal = load(tmp_path / "causal")
    assert causal.mask is None
    assert all(nats < 0 for nats in score(causal, SENTENCES, "causal").nats.values())


def test_sentences_that_are_cut_or_unknown_are_counted(own):
    """A sentence longer than the model reads, and one whose characters the vocabulary lacks."""
    scores = score(own, ["Anna sees Ben.", "Anna " * 100, "Ω"], "own")
    assert (scores.cut, scores.unknown) == (1, 1)
    assert all(math.isfinite(nats) for nats in scores.nats.values())


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """A tiny BERT and a tiny GPT-2 of transformers with one WordPiece vocabulary, in folders."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("theirs")
    pieces = ["anna", "see", "##s", "ben", "near", "the", "river", ".", "old", "house", "of", "otto"]
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *pieces]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    tokenizer = transformers.BertTokenizerFast(str(folder / "vocab.txt"), model_max_length=24)
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    bert = transformers.BertConfig(vocab_size=len(words), initializer_range=0.5, **sizes)
    models = {"bert": transformers.BertForMaskedLM(bert)}
    gpt = transformers.GPT2Config(vocab_size=len(words), n_embd=16, n_layer=2, n_head=2, initializer_range=0.5)
    models["gpt2"] = transformers.GPT2LMHeadModel(gpt)
    for name, model in models.items():
        model.save_pretrained(folder / name)
        if name == "gpt2":
            tokenizer.bos_token = "[CLS]"
        tokenizer.save_pretrained(folder / name)
    return folder


def test_berts_of_transformers_against_a_plain_loop(theirs):
    """BertForMaskedLM, one masked copy of a sentence at a time; equal to 1e-5."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(theirs / "bert")
    model = transformers.BertForMaskedLM.from_pretrained(theirs / "bert").eval()
    theirs_as_ours = load(theirs / "bert")
    scores = score(theirs_as_ours, SENTENCES, "theirs")
    for sentence in SENTENCES:
        ids = tokenizer(sentence, return_tensors="pt")["input_ids"]
        total = 0.0
        for place in range(1, ids.size(1) - 1):
            masked = ids.clone()
            masked[0, place] = tokenizer.mask_token_id
            with torch.no_grad():
                total += model(masked).logits[0, place].log_softmax(-1)[ids[0, place]].item()
        assert scores.nats[sentence] == pytest.approx(total, abs=1e-5)
    assert not theirs_as_ours.encode("Otto sees.").begins_word[3], "##s goes on with its word"
    for sentence, differs in (("Otto sees.", True), ("Otto.", False)):
        plain = score(theirs_as_ours, [sentence], "theirs").nats
        by_word = score(theirs_as_ours, [sentence], "theirs", masks_rest_of_word=True).nats
        assert (plain != by_word) == differs


def test_causal_models_of_transformers_against_a_plain_loop(theirs):
    """GPT2LMHeadModel, behind its first token; equal to 1e-5."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(theirs / "gpt2")
    model = transformers.GPT2LMHeadModel.from_pretrained(theirs / "gpt2").eval()
    causal = load(theirs / "gpt2")
    scores = score(causal, SENTENCES, "theirs")
    for sentence in SENTENCES:
        own = tokenizer(sentence, add_special_tokens=False)["input_ids"]
        ids = torch.tensor([[tokenizer.bos_token_id, *own]])
        with torch.no_grad():
            log_probabilities = model(ids).logits[0].log_softmax(-1)
        expected = sum(log_probabilities[place, token].item() for place, token in enumerate(own))
        assert scores.nats[sentence] == pytest.approx(expected, abs=1e-5)
    assert score(causal, ["anna " * 50], "theirs").cut == 1


def test_names_and_what_cannot_be_loaded(tmp_path, theirs):
    """A model's name in reports, and the messages for a path that is none."""
    assert name_of("bert=runs/1/checkpoint_best.pt") == "bert"
    assert name_of("runs/lazy/checkpoint_best.pt") == name_of("runs/lazy") == "lazy"
    with pytest.raises(UserError, match="nowhere.pt: no such file or folder"):
        load(tmp_path / "nowhere.pt")
    (theirs / "bert" / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(UserError, match="bert: transformers cannot load the model"):
        load(theirs / "bert")
