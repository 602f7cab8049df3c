"""From official files to windows: articles held out, oddities listed, the second time reused."""

import json
from pathlib import Path

import pytest
from squad_grids import START, toy_article
from toy_squad import write_squad

from lazyformer_fairseq.data.squad.official import read_squad
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.finetuning.squad.prepare import Preparation, overview, prepare
from lazyformer_fairseq.finetuning.squad.split import split_by_articles

TOKENIZER = START.parent / "tokenizer"


def titles(path: Path) -> list[str]:
    return list(dict.fromkeys(paragraph.title for paragraph in read_squad(path).paragraphs))


@pytest.mark.parametrize(("articles", "every", "dev"), [(10, 5, [5, 10]), (11, 2, [2, 4, 6, 8, 10]), (3, 3, [3])])
def test_every_so_many_th_article_is_held_out(tmp_path, articles, every, dev):
    source = write_squad(tmp_path / "all.json", *map(toy_article, range(1, articles + 1)))
    folder = split_by_articles(source, every, tmp_path / "split")
    assert titles(folder / "dev-v1.1.json") == [f"Article {number}" for number in dev]
    rest = [number for number in range(1, articles + 1) if number not in dev]
    assert titles(folder / "train-v1.1.json") == [f"Article {number}" for number in rest]
    manifest = json.loads((folder / "split.json").read_text())
    assert (manifest["dev_articles"], manifest["every"]) == (titles(folder / "dev-v1.1.json"), every)
    before = (folder / "dev-v1.1.json").stat().st_mtime_ns
    assert split_by_articles(source, every, folder) == folder
    assert (folder / "dev-v1.1.json").stat().st_mtime_ns == before


def test_another_split_in_its_place_is_refused(tmp_path):
    source = write_squad(tmp_path / "all.json", *map(toy_article, range(6)))
    folder = split_by_articles(source, 3, tmp_path / "split")
    with pytest.raises(UserError, match="holds another split \\(other every\\)"):
        split_by_articles(source, 2, folder)
    (folder / "dev-v1.1.json").unlink()
    with pytest.raises(UserError, match="other dev-v1.1.json"):
        split_by_articles(source, 3, folder)


@pytest.mark.parametrize(("content", "words"), [("[]", "not an object"), ('{"data": [{}]}', "has 1 articles")])
def test_what_cannot_be_split_is_named(tmp_path, content, words):
    (tmp_path / "all.json").write_text(content)
    with pytest.raises(UserError, match=words):
        split_by_articles(tmp_path / "all.json", 2, tmp_path / "split")
    assert not (tmp_path / "split").exists()


def test_the_real_file_is_split_by_articles(real_data, tmp_path):
    folder = split_by_articles(real_data / "squad" / "train-v1.1.part.json", 5, tmp_path / "split")
    train, dev = (read_squad(folder / name) for name in ("train-v1.1.json", "dev-v1.1.json"))
    assert (len(train.questions), len(dev.questions)) == (10_005, 1_872)
    assert not {paragraph.title for paragraph in train.paragraphs} & {paragraph.title for paragraph in dev.paragraphs}


def wanted(data: Path, output: Path, **more) -> Preparation:
    sizes = {"max_length": 64, "stride": 16, "max_question_length": 16}
    return Preparation(data, TOKENIZER, output, **{**sizes, **more})


def test_counts_are_printed_and_the_second_time_nothing_is_made(toy_squad, tmp_path):
    prepared = prepare(wanted(toy_squad, tmp_path))
    text = overview(prepared)
    train = next(line for line in text.splitlines() if line.startswith("train-v1.1.json"))
    assert train.split()[1:5] == ["8", "16", "48", "0"]
    assert "note: dev-v1.1.json: has 12 questions; the official file has 10,570" in text
    before = (tmp_path / "data" / "manifest.json").stat().st_mtime_ns
    assert prepare(wanted(toy_squad, tmp_path)).sha256 == prepared.sha256
    assert (tmp_path / "data" / "manifest.json").stat().st_mtime_ns == before
    with pytest.raises(UserError, match="was prepared before with other stride"):
        prepare(wanted(toy_squad, tmp_path, stride=8))


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


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"data": "train-v1.1.json"}, "is a file; give the folder of .* --dev-articles 5"),
        ({"data": "."}, "train-v1.1.json: no such file"),
        ({"dev_articles": 9}, "has 8 articles, so that every 9th cannot be held out"),
        ({"max_length": 12}, "no room for a context"),
    ],
)
def test_what_cannot_be_prepared_is_refused(toy_squad, tmp_path, change, words):
    data = {"train-v1.1.json": toy_squad / "train-v1.1.json", ".": tmp_path}.get(change.pop("data", ""), toy_squad)
    with pytest.raises(UserError, match=words):
        prepare(wanted(data, tmp_path / "out", **change))
