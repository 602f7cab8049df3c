"""SQuAD's files prepared: windows on disk, articles held out, oddities listed, the second time reused."""

import json
from pathlib import Path

import numpy as np
import pytest
from helpers import toy_texts, train_tokenizer
from squad_grids import START
from toy_squad import write_squad, write_toy_squad

from lazyformer_fairseq.data.datasets.question_windows import WindowSettings, make_windows
from lazyformer_fairseq.data.squad import read_squad
from lazyformer_fairseq.data.text.normalisation import TextSettings
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.finetuning.squad_data import Preparation, PreparedSquad, overview, prepare, prepare_squad

SETTINGS = WindowSettings(15, 2, 6)


@pytest.fixture
def made(tmp_path):
    """The official folder, the tokenizer and what was prepared of them."""
    folder = write_toy_squad(tmp_path / "data", train=4, valid=2)
    tokenizer = train_tokenizer(tmp_path / "tokenizer", toy_texts(20), 100, TextSettings())
    prepared = prepare_squad({"train": folder / "train-v1.1.json"}, tokenizer.folder, tmp_path / "prepared", SETTINGS)
    return folder, tokenizer, prepared


def test_what_is_read_is_what_was_made(made):
    folder, tokenizer, prepared = made
    read = PreparedSquad.load(prepared.folder).read("train")
    file = read_squad(folder / "train-v1.1.json")
    windows = make_windows(tokenizer, file, SETTINGS)
    assert read.file.paragraphs == file.paragraphs
    for name in ("ids", "sizes", "question", "place", "first", "count", "own", "targets", "offsets", "context_starts"):
        assert np.array_equal(getattr(read.windows, name), getattr(windows, name)), name
    assert prepared.settings == SETTINGS


@pytest.mark.parametrize("name", ["ids", "sizes", "question", "place", "first", "count", "targets", "context_starts"])
def test_numbers_that_lead_outside_are_refused(made, name):
    path = made[2].folder / "train.npz"
    whole = dict(np.load(path))
    for value in (-1, 2**31 - 1):
        arrays = {**whole, name: whole[name].astype(np.int64)}
        arrays[name].flat[-1] = value
        np.savez(path, **arrays)
        with pytest.raises(UserError, match=r"train\.\*: damaged \(.*; remove .*prepared and run"):
            made[2].read("train")


def test_damaged_files_are_refused(made):
    path = made[2].folder / "train.npz"
    whole, arrays = path.read_bytes(), dict(np.load(path))
    damages = [lambda: path.write_bytes(whole[:900]), path.unlink]
    for place in (np.array([None]), arrays["place"] * 1.0, arrays["place"][1:]):
        damages.append(lambda place=place: np.savez(path, **{**arrays, "place": place}))
    for damage in damages:
        path.write_bytes(whole)
        damage()
        with pytest.raises(UserError, match=r"train\.\*: damaged"):
            made[2].read("train")


def test_other_folders_and_splits_are_refused(made, tmp_path):
    prepared = made[2]
    with pytest.raises(UserError, match="holds no split 'valid', but train"):
        prepared.read("valid")
    path = prepared.folder / "manifest.json"
    manifest = json.loads(path.read_text())
    for change, words in (
        ({"format": "lazyformer glue task"}, "is not the manifest of prepared SQuAD"),
        ({"format_version": 9}, "format version 9, but this program reads 1"),
        ({"splits": {"../train": {}}}, "damaged"),
        ({"max_length": "long"}, "damaged"),
    ):
        path.write_text(json.dumps({**manifest, **change}))
        with pytest.raises(UserError, match=words):
            PreparedSquad.load(prepared.folder)
    with pytest.raises(UserError, match="nowhere.json: no such file"):
        prepare_squad({"train": tmp_path / "nowhere.json"}, made[1].folder, tmp_path / "other")


def wanted(data: Path, output: Path, **more) -> Preparation:
    given = {"data": data, "tokenizer": START.parent / "tokenizer", "output": output, "max_length": 64}
    return Preparation(**{**given, **more})


def test_counts_are_printed_and_the_second_time_nothing_is_made(toy_squad, tmp_path):
    prepared = prepare(wanted(toy_squad, tmp_path))
    text = overview(prepared)
    train = next(line for line in text.splitlines() if line.startswith("train-v1.1.json"))
    assert train.split()[1:5] == ["8", "16", "48", "0"]
    assert "note: dev-v1.1.json: has 12 questions; the official file has 10,570" in text
    before = (tmp_path / "data" / "manifest.json").stat().st_mtime_ns
    assert prepare(wanted(toy_squad, tmp_path)).sha256 == prepared.sha256
    assert (tmp_path / "data" / "manifest.json").stat().st_mtime_ns == before
    with pytest.raises(UserError, match="was prepared before with other max length"):
        prepare(wanted(toy_squad, tmp_path, max_length=80))


def test_mistakes_are_named_or_left_out_and_listed(toy_squad, tmp_path):
    articles = json.loads((toy_squad / "train-v1.1.json").read_text())["data"]
    for number in range(7):
        articles[number]["paragraphs"][0]["qas"][1]["answers"][0]["answer_start"] += 1
    write_squad(tmp_path / "files" / "train-v1.1.json", *articles)
    (tmp_path / "files" / "dev-v1.1.json").write_bytes((toy_squad / "dev-v1.1.json").read_bytes())
    with pytest.raises(UserError, match="7 mistakes.*--skip-mistakes"):
        prepare(wanted(tmp_path / "files", tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    text = overview(prepare(wanted(tmp_path / "files", tmp_path / "out", skip_mistakes=True)))
    assert text.count("left out: article ") == 7
    assert "(id Article 6-0-1)" in text
    with pytest.raises(UserError, match="no room for a context"):
        prepare(wanted(toy_squad, tmp_path / "new", max_length=4))
