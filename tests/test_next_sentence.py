"""Pre-training with ``--next-sentence``, through fairseq-train."""

import math
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fairseq.logging import metrics
from helpers import assert_equal_state, dictionary_of, updates_of
from torch.nn import functional as F

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.criterions.language_modeling import MaskedLMAccuracyCriterion
from lazyformer_fairseq.fairseq_plugin.models.config import LazyFormerConfig
from lazyformer_fairseq.fairseq_plugin.models.lazyformer import LazyFormerModel
from lazyformer_fairseq.storage.indexed_format import write_items

EOS, FIRST_WORD = 2, 5
TOPICS, WORDS_OF_TOPIC = 8, 6
PAD = 1
TASK = "full_sentences_masked_lm --tokens-per-sample 36"
TINY = (
    "--next-sentence --token-types 2 --arch bert_tiny --sublayer-pattern (sf)x2 --criterion masked_lm_accuracy "
    "--dropout 0 --attention-dropout 0 --clip-norm 1"
)


def write_documents(folder: Path, documents: int, seed: int = 1) -> Path:
    """Each document has its own topic's words, and nothing but them tells which texts belong together."""
    draw = random.Random(seed)
    folder.mkdir(parents=True)
    words = [f"topic{topic}word{word}" for topic in range(TOPICS) for word in range(WORDS_OF_TOPIC)]
    (folder / "dict.txt").write_text("".join(f"{word} 1\n" for word in ["<mask>", *words]))
    for split, count in (("train", documents), ("valid", 80)):
        items = []
        for number in range(count):
            first = FIRST_WORD + number % TOPICS * WORDS_OF_TOPIC
            for _ in range(12):
                items.append([*(first + draw.randrange(WORDS_OF_TOPIC) for _ in range(4)), EOS])
            items.append([EOS])
        ids, sizes = np.array([each for item in items for each in item]), np.array([len(item) for item in items])
        write_items(folder / split, np.uint16, [(ids, sizes)], durable=False)
    return folder


@pytest.fixture(scope="module")
def documents(tmp_path_factory) -> Path:
    return write_documents(tmp_path_factory.mktemp("documents") / "data", 240)


def logged(folder: Path, name: str, of: str = "| valid on 'valid' subset |") -> list[float]:
    """Of each epoch's line in the log."""
    lines = (folder / "train.log").read_text().splitlines()
    return [float(line.split(f"| {name} ")[1].split()[0]) for line in lines if of in line]


@pytest.mark.slow
def test_a_model_learns_which_texts_belong_together(documents, tmp_path, fairseq_train):
    options = f"{TINY} --lr 4e-3 --batch-size 32 --max-epoch 7"
    state = fairseq_train(documents, options, tmp_path, task=TASK)
    for of in ("| train | epoch", "| valid on 'valid' subset |"):
        accuracies, losses = (logged(tmp_path, f"next_sentence_{name}", of) for name in ("accuracy", "loss"))
        assert len(accuracies) == 7 and losses[-1] < 0.9 < losses[0]
        assert accuracies[-1] > 70  # a guess is right in half of the 250 pairs of valid, with a deviation of 3%
    assert logged(tmp_path, "loss")[-1] < logged(tmp_path, "loss")[0]
    assert state["model"]["classification_heads.next_sentence.out_proj.weight"].shape == (2, 32)


def test_a_run_that_is_resumed_goes_on_bit_for_bit_with_workers_or_without(documents, tmp_path, fairseq_train):
    options = f"{TINY} --dropout 0.1 --batch-size 64 --max-update 30 --save-interval-updates 17 --disable-validation"
    whole = fairseq_train(documents, options, tmp_path / "whole", task=TASK)
    (saved,) = (tmp_path / "whole").glob("checkpoint_2_17.pt")  # within the second epoch
    (tmp_path / "resumed").mkdir()
    saved.rename(tmp_path / "resumed" / "checkpoint_last.pt")
    resumed = fairseq_train(documents, f"{options} --num-workers 2", tmp_path / "resumed", task=TASK)
    assert updates_of(resumed) == 30
    for part in ("model", "last_optimizer_state"):
        assert_equal_state(resumed[part], whole[part], part)


def test_a_second_phase_of_longer_pairs_takes_the_head_over(documents, tmp_path, fairseq_train):
    options = f"{TINY} --batch-size 64 --disable-validation"
    first = fairseq_train(documents, f"{options} --max-update 2", tmp_path / "first", task=TASK)
    options += f" --max-update 1 --lr 0 --weight-decay 0 --finetune-from-model {tmp_path / 'first/checkpoint_last.pt'}"
    second = fairseq_train(documents, options, tmp_path / "second", task=TASK.replace("36", "60"))
    assert_equal_state(second["model"], first["model"])


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["--bf16", "--fp16"])
def test_half_precision_trains_close_to_full(documents, tmp_path, fairseq_train, precision):
    options = f"{TINY} --lr 4e-3 --batch-size 64 --max-epoch 1"
    losses = {}
    for name, more in (("full", ""), ("half", precision)):
        fairseq_train(documents, f"{options} {more}", tmp_path / name, task=TASK)
        losses[name] = [logged(tmp_path / name, each) for each in ("loss", "next_sentence_loss")]
    assert losses["half"] == [pytest.approx(each, abs=0.05) for each in losses["full"]]


def test_the_loss_is_the_mean_of_words_and_of_pairs():
    torch.manual_seed(1)
    sizes = {"encoder_embed_dim": 12, "encoder_ffn_embed_dim": 8, "encoder_attention_heads": 2}
    model = LazyFormerModel(LazyFormerConfig(sublayer_pattern="sf", token_types=2, **sizes), dictionary_of(24)).eval()
    tokens = torch.randint(4, 24, (3, 6))
    target = torch.full_like(tokens, PAD)
    target[0, 1], target[0, 3], target[1, 4], target[2, 5] = 7, 11, 8, 9
    types = torch.tensor([[0, 0, 0, 1, 1, 1]] * 3)
    batch = {
        "net_input": {"src_tokens": tokens, "token_types": types, "has_padding": False},
        **{"target": target, "next_sentence": torch.tensor([0, 1, 1]), "ntokens": 18, "nsentences": 3},
    }
    model.register_classification_head("next_sentence", 2)
    head = model.classification_heads["next_sentence"]
    for weight in head.parameters():
        torch.nn.init.normal_(weight)
    features, _ = model(**batch["net_input"], features_only=True)
    hidden = (features[:, 0] @ head.dense.weight.T + head.dense.bias).tanh()
    pairs = hidden @ head.out_proj.weight.T + head.out_proj.bias
    of_pairs = F.cross_entropy(pairs, batch["next_sentence"])
    of_words = F.cross_entropy(model(**batch["net_input"])[0].flatten(0, 1), target.flatten(), ignore_index=PAD)

    criterion = MaskedLMAccuracyCriterion(SimpleNamespace(target_dictionary=dictionary_of(24)))
    loss, sample_size, log = criterion(model, batch)
    torch.testing.assert_close(loss / sample_size, of_words + of_pairs)
    with metrics.aggregate(new_root=True) as meters:
        MaskedLMAccuracyCriterion.reduce_metrics([log, log])
    found = meters.get_smoothed_values()
    right = int((pairs.argmax(-1) == batch["next_sentence"]).sum())
    assert found["next_sentence_accuracy"] == pytest.approx(100 * right / 3, abs=0.01)
    assert found["next_sentence_loss"] == pytest.approx(of_pairs.item() / math.log(2), abs=1e-3)
    assert found["loss"] == pytest.approx(of_words.item() / math.log(2), abs=1e-3)
    assert model(**batch["net_input"], classification_head_name="next_sentence")[0].shape == (3, 2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (f"{TINY} --criterion glue", "--criterion glue"),
        (f"{TINY} --criterion continued_masked_lm --distill .", "--distill: a teacher teaches words alone"),
        (
            "--next-sentence --criterion masked_lm_accuracy --arch roberta_base --encoder-layers 1",
            "--next-sentence: is for encoders of this package",
        ),
    ],
)
def test_what_learns_no_pairs_is_refused(documents, tmp_path, fairseq_train, options, words):
    with pytest.raises(UserError, match=words):
        fairseq_train(documents, f"{options} --batch-size 8 --max-update 1", tmp_path, task=TASK)


def test_a_loaded_model_says_whether_a_text_follows_as_its_head_does(data_folder, tmp_path, fairseq_train):
    fairseq_train(data_folder, f"{TINY} --batch-size 8 --max-update 2 --lr 1e-2", tmp_path)
    hub = LazyFormerModel.from_pretrained(tmp_path)
    first, second = "anna sees ben", "the house is old"
    ids = [0, *hub.tokenizer.encode(first), EOS, EOS, *hub.tokenizer.encode(second), EOS]
    types = [0] * (ids.index(EOS) + 1) + [1] * (len(ids) - ids.index(EOS) - 1)
    which = {"token_types": torch.tensor([types]), "classification_head_name": "next_sentence"}
    with torch.no_grad():
        logits, _ = hub.model(torch.tensor([ids]), **which)
    assert hub.follows(first, second) == pytest.approx(float(logits.softmax(-1)[0, 0]), abs=1e-6)
    assert hub.fill_mask("anna <mask> ben", topk=1)[0].probability > 0
    del hub.model.classification_heads["next_sentence"]
    with pytest.raises(UserError, match="pre-train it with --next-sentence"):
        hub.follows(first, second)
