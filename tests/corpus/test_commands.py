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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--slurm", "time=1:00:00"], "with --executor slurm alone"),
        (["--executor", "slurm", "--slurm", "time"], "expected KEY=VALUE"),
        (["--spacy-model", "xx_no_such"], "not installed"),
    ],
)
def test_what_cannot_be_is_said_before_work_begins(text, tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        run(text, str(tmp_path / "out"), *options)
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]
