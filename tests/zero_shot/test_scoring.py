"""Scores of sentences: by hand, against plain loops over transformers' models, and whatever the batch."""

import math

import numpy as np
import pytest
import torch
from helpers import ROOT
from hypothesis import given
from hypothesis import strategies as st

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.zero_shot.models import ScorerSettings, load_scorer, name_of
from lazyformer_fairseq.zero_shot.scoring import CausalScorer, EncodedSentence, MaskedScorer

ENCODER = ROOT / "tests/fixtures/checkpoints/encoder"
SENTENCES = ["Anna sees Ben near the river.", "The old house of Otto.", "Otto sees the river.", "Ben."]
MASK = 99


class ByHand(MaskedScorer):
    """A model that gives a token one over one more than the number of tokens that it can see."""

    def weights(self):
        return {}

    def encode(self, sentence):
        ids = np.array([0, *map(int, sentence.replace("+", " ").split()), 0])
        words = [word for group in sentence.split() for word in [True, *[False] * group.count("+")]]
        return EncodedSentence(ids, np.arange(1, len(ids) - 1), np.array(words))

    def log_probabilities(self, ids_BT, places, targets):
        assert (ids_BT[np.arange(len(ids_BT)), places] == MASK).all()
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
    score = ByHand(MASK, masks_rest_of_word).score([sentence], "by hand").nats[sentence]
    assert score == pytest.approx(-sum(math.log(1 + count) for count in visible))


class Bigrams(CausalScorer):
    """A model of two tokens, whose next one is the same as the last one with a probability of 0.75."""

    def weights(self):
        return {}

    def encode(self, sentence):
        ids = np.array([0, *map(int, sentence.split())])
        return EncodedSentence(ids, np.arange(1, len(ids)), np.ones(len(ids) - 1, dtype=bool))

    def token_log_probabilities(self, ids_BT):
        return np.log(np.where(ids_BT[:, 1:] == ids_BT[:, :-1], 0.75, 0.25))


def test_log_likelihoods_by_hand():
    """The first token is predicted too, from the one before the sentence."""
    scores = Bigrams().score(["0 0", "1 0 1"], "bigrams")
    assert scores.nats["0 0"] == pytest.approx(2 * math.log(0.75))
    assert scores.nats["1 0 1"] == pytest.approx(3 * math.log(0.25))
    assert scores.tokens == 5


@pytest.fixture(scope="module")
def own():
    return load_scorer(str(ENCODER), ScorerSettings(device="cpu"))


@given(
    chosen=st.lists(st.sampled_from(SENTENCES), min_size=1, unique=True),
    max_tokens=st.sampled_from([1, 30, 10_000]),
)
def test_a_score_does_not_depend_on_the_batch(own, chosen, max_tokens):
    """Neither on the sentences beside it nor on how many tokens are read at once."""
    alone = {sentence: own.score([sentence], "alone").nats[sentence] for sentence in chosen}
    together = own.score(chosen, "together", max_tokens).nats
    for sentence in chosen:
        assert together[sentence] == pytest.approx(alone[sentence], abs=1e-5)


def test_our_masked_lm_against_a_plain_loop(own):
    """The same sum, token after token, from the logits of all positions."""
    for sentence in SENTENCES:
        ids = torch.tensor([own.tokenizer.build_input(sentence)])
        total = 0.0
        for place in range(1, ids.size(1) - 1):
            masked = ids.clone()
            masked[0, place] = own.tokenizer.special.mask
            with torch.no_grad():
                logits, _ = own.model(masked)
            total += logits[0, place].log_softmax(-1)[ids[0, place]].item()
        assert own.score([sentence], "own").nats[sentence] == pytest.approx(total, abs=1e-5)


def test_sentences_that_are_cut_or_unknown_are_counted(own):
    """A sentence longer than the model reads, and one whose characters the vocabulary lacks."""
    scores = own.score(["Anna sees Ben.", "Anna " * 100, "Ω"], "own")
    assert (scores.cut, scores.unknown) == (1, 1)
    assert all(math.isfinite(score) for score in scores.nats.values())


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
    scorer = load_scorer(str(theirs / "bert"), ScorerSettings(device="cpu"))
    scores = scorer.score(SENTENCES, "theirs")
    for sentence in SENTENCES:
        ids = tokenizer(sentence, return_tensors="pt")["input_ids"]
        total = 0.0
        for place in range(1, ids.size(1) - 1):
            masked = ids.clone()
            masked[0, place] = tokenizer.mask_token_id
            with torch.no_grad():
                total += model(masked).logits[0, place].log_softmax(-1)[ids[0, place]].item()
        assert scores.nats[sentence] == pytest.approx(total, abs=1e-5)
    of_words = load_scorer(str(theirs / "bert"), ScorerSettings(masks_rest_of_word=True, device="cpu"))
    assert not of_words.encode("Otto sees.").begins_word[2], "##s goes on with its word"
    assert of_words.score(["Otto sees."], "theirs").nats != scorer.score(["Otto sees."], "theirs").nats
    assert of_words.score(["Otto."], "theirs").nats == scorer.score(["Otto."], "theirs").nats


def test_causal_models_of_transformers_against_a_plain_loop(theirs):
    """GPT2LMHeadModel, behind its first token; equal to 1e-5."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(theirs / "gpt2")
    model = transformers.GPT2LMHeadModel.from_pretrained(theirs / "gpt2").eval()
    scorer = load_scorer(str(theirs / "gpt2"), ScorerSettings(device="cpu"))
    scores = scorer.score(SENTENCES, "theirs")
    for sentence in SENTENCES:
        own = tokenizer(sentence, add_special_tokens=False)["input_ids"]
        ids = torch.tensor([[tokenizer.bos_token_id, *own]])
        with torch.no_grad():
            log_probabilities = model(ids).logits[0].log_softmax(-1)
        expected = sum(log_probabilities[place, token].item() for place, token in enumerate(own))
        assert scores.nats[sentence] == pytest.approx(expected, abs=1e-5)
    assert scorer.score(["anna " * 50], "theirs").cut == 1


def test_names_and_what_cannot_be_loaded(tmp_path, theirs):
    """A model's name in reports, and the messages for a path that is none."""
    assert name_of("bert=runs/1/checkpoint_best.pt") == "bert"
    assert name_of("runs/lazy/checkpoint_best.pt") == name_of("runs/lazy") == "lazy"
    with pytest.raises(UserError, match="nowhere.pt: no such file or folder"):
        load_scorer(str(tmp_path / "nowhere.pt"), ScorerSettings())
    (theirs / "bert" / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(UserError, match="bert: transformers cannot load it"):
        load_scorer(str(theirs / "bert"), ScorerSettings())
