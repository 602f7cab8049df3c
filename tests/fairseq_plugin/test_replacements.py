"""The table of replacements: each row fits, is put in place once, and one that does not fit is named."""

import importlib
import subprocess
import sys
from types import SimpleNamespace

import pytest
from fairseq.tasks import FairseqTask
from helpers import ROOT

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin import replacements
from lazyformer_fairseq.fairseq_plugin.reliability.options import is_task_of_ours, names_task_of_ours
from lazyformer_fairseq.fairseq_plugin.replacements import REPLACEMENTS, WRITTEN_FOR, Replacement, Stage


def test_every_row_fits_the_fairseq_that_is_installed_and_says_why(warm_python):
    """In a fresh process: here all are in place already."""
    code = (
        "import fairseq\n"
        "from lazyformer_fairseq.fairseq_plugin.replacements import REPLACEMENTS, find_missing_target\n"
        "print([misfit for row in REPLACEMENTS if (misfit := find_missing_target(row))])"
    )
    run = subprocess.run([warm_python / "python", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert run.stdout == "[]\n", run.stdout + run.stderr
    assert (ROOT / "setup.py").read_text().count(WRITTEN_FOR.replace(" ", "==")) == 1
    assert len(REPLACEMENTS) == len({row.target for row in REPLACEMENTS})
    for row in REPLACEMENTS:
        module, _, name = row.ours.partition(":")
        assert callable(getattr(importlib.import_module(f"lazyformer_fairseq.fairseq_plugin.{module}"), name)), row
        assert len(row.why) > 10, row


class Fairseq:
    """Stands for a module and a class of fairseq's."""

    def method(self, samples):
        return samples

    @staticmethod
    def static(samples):
        return samples


def doubled(original, *args, **kwargs):
    return original(*args, **kwargs), original(*args, **kwargs)


@pytest.fixture
def table(monkeypatch):
    """Sets the rows of a table that is nowhere in place; what was put in place is taken away again."""
    for name in ("stands_for_fairseq", "lazyformer_fairseq.fairseq_plugin.stands_for_ours"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(Fairseq=Fairseq, doubled=doubled))
    monkeypatch.setattr(replacements, "_before", {})
    for name in ("method", "static"):
        monkeypatch.setattr(Fairseq, name, vars(Fairseq)[name])
    return lambda *rows: monkeypatch.setattr(replacements, "REPLACEMENTS", rows)


def row(name: str, stage: Stage = Stage.RUN) -> Replacement:
    return Replacement(stage, f"stands_for_fairseq:Fairseq.{name}", "stands_for_ours:doubled", "a test")


def test_what_does_not_fit_is_named_all_of_it(table, caplog):
    good, gone = row("static"), row("gone")
    table(good, gone)
    with pytest.raises(UserError) as refusal:
        replacements.start_run()
    assert WRITTEN_FOR in str(refusal.value)
    assert "stands_for_fairseq:Fairseq.gone does not exist" in str(refusal.value)
    assert Fairseq.static(1) == 1, "nothing is put in place by halves"
    assert replacements.install(Stage.RUN) == [good], "of stock tasks' sake a registration warns and goes on"
    assert "Fairseq.gone does not exist" in caplog.text
    assert replacements.install(Stage.RUN) == [] and Fairseq.static(1) == (1, 1), "a second time nothing is wrapped"


def test_whose_task_a_command_names():
    from lazyformer_fairseq.fairseq_plugin.tasks.finetuning import GlueTask

    for task, ours in (("glue", True), ("masked_lm", False), ("stream_language_modeling", True), (None, False)):
        assert names_task_of_ours(SimpleNamespace(task=task)) == ours
        assert names_task_of_ours(SimpleNamespace(task=SimpleNamespace(_name=task))) == ours
    assert not names_task_of_ours(SimpleNamespace())
    assert is_task_of_ours(type("Mine", (GlueTask,), {"__module__": "mine"})), "a task that extends ours"
    assert not is_task_of_ours(FairseqTask) and not is_task_of_ours(None)
