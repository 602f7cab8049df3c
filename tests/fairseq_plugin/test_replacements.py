"""The table of replacements: each row fits, is put in place once, and one that does not fit is named."""

import copy
import importlib
import subprocess
import sys
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


def test_every_row_fits_the_fairseq_that_is_installed(warm_python):
    """In a fresh process: here all are in place already."""
    code = (
        "import fairseq\n"
        "from lazyformer_fairseq.fairseq_plugin.replacements import REPLACEMENTS\n"
        "from lazyformer_fairseq.fairseq_plugin.replacements import find_misfit\n"
        "print([misfit for row in REPLACEMENTS if (misfit := find_misfit(row))])\n"
        "import sys; sys.path.insert(0, 'tests')\n"
        "from fairseq_plugin.parameters_of_replacements import other_parameters\n"
        "print([other for row in REPLACEMENTS for other in other_parameters(row)])"
    )
    run = subprocess.run([warm_python / "python", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert run.stdout.split() == ["[]", "[]"], run.stdout + run.stderr
    assert (ROOT / "setup.py").read_text().count(WRITTEN_FOR.replace(" ", "==")) == 1


def test_every_target_stands_once_and_every_row_says_why():
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


def doubled(original, *args, **kwargs):
    return original(*args, **kwargs), original(*args, **kwargs)


@pytest.fixture
def table(monkeypatch):
    """Sets the rows of a table that is nowhere in place; what was put in place is taken away again."""
    module = SimpleNamespace(Fairseq=Fairseq, doubled=doubled)
    for name in ("stands_for_fairseq", "lazyformer_fairseq.fairseq_plugin.stands_for_ours"):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(replacements, "_before", {})

    def use(*rows: Replacement):
        monkeypatch.setattr(replacements, "REPLACEMENTS", rows)
        for each in rows:
            _, name, _ = replacements._find(each.target) if "gone" not in each.target else (None, None, None)
            if name:
                monkeypatch.setattr(Fairseq, name, vars(Fairseq)[name])

    return use


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


def test_a_subclass_is_made_where_it_serves(table, monkeypatch):
    monkeypatch.setattr(Fairseq, "__init__", Careful.__init__, raising=False)
    monkeypatch.setattr(sys.modules["stands_for_fairseq"], "Careful", Careful, raising=False)
    subclassed = Replacement(Stage.RUN, "stands_for_fairseq:Fairseq", "stands_for_ours:Careful", "a test", How.SUBCLASS)
    monkeypatch.setattr(replacements, "REPLACEMENTS", (subclassed,))
    assert replacements.install(Stage.RUN) == [subclassed]
    try:
        assert Fairseq(7).method(1) == (1, "checked") and Fairseq(8).method(1) == 1
        assert type(copy.copy(Fairseq(8))) is Fairseq and type(copy.copy(Fairseq(7))) is Careful
    finally:
        del Fairseq.__new__


@pytest.mark.parametrize(
    ("settings", "ours"),
    [
        (SimpleNamespace(task="glue"), True),
        (SimpleNamespace(task="masked_lm"), False),
        (SimpleNamespace(task=None), False),
        (SimpleNamespace(), False),
        (SimpleNamespace(task=SimpleNamespace(_name="stream_language_modeling")), True),
        (SimpleNamespace(task=SimpleNamespace(_name="language_modeling")), False),
    ],
)
def test_whose_task_a_command_names(settings, ours):
    assert names_task_of_ours(settings) == ours


def test_a_task_that_extends_ours_is_ours():
    from lazyformer_fairseq.finetuning.texts import GlueTask

    assert is_task_of_ours(type("Mine", (GlueTask,), {"__module__": "mine"}))
    assert not is_task_of_ours(FairseqTask) and not is_task_of_ours(None)
