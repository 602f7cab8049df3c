"""The demo in miniature, on a toy text; prose out of Python's own library, and the task made from held-out text."""

import csv
import random
import re
import shutil
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from helpers import golden_experiments, toy_texts
from hypothesis import given
from hypothesis import strategies as st

from lazyformer_fairseq.corpus.duplicates import fingerprint
from lazyformer_fairseq.corpus.steps import Document
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.demo.run import MODELS, DemoTraining, run_demo
from lazyformer_fairseq.experiments.demo.settings import DemoSettings
from lazyformer_fairseq.experiments.prose import (
    held_out_sentences,
    paragraphs_of_prose,
    python_prose,
    shuffle_words,
    texts_of_module,
    write_acceptability_task,
)
from lazyformer_fairseq.storage.json_files import read_checked_json


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> DemoSettings:
    text = tmp_path_factory.mktemp("text") / "toy.txt"
    text.write_text("\n\n".join(toy_texts(200)))
    return DemoSettings(corpus=str(text), vocab_size=160, recipe="adam", updates=24, finetuning_updates=6)


@pytest.fixture(scope="module")
def finished(settings, tmp_path_factory) -> tuple[Path, dict[str, list[torch.Tensor]]]:
    """A demo that was interrupted at its 14th update and went on; and the batches of each model's pre-training."""
    folder, seen = tmp_path_factory.mktemp("demo") / "demo", {name: [] for name in MODELS}
    update, train_on, interrupts = DemoTraining.update, DemoTraining.train_on, [True]

    def interrupted(training):
        if training.updates == 13 and interrupts:
            interrupts.clear()
            raise KeyboardInterrupt
        return update(training)

    def looked_at(training, batches):
        if training.folder.parent == folder:
            seen[training.name].append(batches[0]["net_input"]["src_tokens"])
        return train_on(training, batches)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(DemoTraining, "update", interrupted)
        patched.setattr(DemoTraining, "train_on", looked_at)
        with pytest.raises(KeyboardInterrupt):
            run_demo(settings, folder)
        run_demo(settings, folder)
    return folder, seen


def test_a_resumed_demo_trains_both_models_to_the_end_on_the_same_batches(finished):
    folder, seen = finished
    results = {name: read_checked_json(folder / name / "result.json") for name in MODELS}
    sizes = [result["parameters"] for result in results.values()]
    assert max(sizes) < 1.01 * min(sizes), "the two models are meant to be of one size"
    golden = golden_experiments("demo")
    for name, result in results.items():
        assert result["curve"]["loss"] == pytest.approx(golden[name], rel=1e-3)
        assert result["curve"]["updates"] == list(range(0, 25, 4))
        assert result["curve"]["loss"][-1] < result["curve"]["loss"][0]
    first, second = seen.values()
    assert len(first) == len(second) >= 24, "the last two updates before a stop may be made twice"
    assert all(torch.equal(one, other) for one, other in zip(first[-12:], second[-12:], strict=True))


def test_the_report_is_complete_and_a_rerun_trains_nothing(finished, settings, capsys):
    folder, _ = finished
    run_demo(settings, folder)
    printed = capsys.readouterr().out
    assert "Reusing the text" in printed
    verdict = re.search(
        r"After 24 updates, lazyformer_m2x2's validation loss is (.*) bits (.*) than bert_m1x4's", printed
    )
    bert, lazy = (read_checked_json(folder / name / "result.json")["curve"]["loss"][-1] for name in MODELS)
    assert float(verdict[1]) == pytest.approx(abs(lazy - bert), abs=0.006)
    assert verdict[2] == ("lower" if lazy < bert else "higher")
    rows = [line for line in printed.splitlines() if line.startswith("|")]
    assert [row.split("|")[1].strip() for row in rows[2:]] == list(MODELS)
    assert "the unigram loss is " in printed and "a table of counts that sees the two tokens on either side" in printed
    assert f"No more than 0.1 bits below the unigram loss: {', '.join(MODELS)}. These models have learned" in printed
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "table.md").read_text().strip() in printed
    with pytest.raises(
        UserError, match=r"a demo with different settings \(.*updates is 24 there, 99 here.*another folder"
    ):
        run_demo(DemoSettings(updates=99), folder)


@pytest.mark.parametrize("name", ["data/shard0/train.bin", "acceptability/dev.tsv"])
def test_a_text_that_changed_since_the_models_read_it_is_named(name, finished, settings, tmp_path):
    shutil.copytree(finished[0], tmp_path / "demo")
    path = tmp_path / "demo" / name
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(
        UserError, match=rf"demo/{name} has changed since it was created; remove .* rerun the same command"
    ):
        run_demo(settings, tmp_path / "demo")


def test_a_text_that_fails_does_not_claim_the_folder(settings, tmp_path):
    for missing in ("missing.txt", "another.txt"):
        with pytest.raises(UserError, match=missing):
            run_demo(replace(settings, corpus=missing), tmp_path / "demo")


# --- The text and the task

DOCSTRING = """Open the file and return a stream.

    The ``mode`` is *optional*; see :class:`io.TextIOBase` for
    what the stream can do.

    - Each item of a list that is a sentence stays here.
    - name

    Heading of the section
    ======================
    >>> open("x") is the code that stays out of the prose.

    ====  =================
    mode  what it stands for in the table.
    ====  =================

    x = open(the_file) is how it is used in the code.
"""


MODULE = '''"""First."""
x = 1
# A comment
# of two lines.
class A:
    """Second."""
    def b(self):
        """Third."""
'''


def test_only_prose_of_a_module_is_kept_in_order(tmp_path):
    assert list(paragraphs_of_prose(DOCSTRING)) == [
        "Open the file and return a stream.",
        "The mode is optional; see io.TextIOBase for what the stream can do.",
        "Each item of a list that is a sentence stays here.",
    ]
    (tmp_path / "module.py").write_text(MODULE)
    assert texts_of_module(tmp_path / "module.py") == ["First.", "Second.", "Third.", "A comment\nof two lines.\n"]
    (tmp_path / "broken.py").write_text("def (")
    assert texts_of_module(tmp_path / "broken.py") == []


@pytest.mark.slow
def test_enough_of_it_the_same_every_time_and_nothing_is_imported():
    prose = list(python_prose())
    assert len(prose) > 300
    assert sum(len(paragraph) for document in prose for paragraph in document.paragraphs) > 1_000_000
    assert len({document.name for document in prose}) == len(prose)
    assert list(islice(python_prose(), 100)) == prose[:100]
    assert any(document.name == "module:antigravity.py" for document in prose)
    assert "antigravity" not in sys.modules  # imported, it would open a browser


# --- The task

COMMON = "This sentence stands in every document."


def toy_document(number):
    text = f"{COMMON}\nThe cat of house {number} sat down. Then old Anna saw (in the rain) dog {number}."
    return Document(text, f"d{number}", metadata={"fingerprint": fingerprint(text)})


DOCUMENTS = [toy_document(number) for number in range(200)]


def write(folder, documents=DOCUMENTS, valid_share=0.5, seed=1, sizes=(40, 10)):
    """The sizes that are said, and the rows of each split's file."""
    said = write_acceptability_task(documents, folder, valid_share, seed, sizes)
    found = {}
    for split in said:
        with (folder / f"{split}.tsv").open(encoding="utf-8", newline="") as lines:
            found[split] = list(csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))
    return said, found


def test_colas_layout_and_balance_and_no_sentence_twice_or_trained_on(tmp_path):
    sizes, rows = write(tmp_path / "task")
    assert sizes == {"train": 40, "dev": 10}
    for split, size in sizes.items():
        assert [len(row) for row in rows[split]] == [4] * size
        assert sum(row[1] == "1" for row in rows[split]) == size // 2
        assert all(row[1:3] in (["1", ""], ["0", "*"]) for row in rows[split])
    bags = [tuple(sorted(row[3].lower().rstrip(".").split())) for split in rows.values() for row in split]
    assert len(set(bags)) == len(bags)
    held_out = held_out_sentences(DOCUMENTS, 0.5, 1)
    assert COMMON not in held_out
    assert {row[3] for split in rows.values() for row in split if row[1] == "1"} <= set(held_out)
    for seed, same in ((1, True), (2, False)):
        assert (write(tmp_path / f"seed{seed}", seed=seed)[1]["train"] == rows["train"]) is same


def test_little_text_gives_smaller_files_and_too_little_is_refused(tmp_path):
    sizes, _ = write(tmp_path / "task", sizes=(4000, 1000))
    assert sizes["train"] + sizes["dev"] <= len(held_out_sentences(DOCUMENTS, 0.5, 1))
    assert sizes["train"] == pytest.approx(4 * sizes["dev"], abs=8)
    with pytest.raises(UserError, match="only 0 sentences .* use more text and a new folder"):
        write(tmp_path / "none", DOCUMENTS[:3], valid_share=0.0)
    assert not (tmp_path / "none").exists()


@given(st.lists(st.sampled_from(["Anna", "sees", "the", "USA,", "house"]), min_size=2), st.integers())
def test_shuffled_words(words, seed):
    sentence = " ".join(["The", *words, "end."])
    shuffled = shuffle_words(sentence, random.Random(seed))
    assert shuffled != sentence and shuffled[0].isupper()
    assert shuffled[-1] == "." and shuffled[-2] not in ",."
    assert sorted(shuffled.lower().strip(".").split()) == sorted(sentence.lower().strip(".").split())
    with pytest.raises(UserError, match="cannot be shuffled"):
        shuffle_words("No no no no.", random.Random(seed))
