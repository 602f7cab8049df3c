"""The demo in miniature: the same code as ``make demo`` on a toy text."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from fairseq.trainer import Trainer
from helpers import toy_texts

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.demo import run
from lazyformer_fairseq.experiments.demo.run import Clock, DemoTraining, run_demo
from lazyformer_fairseq.experiments.demo.settings import FEWEST, MODELS, DemoSettings


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> DemoSettings:
    text = tmp_path_factory.mktemp("text") / "toy.txt"
    text.write_text("\n\n".join(toy_texts(200)))
    return DemoSettings(corpus=str(text), vocab_size=160, updates=24, finetuning_updates=4)


@pytest.fixture(scope="module")
def finished(settings, tmp_path_factory) -> tuple[Path, dict[str, list[torch.Tensor]]]:
    """A demo that was interrupted at its 14th update and went on; and the batches of each model's pre-training."""
    folder, seen = tmp_path_factory.mktemp("demo") / "demo", {name: [] for name in MODELS}
    update, train_step, interrupts = DemoTraining.update, Trainer.train_step, [True]

    def interrupted(training):
        if training.updates == 13 and interrupts:
            interrupts.clear()
            raise KeyboardInterrupt
        return update(training)

    def looked_at(trainer, samples, *args, **kwargs):
        place = Path(trainer.cfg.checkpoint.save_dir)
        if place.parent == folder:
            seen[place.name].append(samples[0]["net_input"]["src_tokens"])
        return train_step(trainer, samples, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(DemoTraining, "update", interrupted)
        patched.setattr(Trainer, "train_step", looked_at)
        with pytest.raises(KeyboardInterrupt):
            run_demo(settings, folder)
        run_demo(settings, folder)
    return folder, seen


def test_a_resumed_demo_has_both_models_to_the_end_on_the_same_batches(finished):
    folder, seen = finished
    results = json.loads((folder / "pretraining.json").read_text())
    sizes = [result["parameters"] for result in results.values()]
    assert max(sizes) < 1.01 * min(sizes), "the two models are meant to be of one size"
    for result in results.values():
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
    rows = [line for line in printed.splitlines() if line.startswith("|")]
    assert [row.split("|")[1].strip() for row in rows[2:]] == list(MODELS)
    assert "unigram entropy is" in printed
    assert "24 of 24 updates of pre-training and 4 of 4 updates of fine-tuning." in printed
    assert printed.count("<mask>") == 5 and printed.count("%)") == 15
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "table.md").read_text().strip() in printed
    with pytest.raises(UserError, match=r"a demo of other settings \(.*updates is 24 there, 99 here.*another folder"):
        run_demo(DemoSettings(updates=99), folder)


def test_a_text_that_fails_does_not_claim_the_folder(settings, tmp_path):
    for missing in ("missing.txt", "another.txt"):
        with pytest.raises(UserError, match=missing):
            run_demo(replace(settings, corpus=missing), tmp_path / "demo")
        assert json.loads((tmp_path / "demo" / "settings.json").read_text())["corpus"] == missing
    assert (DemoSettings().minutes, DemoSettings(updates=99).minutes) == (4.0, None)


class FakeClock:
    """A second an update and a second a validation, then four of them."""

    def __init__(self, monkeypatch):
        self.seconds = self.began = 1000.0
        self.pace = 1.0
        self.rates: list[float] = []  # of each update
        monkeypatch.setattr(run, "monotonic", lambda: self.seconds)
        update, validate = DemoTraining.update, DemoTraining.validate

        def update_in_time(training):
            self.pace = 4.0 if self.seconds > self.began + 40 else 1.0
            self.rates.append(training.trainer.get_lr())
            update(training)
            self.seconds += self.pace
            training.seconds[-1] = self.pace

        def validate_in_time(training):
            validate(training)
            self.seconds += self.pace
            training.validation_seconds = self.pace

        monkeypatch.setattr(DemoTraining, "update", update_in_time)
        monkeypatch.setattr(DemoTraining, "validate", validate_in_time)


@pytest.fixture
def prepared(finished, tmp_path) -> Path:
    """A folder in which text and task are there already."""
    for name in ("data", "acceptability"):
        (tmp_path / name).symlink_to(finished[0] / name)
    return tmp_path


def test_pretraining_ends_in_time_at_any_pace(settings, prepared, monkeypatch):
    """Where the machine becomes four times as slow on the way; the learning rate ends at zero all the same."""
    fake = FakeClock(monkeypatch)
    clock = Clock(3, prepared / "clock.json")
    found = run.pretrain(replace(settings, minutes=3, updates=1000), prepared / "data", prepared, clock)
    until, turn = 180 * run.PRETRAINED_BY, 2 * fake.pace
    assert until - 4 * turn <= fake.seconds - fake.began <= until + turn
    first, second = found.values()
    points = first["curve"]["updates"]
    assert min(b - a for a, b in pairwise(points[:-1])) >= first["updates"] / run.VALIDATIONS
    assert FEWEST < first["updates"] == second["updates"] < 1000
    assert points == second["curve"]["updates"] and points[-1] == first["updates"]
    assert max(fake.rates[-2:]) < 0.2 * settings.rate < 0.9 * settings.rate < max(fake.rates)


def test_a_clock_that_has_run_out_leaves_the_fewest_updates(settings, prepared):
    (prepared / "clock.json").write_text('{"seconds": 1000}')
    found = run.pretrain(settings, prepared / "data", prepared, Clock(1, prepared / "clock.json"))
    assert [one["updates"] for one in found.values()] == [FEWEST] * 2
