"""The demo in miniature: the same code as ``make demo`` on a toy text."""

import json
import re
from dataclasses import replace

import pytest
import torch
from fairseq.trainer import Trainer
from helpers import toy_texts

from lazyformer_fairseq.demo import run, side_by_side
from lazyformer_fairseq.demo.run import run_demo
from lazyformer_fairseq.demo.settings import MODELS, DemoSettings
from lazyformer_fairseq.errors import UserError


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> DemoSettings:
    text = tmp_path_factory.mktemp("text") / "toy.txt"
    text.write_text("\n\n".join(toy_texts(200)))
    return DemoSettings(corpus=str(text), vocab_size=160, updates=24, finetuning_epochs=1)


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
    assert re.search(
        r"Resuming pre-training at bert_m1x4: update 1[0-3], lazyformer_m2x2: update 1[0-3] of 24", printed
    )
    assert_report_is_complete(printed, folder)
    results = json.loads((folder / "pretraining.json").read_text())
    sizes = [result["parameters"] for result in results.values()]
    assert max(sizes) < 1.01 * min(sizes), "the two models are meant to be of one size"
    for result in results.values():
        assert result["curve"]["updates"] == list(range(0, 25, 3))
        assert result["curve"]["loss"][-1] < result["curve"]["loss"][0]

    run_demo(settings, folder)
    again = capsys.readouterr().out
    assert again.count("Reusing") == 3
    assert_report_is_complete(again, folder)

    with pytest.raises(UserError, match=r"demo of other settings \(see .*settings.json\); remove it or give another"):
        run_demo(DemoSettings(updates=99), folder)


def test_a_text_that_fails_does_not_claim_the_folder(settings, tmp_path):
    missing = str(tmp_path / "missing.txt")
    with pytest.raises(UserError, match="missing.txt"):
        run_demo(replace(settings, corpus=missing), tmp_path / "demo")
    run._claim(settings, tmp_path / "demo")
    assert json.loads((tmp_path / "demo" / "settings.json").read_text())["corpus"] == settings.corpus


def assert_report_is_complete(printed: str, folder) -> None:
    rows = [line for line in printed.splitlines() if line.startswith("|")]
    assert [row.split("|")[1].strip() for row in rows[2:]] == list(MODELS)
    assert "unigram entropy is" in printed
    assert printed.count("<mask>") == 5 and printed.count("%)") == 15
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "table.md").read_text().strip() in printed


def test_both_models_see_the_same_batches(settings, tmp_path, monkeypatch):
    seen: dict[str, list[torch.Tensor]] = {name: [] for name in MODELS}
    original = Trainer.train_step

    def train_step(trainer, samples, *args, **kwargs):
        name = trainer.cfg.checkpoint.save_dir.rsplit("/", 1)[-1]
        seen[name].append(samples[0]["net_input"]["src_tokens"])
        return original(trainer, samples, *args, **kwargs)

    monkeypatch.setattr(Trainer, "train_step", train_step)
    run._prepare(settings, tmp_path / "data", tmp_path / "task")
    side_by_side.pretrain(settings, tmp_path / "data", tmp_path)
    first, second = seen.values()
    assert len(first) == len(second) == settings.updates
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
