"""The table of replacements: each row fits, is put in place once, and one that does not fit is named."""

import copy
import importlib
import inspect
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from fairseq import checkpoint_utils
from fairseq.tasks import FairseqTask
from fairseq.trainer import Trainer
from helpers import ROOT
from typing_extensions import override

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin import replacements
from lazyformer_fairseq.fairseq_plugin.reliability.options import is_task_of_ours, names_task_of_ours
from lazyformer_fairseq.fairseq_plugin.replacements import REPLACEMENTS, WRITTEN_FOR, How, Replacement, Stage


def other_parameters(row: Replacement) -> Iterator[str]:
    """In words, what a row, or methods of it that say ``@override``, take that fairseq's does not, or the reverse."""
    _, _, standing = replacements._find(row.target)
    if standing is replacements._ABSENT or row.how is How.MAKES or inspect.isbuiltin(standing):
        return
    ours = replacements._ours(row)
    pairs = [(standing, ours, 1 if row.how is How.AROUND else 0)]
    if inspect.isclass(ours):
        methods = [getattr(method, "__func__", method) for method in vars(ours).values()]
        overriding = [method for method in methods if getattr(method, "__override__", False)]
        pairs = [(inspect.getattr_static(standing, method.__name__), method, 0) for method in overriding]
    any_others = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    for theirs, function, skip in pairs:
        signatures = [inspect.signature(getattr(each, "__func__", each)).parameters for each in (theirs, function)]
        kinds = [{parameter.kind for parameter in each.values()} for each in signatures]
        expected, names = (
            [name for name, each in those.items() if each.kind not in any_others] for those in signatures
        )
        names = names[skip:]
        takes_all, passes_all_on = (any_others <= each for each in kinds)
        if not takes_all and names != (expected[: len(names)] if passes_all_on else expected):
            yield f"{row.target} takes ({', '.join(expected)}), not ({', '.join(names)})"


def test_every_row_fits_the_fairseq_that_is_installed_and_says_why(warm_python):
    """In a fresh process: here all are in place already."""
    code = (
        "import sys, fairseq\n"
        "from lazyformer_fairseq.fairseq_plugin.replacements import REPLACEMENTS, find_misfit\n"
        "print([misfit for row in REPLACEMENTS if (misfit := find_misfit(row))])\n"
        "sys.path.insert(0, 'tests')\n"
        "from fairseq_plugin.test_replacements import other_parameters\n"
        "print([other for row in REPLACEMENTS for other in other_parameters(row)])"
    )
    run = subprocess.run([warm_python / "python", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert run.stdout.split() == ["[]", "[]"], run.stdout + run.stderr
    assert (ROOT / "setup.py").read_text().count(WRITTEN_FOR.replace(" ", "==")) == 1
    assert len(REPLACEMENTS) == len({row.target for row in REPLACEMENTS})
    for row in REPLACEMENTS:
        module, _, name = row.ours.partition(":")
        assert callable(getattr(importlib.import_module(f"lazyformer_fairseq.fairseq_plugin.{module}"), name)), row
        assert len(row.why) > 10, row


def test_a_second_time_nothing_is_wrapped_again():
    standing = checkpoint_utils.save_checkpoint, Trainer.__new__, Trainer.__init__
    assert replacements.install(Stage.REGISTRATION, Stage.LOADING, Stage.RUN) == []
    replacements.start_run()
    assert standing == (checkpoint_utils.save_checkpoint, Trainer.__new__, Trainer.__init__)


class Fairseq:
    """Stands for a module and a class of fairseq's."""

    def method(self, samples):
        return samples

    @staticmethod
    def static(samples):
        return samples

    @classmethod
    def of_class(cls, samples):
        return cls, samples


class Careful(Fairseq):
    """Made for the number 7."""

    def __init__(self, number):
        self.number = number

    @staticmethod
    def serves(number=None):
        return number == 7

    @override
    def method(self, samples):
        return super().method(samples), "checked"


def doubled(original, *args, **kwargs):
    return original(*args, **kwargs), original(*args, **kwargs)


@pytest.fixture
def table(monkeypatch):
    """Sets the rows of a table that is nowhere in place; what was put in place is taken away again."""
    for name in ("stands_for_fairseq", "lazyformer_fairseq.fairseq_plugin.stands_for_ours"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(Fairseq=Fairseq, Careful=Careful, doubled=doubled))
    monkeypatch.setattr(replacements, "_before", {})
    for name in ("method", "static", "of_class"):
        monkeypatch.setattr(Fairseq, name, vars(Fairseq)[name])
    return lambda *rows: monkeypatch.setattr(replacements, "REPLACEMENTS", rows)


def row(name: str, stage: Stage = Stage.RUN) -> Replacement:
    return Replacement(stage, f"stands_for_fairseq:Fairseq.{name}", "stands_for_ours:doubled", "a test")


def test_methods_of_all_kinds_are_wrapped(table):
    table(row("method"), row("static"), row("of_class"))
    assert len(replacements.install(Stage.RUN)) == 3 and replacements.install(Stage.RUN) == []
    assert Fairseq().method(1) == (1, 1)
    assert Fairseq().static(1) == Fairseq.static(1) == (1, 1)
    assert Fairseq.of_class(1) == ((Fairseq, 1), (Fairseq, 1))


def test_what_does_not_fit_is_named_all_of_it(table, caplog):
    good, gone = row("static"), row("gone")
    table(good, gone)
    with pytest.raises(UserError) as refusal:
        replacements.start_run()
    assert WRITTEN_FOR in str(refusal.value)
    assert "stands_for_fairseq:Fairseq.gone is not there" in str(refusal.value)
    assert Fairseq.static(1) == 1, "nothing is put in place by halves"
    assert replacements.install(Stage.RUN) == [good], "of stock tasks' sake a registration warns and goes on"
    assert "Fairseq.gone is not there" in caplog.text


def test_loading_safely_puts_all_back(table):
    table(row("static", stage=Stage.LOADING), row("method"))
    with replacements.loading_safely():
        assert Fairseq.static(1) == (1, 1) and Fairseq().method(1) == 1
    assert Fairseq.static(1) == 1 and isinstance(vars(Fairseq)["static"], staticmethod)
    with replacements.loading_safely():
        replacements.start_run()
    assert Fairseq.static(1) == (1, 1), "a run that started meanwhile keeps it"


def test_a_subclass_is_made_where_it_serves(table, monkeypatch):
    monkeypatch.setattr(Fairseq, "__init__", Careful.__init__, raising=False)
    subclassed = Replacement(Stage.RUN, "stands_for_fairseq:Fairseq", "stands_for_ours:Careful", "a test", How.SUBCLASS)
    table(subclassed)
    assert replacements.install(Stage.RUN) == [subclassed]
    try:
        assert Fairseq(7).method(1) == (1, "checked") and Fairseq(8).method(1) == 1
        assert type(copy.copy(Fairseq(8))) is Fairseq and type(copy.copy(Fairseq(7))) is Careful
    finally:
        del Fairseq.__new__


def test_whose_task_a_command_names():
    from lazyformer_fairseq.finetuning.texts import GlueTask

    for task, ours in (("glue", True), ("masked_lm", False), ("stream_language_modeling", True), (None, False)):
        assert names_task_of_ours(SimpleNamespace(task=task)) == ours
        assert names_task_of_ours(SimpleNamespace(task=SimpleNamespace(_name=task))) == ours
    assert not names_task_of_ours(SimpleNamespace())
    assert is_task_of_ours(type("Mine", (GlueTask,), {"__module__": "mine"})), "a task that extends ours"
    assert not is_task_of_ours(FairseqTask) and not is_task_of_ours(None)
