"""Pre-training through fairseq-train, as a user runs it: what is promised of whole runs."""

import logging
import math
import random
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from fairseq.logging import metrics
from fairseq.tasks import FairseqTask
from helpers import (
    assert_equal_state,
    dictionary_of,
    mostly_slow,
    stopped_at,
    train_in_two_processes,
    train_words,
    updates_of,
)
from torch.nn import functional as F

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.criterions.language_modeling import MaskedLMAccuracyCriterion
from lazyformer_fairseq.fairseq_plugin.models.config import MaskedLMConfig
from lazyformer_fairseq.fairseq_plugin.models.lazyformer import LazyFormerModel
from lazyformer_fairseq.fairseq_plugin.reliability.run_log import SCREEN
from lazyformer_fairseq.fairseq_plugin.tasks.full_sentences_masked_lm import FullSentencesMaskedLMTask
from lazyformer_fairseq.storage.indexed_format import write_items

TINY = "--arch lazyformer_m2x6_s_tiny --sublayer-pattern M2x2 --criterion masked_lm_accuracy --batch-size 4"


@contextmanager
def recorded_shares() -> Iterator[dict[str, list[tuple[int, int, int]]]]:
    """Of each batch in training and in validation: its update, tokens to predict, and tokens that could be."""
    found = {"train_step": [], "valid_step": []}

    def recorder(name: str):
        def step(task, sample, *args, **named):
            words, pad = sample["net_input"]["src_tokens"].clone(), task.dictionary.pad()
            chosen = sample["target"].ne(pad)
            assert torch.equal(chosen.flatten().nonzero().squeeze(1), sample["masked_positions"])
            words[chosen] = sample["target"][chosen]
            maskable = sum(words.ne(special) for special in task.masking.special).eq(len(task.masking.special))
            found[name].append((named.get("update_num"), int(chosen.sum()), int(maskable.sum())))
            return getattr(FairseqTask, name)(task, sample, *args, **named)

        return step

    with mock.patch.multiple(FullSentencesMaskedLMTask, create=True, **{name: recorder(name) for name in found}):
        yield found


@pytest.mark.parametrize("words", [pytest.param("", marks=pytest.mark.slow), "--mask-whole-words"])
def test_the_share_of_masks_is_that_of_each_update_and_resumed_bit_for_bit(words, data_folder, tmp_path, fairseq_train):
    options = f"{TINY} --mask-prob 0.6:0.2 {words} --max-update 11 --save-interval-updates 8 --batch-size 16 "
    options += "--update-freq 2 --tokens-per-sample 64 --max-positions 64 --validate-interval-updates 11"
    with recorded_shares() as found:
        whole = fairseq_train(data_folder, options, tmp_path / "whole")
    assert {update for update, *_ in found["train_step"]} == set(range(11))
    for update, masked, maskable in found["train_step"]:
        assert masked / maskable == pytest.approx(0.6 - update / 25, abs=0.06 if words else 0.02), update
    masked, maskable = (sum(column) for column in [*zip(*found["valid_step"], strict=True)][1:])
    assert masked / maskable == pytest.approx(0.2, abs=0.01)
    (saved,) = (tmp_path / "whole").glob("checkpoint_*_8.pt")
    (tmp_path / "resumed").mkdir()
    saved.rename(tmp_path / "resumed" / "checkpoint_last.pt")
    with recorded_shares() as again:
        resumed = fairseq_train(data_folder, f"{options} --num-workers 2", tmp_path / "resumed")
    assert again["train_step"] == [each for each in found["train_step"] if each[0] >= 8]
    for part in ("model", "last_optimizer_state"):
        assert_equal_state(resumed[part], whole[part], part)


def test_masks_that_cannot_be_are_refused_before_anything_is_read(data_folder, tmp_path, fairseq_train):
    bare = tmp_path / "bare"
    shutil.copytree(data_folder / "shard0" if (data_folder / "shard0").is_dir() else data_folder, bare)
    shutil.rmtree(bare / "tokenizer", ignore_errors=True)
    for options, message in (
        ("--mask-prob 0.3:0.15 --max-epoch 1", r"--mask-prob 0.3:0.15: .* set --max-update"),
        ("--mask-prob 0.3:1.5 --max-update 1", "--mask-prob 1.5: must be from 0 to 1"),
        ("--whole-word-masks --max-update 1", r"--whole-word-masks: requires a tokenizer .*corpus. writes one"),
    ):
        with pytest.raises(UserError, match=message):
            fairseq_train(bare, f"{TINY} {options}", tmp_path / "run")


def test_the_screen_says_what_is_trained_how_far_and_how_long(data_folder, tmp_path, fairseq_train, caplog):
    caplog.set_level(logging.INFO, logger=SCREEN)
    options = f"{TINY} --tokens-per-sample 32 --update-freq 2 --dropout 0.2 --disable-validation --max-update"
    with stopped_at(2):
        fairseq_train(data_folder, f"{options} 999999999 --log-seconds 1e-9", tmp_path / "long")
    introduced, said = [], [each.getMessage() for each in caplog.records if each.name == SCREEN]
    while not said[0].startswith("update 1 "):
        introduced.append(said.pop(0))
    assert [line.split()[0] for line in introduced] == ["model", "data", "update", "run", "files", "time"]
    assert re.search(r"about [\d.]+ s per update on this CPU, .* (days|years) for the run", introduced[-1])
    parts = (r"pass 2 of 2, [\d.]+ s so far", r"pass 1 of 2, loss \d+\.\d\d bits, .* so far, about .* left")
    for number, part in enumerate(parts, 1):
        assert re.fullmatch(rf"update {number} of 999,999,999, {part}", said[number - 1]), said
    with_screen, without = (
        fairseq_train(data_folder, f"{options} 2 --log-seconds {seconds}", tmp_path / str(seconds))
        for seconds in (1e-9, 0)
    )
    assert_equal_state(with_screen["model"], without["model"])


# Adam's large epsilon lets the length of a gradient count, and so how it was clipped.
EXPERTS = "--sublayer-pattern sf[experts=4,top=1] --adam-eps 1 --clip-norm 0.5"


@pytest.mark.parametrize("more", mostly_slow(["--clip-norm 0", EXPERTS], EXPERTS))
def test_two_processes_train_as_one_with_twice_the_update_freq(
    more, data_folder, tmp_path, fairseq_train, free_port, warm_python
):
    """Experts are shared out, and their checkpoint is that of one process: which resumes from it."""
    options = f"{TINY} --max-update 6 --dropout 0 --attention-dropout 0 --keep-updates-list 3 {more}"
    alone = fairseq_train(data_folder, f"{options} --update-freq 2", tmp_path / "alone")
    command = [
        *(warm_python / "lazyformer", "pretrain", "lazyformer_m2x6_s_tiny", data_folder),
        *("--gpus", "2", "--sequences-per-update", "8", "--master", f"127.0.0.1:{free_port}", "--precision", "fp32"),
        *f"{options} --tokens-per-sample 32 --lr 1e-3 --num-workers 0".split(),
        *("--save-dir", str(tmp_path / "two")),
    ]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    assert "update  1 x 4 sequences of 32 tokens, on each of 2 CPUs" in run.stdout
    assert "INFO" not in run.stdout + run.stderr and len(run.stdout.splitlines()) <= 10, run.stdout
    assert (tmp_path / "two" / "train.log").read_text().count("| begin training epoch 1") == 1
    two = torch.load(tmp_path / "two" / "checkpoint_last.pt")
    assert updates_of(two) == 6
    (tmp_path / "again").mkdir()
    shutil.copy(tmp_path / "two" / "checkpoint_update_3.pt", tmp_path / "again" / "checkpoint_last.pt")
    again = fairseq_train(data_folder, f"{options} --update-freq 2", tmp_path / "again")
    assert ("distributed over 2 processes" in (tmp_path / "two" / "train.log").read_text()) == (more == EXPERTS)
    for found in (two, again):
        assert list(found["model"]) == list(alone["model"])
        for name, weight in alone["model"].items():
            torch.testing.assert_close(found["model"][name], weight, rtol=1e-4, atol=1e-5, msg=name)
        states = (each["last_optimizer_state"]["state"] for each in (found, alone))
        for one, other in zip(*(each.items() for each in states), strict=True):
            assert one[0] == other[0]
            torch.testing.assert_close(one[1]["exp_avg"], other[1]["exp_avg"], rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_two_processes_with_experts_resume_bit_for_bit(data_folder, tmp_path, free_port):
    """In half precision, whose weights in single precision are gathered too, from sums of many batches."""
    options = f"{TINY} --sublayer-pattern sf[experts=4] --bf16 --update-freq 9 --max-update 4 --keep-updates-list 2"
    for folder in ("whole", "again"):
        if folder == "again":
            (tmp_path / folder).mkdir()
            shutil.copy(tmp_path / "whole" / "checkpoint_update_2.pt", tmp_path / folder / "checkpoint_last.pt")
        run = train_in_two_processes(train_words(data_folder, options, tmp_path / folder), free_port)
        assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    whole, again = (torch.load(tmp_path / folder / "checkpoint_last.pt") for folder in ("whole", "again"))
    assert_equal_state(whole["model"], again["model"])
    assert_equal_state(whole["last_optimizer_state"], again["last_optimizer_state"])
    one, two = (torch.load(tmp_path / "whole" / f"checkpoint_{name}.pt")["model"] for name in ("update_2", "last"))
    experts = [name for name in one if ".experts." in name]
    assert len(experts) == 4 * 4 and not any(torch.equal(one[name], two[name]) for name in experts)


# --- with `--next-sentence`

EOS, FIRST_WORD = 2, 5
TOPICS, WORDS_OF_TOPIC = 8, 6
PAD = 1
WITH_PAIRS = "full_sentences_masked_lm --tokens-per-sample 36"
APART = "--within-documents --criterion masked_lm_accuracy"
PAIRS = (
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
    options = f"{PAIRS} --lr 4e-3 --batch-size 32 --max-epoch 7"
    state = fairseq_train(documents, options, tmp_path, task=WITH_PAIRS)
    for of in ("| train | epoch", "| valid on 'valid' subset |"):
        accuracies, losses = (logged(tmp_path, f"next_sentence_{name}", of) for name in ("accuracy", "loss"))
        assert len(accuracies) == 7 and losses[-1] < 0.9 < losses[0]
        assert accuracies[-1] > 70  # a guess is right in half of the 250 pairs of valid, with a deviation of 3%
    assert logged(tmp_path, "loss")[-1] < logged(tmp_path, "loss")[0]
    assert state["model"]["classification_heads.next_sentence.out_proj.weight"].shape == (2, 32)


def test_a_run_that_is_resumed_goes_on_bit_for_bit_with_workers_or_without(documents, tmp_path, fairseq_train):
    options = f"{PAIRS} --dropout 0.1 --batch-size 64 --max-update 20 --save-interval-updates 17 --disable-validation"
    whole = fairseq_train(documents, options, tmp_path / "whole", task=WITH_PAIRS)
    (saved,) = (tmp_path / "whole").glob("checkpoint_2_17.pt")  # within the second epoch
    (tmp_path / "resumed").mkdir()
    saved.rename(tmp_path / "resumed" / "checkpoint_last.pt")
    resumed = fairseq_train(documents, f"{options} --num-workers 2", tmp_path / "resumed", task=WITH_PAIRS)
    assert updates_of(resumed) == 20
    for part in ("model", "last_optimizer_state"):
        assert_equal_state(resumed[part], whole[part], part)


def test_a_second_phase_of_longer_pairs_takes_the_head_over(documents, tmp_path, fairseq_train):
    options = f"{PAIRS} --batch-size 64 --disable-validation"
    first = fairseq_train(documents, f"{options} --max-update 2", tmp_path / "first", task=WITH_PAIRS)
    options += f" --max-update 1 --lr 0 --weight-decay 0 --finetune-from-model {tmp_path / 'first/checkpoint_last.pt'}"
    second = fairseq_train(documents, options, tmp_path / "second", task=WITH_PAIRS.replace("36", "60"))
    assert_equal_state(second["model"], first["model"])


def test_the_loss_is_the_mean_of_words_and_of_pairs():
    torch.manual_seed(1)
    sizes = {"encoder_embed_dim": 12, "encoder_ffn_embed_dim": 8, "encoder_attention_heads": 2}
    model = LazyFormerModel(MaskedLMConfig(sublayer_pattern="sf", token_types=2, **sizes), dictionary_of(24)).eval()
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
        (f"{PAIRS} --criterion glue", "--criterion glue"),
        (f"{PAIRS} --criterion continued_masked_lm --distill .", "--distill: a teacher does not predict"),
        pytest.param(
            "--next-sentence --criterion masked_lm_accuracy --arch roberta_base --encoder-layers 1",
            "--next-sentence: only this package's encoders",
            marks=pytest.mark.slow,
        ),
        (f"{PAIRS} --within-documents", "--within-documents: the two texts of --next-sentence must attend to"),
        (f"{APART} --arch roberta_base --encoder-layers 1", "--within-documents works only with this package's"),
        (f"{APART} --arch bert_tiny --compile", "--compile cannot be used with --within-documents"),
        (
            f"{APART} --arch bert_tiny --criterion continued_masked_lm --distill .",
            "--within-documents: --distill compares attention over whole blocks",
        ),
        (
            "--document-positions --arch bert_tiny --criterion masked_lm_accuracy",
            "--document-positions: requires --within-documents",
        ),
    ],
)
def test_what_learns_no_pairs_or_no_documents_is_refused(documents, tmp_path, fairseq_train, options, words):
    with pytest.raises(UserError, match=words):
        fairseq_train(documents, f"{options} --batch-size 8 --max-update 1", tmp_path, task=WITH_PAIRS)


def test_a_loaded_model_says_whether_a_text_follows_as_its_head_does(data_folder, tmp_path, fairseq_train):
    fairseq_train(data_folder, f"{PAIRS} --batch-size 8 --max-update 2 --lr 1e-2", tmp_path)
    hub = LazyFormerModel.from_pretrained(tmp_path)
    first, second = "anna sees ben", "the house is old"
    ids = [0, *hub.tokenizer.encode(first), EOS, EOS, *hub.tokenizer.encode(second), EOS]
    types = [0] * (ids.index(EOS) + 1) + [1] * (len(ids) - ids.index(EOS) - 1)
    which = {"token_types": torch.tensor([types]), "classification_head_name": "next_sentence"}
    with torch.no_grad():
        logits, _ = hub.model(torch.tensor([ids]), **which)
    assert hub.follows(first, second) == pytest.approx(float(logits.softmax(-1)[0, 0]), abs=1e-6)
    assert hub.fill_mask("anna <mask> ben", topk=1)[0].probability > 0
    assert len(hub.fill_mask("anna <mask> ben", topk=10**6)) == len(hub.tokenizer.symbols)
    with pytest.raises(UserError, match="topk is 0, but must be at least 1"):
        hub.fill_mask("anna <mask> ben", topk=0)
    del hub.model.classification_heads["next_sentence"]
    with pytest.raises(UserError, match="pre-train it with --next-sentence"):
        hub.follows(first, second)
