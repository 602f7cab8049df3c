"""The demo in miniature: the same code as ``make demo`` on a toy text."""

import json
import re
import subprocess
import sys
import time
from dataclasses import asdict, replace
from itertools import pairwise

import pytest
import torch
from fairseq.trainer import Trainer
from helpers import toy_texts

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.demo import clock, run, side_by_side
from lazyformer_fairseq.experiments.demo.clock import Clock
from lazyformer_fairseq.experiments.demo.run import run_demo
from lazyformer_fairseq.experiments.demo.settings import MODELS, DemoSettings


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> DemoSettings:
    text = tmp_path_factory.mktemp("text") / "toy.txt"
    text.write_text("\n\n".join(toy_texts(200)))
    return DemoSettings(corpus=str(text), vocab_size=160, minutes=None, updates=24, finetuning_updates=4)


class Killed(BaseException):
    """Stands for Ctrl-C at a chosen moment."""


def test_the_demo_from_an_interrupt_to_its_report_and_again(settings, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "demo"
    original = side_by_side.Run.update

    def update(self):
        if self.updates == 13:
            raise Killed
        original(self)

    with monkeypatch.context() as patched:
        patched.setattr(side_by_side.Run, "update", update)
        with pytest.raises(Killed):
            run_demo(settings, folder)
    capsys.readouterr()

    run_demo(settings, folder)
    printed = capsys.readouterr().out
    assert "Reusing the text" in printed
    assert re.search(r"Resuming pre-training at bert_m1x4: update 1[0-3], lazyformer_m2x2: update 1[0-3]\.", printed)
    assert_report_is_complete(printed, folder)
    results = json.loads((folder / "pretraining.json").read_text())
    sizes = [result["parameters"] for result in results.values()]
    assert max(sizes) < 1.01 * min(sizes), "the two models are meant to be of one size"
    for result in results.values():
        assert result["curve"]["updates"] == list(range(0, 25, 4))
        assert result["curve"]["loss"][-1] < result["curve"]["loss"][0]

    run_demo(settings, folder)
    again = capsys.readouterr().out
    assert again.count("Reusing") == 3
    assert_report_is_complete(again, folder)

    with pytest.raises(UserError, match=r"a demo of other settings \(.*updates is 24 there, 99 here.*another folder"):
        run_demo(DemoSettings(updates=99), folder)


def test_a_text_that_fails_does_not_claim_the_folder(settings, tmp_path):
    for missing in ("missing.txt", "another.txt"):
        with pytest.raises(UserError, match=missing):
            run_demo(replace(settings, corpus=missing), tmp_path / "demo")
        assert json.loads((tmp_path / "demo" / "settings.json").read_text())["corpus"] == missing


def assert_report_is_complete(printed: str, folder) -> None:
    rows = [line for line in printed.splitlines() if line.startswith("|")]
    assert [row.split("|")[1].strip() for row in rows[2:]] == list(MODELS)
    assert "unigram entropy is" in printed
    assert "24 of 24 updates of pre-training and 4 of 4 updates of fine-tuning." in printed
    assert printed.count("<mask>") == 5 and printed.count("%)") == 15
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "table.md").read_text().strip() in printed


class FakeClock:
    """A second an update and a second a validation, as long as nobody changes `pace`."""

    def __init__(self, monkeypatch):
        self.seconds, self.pace = 1000.0, 1.0
        self.rates: list[float] = []  # of each update
        monkeypatch.setattr(clock, "monotonic", lambda: self.seconds)
        update, validate = side_by_side.Run.update, side_by_side.Run.validate

        def update_in_time(run):
            self.rates.append(run.trainer.get_lr())
            update(run)
            self.seconds += self.pace
            run.seconds[-1] = self.pace

        def validate_in_time(run):
            validate(run)
            self.seconds += self.pace
            run.validation_seconds = self.pace

        monkeypatch.setattr(side_by_side.Run, "update", update_in_time)
        monkeypatch.setattr(side_by_side.Run, "validate", validate_in_time)


@pytest.fixture(scope="module")
def prepared(settings, tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared")
    with run._quiet_on_one_thread():
        run._prepare(settings, folder / "data", folder / "task")
    return folder


@pytest.mark.parametrize("slower_from", [None, 40, 90])
def test_pretraining_ends_in_time_at_any_pace(settings, prepared, tmp_path, monkeypatch, slower_from):
    """Also where the machine becomes four times as slow on the way; the learning rate ends at zero all the same."""
    fake = FakeClock(monkeypatch)
    began = fake.seconds
    update = side_by_side.Run.update

    def slowing(one):
        fake.pace = 4.0 if slower_from and fake.seconds > began + slower_from else 1.0
        update(one)

    monkeypatch.setattr(side_by_side.Run, "update", slowing)
    runs = side_by_side.pretrain(
        replace(settings, minutes=3, updates=1000), prepared / "data", tmp_path, Clock(3, tmp_path / "clock.json")
    )
    until, turn = 180 * side_by_side.PRETRAINED_BY, 2 * fake.pace
    assert until - 4 * turn <= fake.seconds - began <= until + turn
    first, second = runs
    assert min(b - a for a, b in pairwise(first.curve["updates"][:-1])) >= first.updates / side_by_side.VALIDATIONS
    assert side_by_side.FEWEST < first.updates == second.updates < 1000
    assert first.curve["updates"] == second.curve["updates"] and first.curve["updates"][-1] == first.updates
    assert max(fake.rates[-2:]) < 0.2 * settings.rate < 0.9 * settings.rate < max(fake.rates)


def test_a_resumed_demo_gets_no_more_time_than_another(settings, prepared, tmp_path, monkeypatch):
    fake = FakeClock(monkeypatch)
    began, update = fake.seconds, side_by_side.Run.update

    def stopped(one):
        if fake.seconds > began + 80:
            raise Killed
        update(one)

    settings = replace(settings, minutes=3, updates=1000)
    for name in ("data", "acceptability"):
        (tmp_path / name).symlink_to(prepared / {"acceptability": "task"}.get(name, name))
    (tmp_path / "settings.json").write_text(json.dumps(asdict(settings)))
    with monkeypatch.context() as patched:
        patched.setattr(side_by_side.Run, "update", stopped)
        with pytest.raises(Killed):
            run_demo(settings, tmp_path)
    fake.seconds += 1000  # between two starts time does not count
    run_demo(settings, tmp_path)
    assert fake.seconds - began - 1000 <= 180 * side_by_side.FINETUNED_BY + 4


def test_a_clock_that_has_run_out_leaves_the_fewest_updates(settings, prepared, tmp_path):
    (tmp_path / "clock.json").write_text('{"seconds": 1000}')
    runs = side_by_side.pretrain(settings, prepared / "data", tmp_path, Clock(1, tmp_path / "clock.json"))
    assert [one.updates for one in runs] == [side_by_side.FEWEST] * 2


def test_the_start_of_a_process_counts(tmp_path):
    began = time.monotonic()
    code = "from lazyformer_fairseq.experiments.demo.clock import *; print(seconds_of_this_process())"
    told = float(subprocess.check_output([sys.executable, "-c", code], text=True))
    assert 0 < told < time.monotonic() - began + 0.1  # a tick of the system's clock is a hundredth of a second
    settled = Clock(1, tmp_path / "clock.json", spent=50)
    assert settled.left(1) <= 10


def test_both_models_see_the_same_batches(settings, prepared, tmp_path, monkeypatch):
    seen: dict[str, list[torch.Tensor]] = {name: [] for name in MODELS}
    original = Trainer.train_step

    def train_step(trainer, samples, *args, **kwargs):
        name = trainer.cfg.checkpoint.save_dir.rsplit("/", 1)[-1]
        seen[name].append(samples[0]["net_input"]["src_tokens"])
        return original(trainer, samples, *args, **kwargs)

    monkeypatch.setattr(Trainer, "train_step", train_step)
    side_by_side.pretrain(settings, prepared / "data", tmp_path, Clock(None, tmp_path / "clock.json"))
    first, second = seen.values()
    assert len(first) == len(second) == settings.updates
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
