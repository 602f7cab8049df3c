"""`lazyformer corpus`: what it says to its user."""

import pytest
from click.testing import CliRunner
from helpers import toy_texts

from lazyformer_fairseq.corpus import build
from lazyformer_fairseq.corpus.commands import corpus
from lazyformer_fairseq.errors import UserError


def run(*command: str):
    return CliRunner().invoke(corpus, command, catch_exceptions=False)


@pytest.fixture
def text(tmp_path) -> str:
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(toy_texts(60, 1)))
    return str(path)


def test_stopped_by_ctrl_c(text, tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(build, "plan_units", interrupted)
    result = run(text, str(tmp_path / "out"), "--workers", "1")
    assert result.exit_code == 130
    assert result.stderr.splitlines()[-1].endswith("out: stopped; rerun to resume")


def test_it_says_how_the_input_was_understood(text, tmp_path):
    result = run(text, str(tmp_path / "out"), "--vocab-size", "160", "--valid-share", "0.1", "--workers", "1")
    assert "read as text: 1 file, 0.0 MB; a document is what stands between blank lines" in result.stderr


def test_what_cannot_be_is_said_before_work_begins(text, tmp_path):
    with pytest.raises(UserError, match="not installed"):
        run(text, str(tmp_path / "out"), "--spacy-model", "xx_no_such")
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


def test_what_cleaning_dropped_is_said_early_and_by_rule(tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("A short one.\n\nAnd a second.\n\nno sentence\n")
    with pytest.raises(UserError, match=r"none of the 3 documents is left: dropped 3 too short \(--min-document-char"):
        run(str(path), str(tmp_path / "out"), "--workers", "1")


def test_short_documents_of_other_scripts_stay(tmp_path):
    path = tmp_path / "some.txt"
    chinese = "北京是中华人民共和国的首都，也是全国的政治和文化中心，人口超过两千万。"
    japanese = "東京は日本の首都であり、世界でも最大級の都市の一つとして知られている場所です。"
    russian = "Москва является столицей России и самым большим городом этой страны, в котором живут многие миллионы."
    path.write_text("\n\n".join([chinese, japanese, russian, "你好。", "Привет!"]))
    result = run(str(path), str(tmp_path / "out"), "--workers", "1", "--vocab-size", "110")
    assert result.exit_code == 0
    assert "dropped of 5 documents: 2 too short (--min-document-characters)" in result.stderr
    assert "valid 1 sentences" in result.output
    options = ["--workers", "1", "--vocab-size", "110", "--min-document-characters", "0", "--valid-share", "0"]
    result = run(str(path), str(tmp_path / "all"), *options)
    assert "5 documents, 0 of them dropped" in result.output and "valid empty" in result.output
    assert "valid: empty" in (tmp_path / "all" / "report.html").read_text()


def test_what_is_not_utf_8_is_said(tmp_path):
    path = tmp_path / "latin.txt"
    path.write_bytes("\n\n".join(["Un café à Paris. " * 9, *toy_texts(20)]).encode("cp1252"))
    result = run(str(path), str(tmp_path / "out"), "--workers", "1", "--vocab-size", "110")
    assert "1 lines are not UTF-8 and were read as Windows-1252" in result.stderr
    assert f"the first are in {path}" in result.stderr


def test_more_shards_than_the_input_fills(text, tmp_path):
    with pytest.raises(UserError, match="--shards 2: the input is 1 units of work"):
        run(text, str(tmp_path / "out"), "--workers", "1", "--shards", "2")


def test_the_advice_for_a_small_vocabulary_can_be_followed(text, tmp_path):
    with pytest.raises(UserError, match=r"vocabulary of 10: too small .*; give at least (\d+)$") as caught:
        run(text, str(tmp_path / "out"), "--workers", "1", "--vocab-size", "10")
    smallest = str(caught.value).split()[-1]
    assert run(text, str(tmp_path / "out"), "--workers", "1", "--vocab-size", smallest).exit_code == 0


def test_a_tokenizer_of_ones_own(text, tmp_path):
    options = ["--workers", "1", "--valid-share", "0.1"]
    run(text, str(tmp_path / "first"), *options, "--vocab-size", "160")
    mine = str(tmp_path / "first" / "tokenizer")
    result = run(text, str(tmp_path / "second"), *options, "--tokenizer", mine)
    assert result.exit_code == 0
    for name in ("tokenizer/tokenizer.json", "dict.txt", "shard0/train.bin", "shard0/valid.bin"):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()
    with pytest.raises(UserError, match="--cased: the settings of --tokenizer decide"):
        run(text, str(tmp_path / "third"), *options, "--tokenizer", mine, "--cased")
    with pytest.raises(UserError, match="is .* a tokenizer folder"):
        run(text, str(tmp_path / "third"), *options, "--tokenizer", str(tmp_path / "no"))
