"""The table of hooks: each row fits, is put in place once, and one that does not fit is named."""

import importlib
import subprocess
import sys
from types import SimpleNamespace

import pytest
from fairseq import checkpoint_utils
from fairseq.tasks import FairseqTask
from fairseq.trainer import Trainer
from helpers import ROOT

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.reliability import installing
from lazyformer_fairseq.fairseq_plugin.reliability.hooks import HOOKS, WRITTEN_FOR, Hook, Stage
from lazyformer_fairseq.fairseq_plugin.reliability.our_runs import is_task_of_ours, names_task_of_ours


def test_every_row_fits_the_fairseq_that_is_installed(warm_python):
    """In a fresh process: here hooks are in place already."""
    code = (
        "import fairseq\n"
        "from lazyformer_fairseq.fairseq_plugin.reliability.hooks import HOOKS\n"
        "from lazyformer_fairseq.fairseq_plugin.reliability.installing import find_misfit\n"
        "print([misfit for hook in HOOKS if (misfit := find_misfit(hook))])"
    )
    run = subprocess.run([warm_python / "python", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert run.stdout.strip() == "[]", run.stderr
    assert (ROOT / "setup.py").read_text().count(WRITTEN_FOR.replace(" ", "==")) == 1


def test_every_row_has_a_wrapper_and_says_why():
    assert len(HOOKS) == len(set(HOOKS)) > 60
    for hook in HOOKS:
        module, _, name = hook.wrapper.partition(":")
        assert callable(getattr(importlib.import_module(f"lazyformer_fairseq.fairseq_plugin.{module}"), name)), hook
        assert len(hook.why) > 10 or hook.why.startswith("--"), hook


def test_a_second_time_nothing_is_wrapped_again():
    standing = checkpoint_utils.save_checkpoint, Trainer.train_step, Trainer.__init__
    assert installing.install(Stage.REGISTRATION, Stage.LOADING, Stage.RUN) == []
    installing.start_run()
    assert standing == (checkpoint_utils.save_checkpoint, Trainer.train_step, Trainer.__init__)


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


def of_a_batch(original, self, batch):
    return original(self, batch)


@pytest.fixture
def table(monkeypatch):
    """Sets the rows of a table that is nowhere in place; what was put in place is taken away again."""
    module = SimpleNamespace(Fairseq=Fairseq, doubled=doubled, of_a_batch=of_a_batch)
    for name in ("stands_for_fairseq", "lazyformer_fairseq.fairseq_plugin.stands_for_ours"):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(installing, "_before", {})

    def use(*rows: Hook):
        monkeypatch.setattr(installing, "HOOKS", rows)
        for hook in rows:
            _, name, _ = installing._find(hook.target) if "gone" not in hook.target else (None, None, None)
            if name:
                monkeypatch.setattr(Fairseq, name, vars(Fairseq)[name])

    return use


def row(name: str, wrapper: str = "doubled", stage: Stage = Stage.RUN) -> Hook:
    return Hook(stage, f"stands_for_fairseq:Fairseq.{name}", f"stands_for_ours:{wrapper}", "a test")


def test_methods_of_all_kinds_are_wrapped(table):
    table(row("method"), row("static"), row("of_class"))
    assert len(installing.install(Stage.RUN)) == 3 and installing.install(Stage.RUN) == []
    assert Fairseq().method(1) == (1, 1)
    assert Fairseq().static(1) == Fairseq.static(1) == (1, 1)
    assert Fairseq.of_class(1) == ((Fairseq, 1), (Fairseq, 1))


def test_what_does_not_fit_is_named_all_of_it(table, caplog):
    good, other, gone = row("static"), row("method", "of_a_batch"), row("gone")
    table(good, other, gone)
    with pytest.raises(UserError) as refusal:
        installing.start_run()
    assert WRITTEN_FOR in str(refusal.value)
    assert "stands_for_fairseq:Fairseq.method takes (self, samples), not (self, batch)" in str(refusal.value)
    assert "stands_for_fairseq:Fairseq.gone is not there" in str(refusal.value)
    assert Fairseq.static(1) == 1, "nothing is put in place by halves"
    assert installing.install(Stage.RUN) == [good], "of stock tasks' sake a registration warns and goes on"
    assert "Fairseq.gone is not there" in caplog.text


def test_a_wrapper_of_somebody_else_that_passes_all_on_fits(table, monkeypatch):
    table(row("method", "of_a_batch"))
    monkeypatch.setattr(Fairseq, "method", lambda self, *args, **kwargs: "theirs")
    installing.start_run()
    assert Fairseq().method(1) == "theirs"


def test_loading_safely_puts_all_back(table):
    table(row("static", stage=Stage.LOADING), row("method"))
    with installing.loading_safely():
        assert Fairseq.static(1) == (1, 1) and Fairseq().method(1) == 1
    assert Fairseq.static(1) == 1 and isinstance(vars(Fairseq)["static"], staticmethod)
    with installing.loading_safely():
        installing.start_run()
    assert Fairseq.static(1) == (1, 1), "a run that started meanwhile keeps it"


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
    from lazyformer_fairseq.fairseq_plugin.tasks.glue import GlueTask

    assert is_task_of_ours(type("Mine", (GlueTask,), {"__module__": "mine"}))
    assert not is_task_of_ours(FairseqTask) and not is_task_of_ours(None)
