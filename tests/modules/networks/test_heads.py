"""Heads: of classes against NumPy, of words in bands against sums by hand."""

import math

import numpy as np
import pytest
import torch

from lazyformer_fairseq.evaluation.costs.latency import peak_memory
from lazyformer_fairseq.modules.networks.adaptive_softmax import AdaptiveEmbedding, AdaptiveSoftmax
from lazyformer_fairseq.modules.networks.heads import CLASSIFICATION_HEADS


def build(head_type: str, dropout: float = 0.0) -> torch.nn.Module:
    torch.manual_seed(1)
    return CLASSIFICATION_HEADS[head_type](4, 3, dropout)


@pytest.mark.parametrize("head_type", ["dense", "linear"])
def test_logits_are_of_the_first_token(head_type):
    head, features = build(head_type), torch.randn(2, 5, 4)
    weights = {name: weight.numpy() for name, weight in head.state_dict().items()}
    x = features[:, 0].numpy()
    if head_type == "dense":
        x = np.tanh(x @ weights.pop("dense.weight").T + weights.pop("dense.bias"))
    expected = x @ weights.pop("out_proj.weight").T + weights.pop("out_proj.bias")
    assert not weights
    np.testing.assert_allclose(head(features).detach().numpy(), expected, rtol=1e-5)


def test_dropout_is_before_a_linear_heads_one_map():
    head = build("linear", dropout=0.5)
    torch.nn.init.ones_(head.out_proj.weight)
    torch.nn.init.zeros_(head.out_proj.bias)
    found = head(torch.ones(1000, 1, 4))[:, 0]
    assert set(found.tolist()) == {0.0, 2.0, 4.0, 6.0, 8.0}  # of four numbers, twice those that are kept
    assert head.eval()(torch.ones(1, 1, 4))[0, 0] == 4


WIDTH, VOCABULARY = 8, 20
SHAPES = [((), 1), ((6,), 1), ((4, 9, 15), 1), ((6,), 2), ((4, 9, 15), 2)]


def make_words(cutoffs, div_val, vocabulary=VOCABULARY) -> tuple[AdaptiveEmbedding, AdaptiveSoftmax]:
    torch.manual_seed(1)
    embedding = AdaptiveEmbedding(vocabulary, WIDTH, cutoffs, div_val).double()
    softmax = AdaptiveSoftmax(embedding).double()
    for parameter in (*embedding.parameters(), *softmax.parameters()):
        torch.nn.init.normal_(parameter)
    return embedding, softmax


def vector_by_hand(embedding: AdaptiveEmbedding, word: int) -> torch.Tensor:
    band = next(band for band in reversed(list(embedding.bands)) if word >= band.start)
    vector = band.table[word - band.start]
    return vector if band.projection is None else band.projection @ vector


def log_probability_by_hand(embedding, softmax, feature: torch.Tensor, word: int) -> torch.Tensor:
    """Scores one by one: of the first band's words and the other bands, then of the words of the word's band."""
    bounds = [band.start for band in embedding.bands] + [len(softmax.bias)]

    def word_scores(first: int, end: int) -> list[torch.Tensor]:
        return [feature @ vector_by_hand(embedding, word) + softmax.bias[word] for word in range(first, end)]

    bands = range(len(bounds) - 2)
    others = [feature @ softmax.band_weight[number] + softmax.band_bias[number] for number in bands]
    head = torch.stack([*word_scores(0, bounds[1]), *others]).log_softmax(0)
    band = sum(word >= bound for bound in bounds[1:-1])
    if band == 0:
        return head[word]
    tail = torch.stack(word_scores(bounds[band], bounds[band + 1])).log_softmax(0)
    return head[bounds[1] + band - 1] + tail[word - bounds[band]]


@pytest.mark.parametrize("cutoffs, div_val", SHAPES)
def test_likelihoods_and_embeddings_are_those_by_hand(cutoffs, div_val):
    """Of all words and of targets, with gradients; they sum to one."""
    embedding, softmax = make_words(cutoffs, div_val)
    features = torch.randn(VOCABULARY, WIDTH, dtype=torch.double, requires_grad=True)
    ours = softmax.log_probabilities(features, embedding)
    torch.testing.assert_close(ours.exp().sum(-1), torch.ones(VOCABULARY, dtype=torch.double))
    by_hand = [
        log_probability_by_hand(embedding, softmax, each, word) for each in features for word in range(VOCABULARY)
    ]
    torch.testing.assert_close(ours.flatten(), torch.stack(by_hand))

    target = torch.randperm(VOCABULARY)
    leaves = [features, *embedding.parameters(), *softmax.parameters()]
    weighting = torch.linspace(1, 2, VOCABULARY, dtype=torch.double)
    nll = softmax.negative_log_likelihood(features, target, embedding)
    gathered = -ours.gather(1, target[:, None]).squeeze(1)
    torch.testing.assert_close(nll, gathered)
    torch.testing.assert_close(*(torch.autograd.grad((loss * weighting).sum(), leaves) for loss in (nll, gathered)))

    words = torch.randperm(VOCABULARY).view(4, 5)
    expected = torch.stack([vector_by_hand(embedding, word) for word in words.flatten().tolist()]) * math.sqrt(WIDTH)
    torch.testing.assert_close(embedding(words), expected.view(4, 5, WIDTH))


def test_bands_without_a_target_and_words_that_do_not_occur_get_gradients_of_zero():
    """Not None: DistributedDataParallel waits for a gradient of every weight."""
    embedding, softmax = make_words((4, 9, 15), 2)
    embedding(torch.tensor([[2, 10]])).sum().backward()
    for band in embedding.bands:
        touched = {band.start + row for row in band.table.grad.abs().sum(1).nonzero().flatten().tolist()}
        assert touched == {2, 10} & set(range(band.start, band.start + band.size))
    embedding.zero_grad()
    nll = softmax.negative_log_likelihood(torch.randn(3, WIDTH).double(), torch.tensor([0, 1, 5]), embedding)
    nll.sum().backward()
    assert not embedding.bands[2].table.grad.any() and not embedding.bands[3].projection.grad.any()
    assert embedding.bands[1].table.grad.any()


def test_training_makes_no_tensor_of_all_positions_and_all_words():
    vocabulary, positions = 3000, 200
    embedding, softmax = make_words((20, 1000), 1, vocabulary)
    features = torch.randn(positions, WIDTH, dtype=torch.double, requires_grad=True)
    target = torch.cat([torch.zeros(positions - 2).long(), torch.tensor([500, 2500])])

    def train() -> None:
        softmax.negative_log_likelihood(features, target, embedding).sum().backward()

    of_all = 8 * positions * vocabulary
    assert peak_memory(train, "cpu") < of_all / 4
    assert peak_memory(lambda: softmax.log_probabilities(features, embedding), "cpu") >= of_all  # it measures


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_likelihoods_are_in_single_precision_whatever_the_weights_are_in(half):
    embedding, softmax = make_words((4, 9), 2)
    features = torch.randn(5, WIDTH).to(half)
    target = torch.tensor([0, 3, 5, 12, 19])
    exact = softmax.negative_log_likelihood(features.double(), target, embedding)
    nll = softmax.to(half).negative_log_likelihood(features, target, embedding.to(half))
    assert nll.dtype == torch.float32 == softmax.log_probabilities(features, embedding).dtype
    torch.testing.assert_close(nll, exact.float(), atol=0.2, rtol=0.05)
    log_p = softmax.log_probabilities(features, embedding)
    torch.testing.assert_close(log_p.exp().sum(-1), torch.ones(5))
    torch.testing.assert_close(nll, -log_p.gather(-1, target[:, None]).squeeze(-1))


def test_an_id_beyond_the_vocabulary_is_an_error():
    for cutoffs in ((), (4, 9)):
        embedding, softmax = make_words(cutoffs, 1)
        with pytest.raises(IndexError):
            embedding(torch.tensor([[VOCABULARY]]))
        with pytest.raises(IndexError):
            softmax.negative_log_likelihood(torch.randn(1, WIDTH).double(), torch.tensor([VOCABULARY]), embedding)
