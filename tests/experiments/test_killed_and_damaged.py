"""Experiments that are killed for real, and folders of theirs whose files are damaged: the same table, or words."""

import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import toy_texts
from in_process import invoke

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.demo.run import run_demo
from lazyformer_fairseq.experiments.demo.settings import DemoSettings
from lazyformer_fairseq.experiments.search import latency, training
from lazyformer_fairseq.fairseq_plugin.reliability.command_line import find_user_error
from lazyformer_fairseq.storage.json_files import read_checked_json

NAMES = ["compare", "search", "supernet", "demo"]
MOST_KILLS = 12
COMPARE = (
    "--task masked-lm --model bert=(sf)x2 --model mine=sff --embed-dim 8 --ffn-embed-dim 16 --heads 2 "
    "--tokens-per-sample 32 --batch-size 4 --updates 4 --seeds 1,2 --validation-tokens 200 --device cpu"
)
SEARCH = (
    "--task masked-lm --arch bert_tiny --sublayers 4 --candidates s,l,f,identity --device cpu --batch-size 128 "
    "--max-updates 8 --tokens-per-sample 16 --max-positions 16 --encoder-embed-dim 8 --encoder-ffn-embed-dim 16 "
    "--evaluations 3 --budgets 0.8 --rungs 2 --no-control --validation-tokens 256"
)
SUPERNET = (
    "--task masked-lm --arch bert_tiny --sublayers 4 --candidates s,l,f,identity --device cpu --batch-size 64 "
    "--max-updates 12 --constant-updates 4 --tokens-per-sample 16 --max-positions 16 --encoder-embed-dim 8 "
    "--encoder-ffn-embed-dim 16"
)
PRICES = {"s": 2.0, "f": 1.0, "s_read": 2.5, "l": 1.5, "rest": 1.0}


def losses_of_comparison(folder: Path) -> Any:
    models = json.loads((folder / "results.json").read_text())["models"]
    return {name: {seed: run["curve"]["loss"] for seed, run in model["runs"].items()} for name, model in models.items()}


def losses_of_search(folder: Path) -> Any:
    return read_checked_json(folder / "result.json")["trained"]


def probabilities_of_search(folder: Path) -> Any:
    return read_checked_json(folder / "result.json")["probabilities"]


def rows_of_demo(folder: Path) -> Any:
    """The report without what depends on the machine's speed: times, the verdict on them, the warning of noise."""
    report = (folder / "table.md").read_text()
    for of_time in (
        r"[\d.]+ \([\d.]+ to [\d.]+\)",
        r" Its updates take \d+% (less|more) time\.",
        r"\n+The machine was noisy.*",
    ):
        report = re.sub(of_time, "", report)
    return [re.sub(r"\s+", " ", line) for line in report.strip().splitlines()]


@pytest.fixture(scope="module")
def experiments(data_folder, tmp_path_factory) -> dict[str, tuple[Callable[[Path], object], Callable[[Path], Any]]]:
    """By name what runs or resumes one in a folder, and what reads its losses there."""
    inputs = tmp_path_factory.mktemp("inputs")
    prices, text = inputs / "prices.json", inputs / "text.txt"
    prices.write_text(json.dumps(PRICES))
    text.write_text("\n\n".join(toy_texts(200)))
    demo = DemoSettings(corpus=str(text), vocab_size=160, recipe="adam", updates=12, finetuning_updates=4)
    return {
        "compare": (lambda out: invoke("compare", data_folder, out, *COMPARE.split()), losses_of_comparison),
        "search": (
            lambda out: invoke("search", data_folder, out, *SEARCH.split(), "--latencies", prices),
            losses_of_search,
        ),
        "supernet": (
            lambda out: invoke("search", data_folder, out, *SUPERNET.split(), "--latencies", prices),
            probabilities_of_search,
        ),
        "demo": (lambda out: run_demo(demo, out), rows_of_demo),
    }


@pytest.fixture(scope="module")
def whole(experiments, tmp_path_factory) -> dict[str, Path]:
    """By name the folder of an experiment that nothing disturbed."""
    folders = {}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(latency, "ROUNDS_OF_FRONTS", 3)
        patched.setattr(training, "SAVE_INTERVAL", 2)
        for experiment, (run, _) in experiments.items():
            folders[experiment] = tmp_path_factory.mktemp(experiment) / "out"
            run(folders[experiment])
    return folders


def is_killed_at(rename: int, run: Callable[[Path], object], folder: Path) -> bool:
    """Runs it in a child, which dies of SIGKILL as a file is about to get its name, or just has, in turn."""
    child = os.fork()
    if child == 0:
        replace, made = os.replace, 0

        def replace_or_die(*given: Any) -> None:
            nonlocal made
            made += 1
            if made == rename and rename % 2:
                os.kill(os.getpid(), signal.SIGKILL)
            replace(*given)
            if made == rename:
                os.kill(os.getpid(), signal.SIGKILL)

        os.replace = replace_or_die
        try:
            run(folder)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize("experiment", NAMES)
def test_killed_again_and_again_it_ends_as_if_nothing_had_been(experiment, experiments, whole, tmp_path, monkeypatch):
    monkeypatch.setattr(latency, "ROUNDS_OF_FRONTS", 3)
    monkeypatch.setattr(training, "SAVE_INTERVAL", 2)
    run, losses = experiments[experiment]
    out = tmp_path / "out"
    kills = 0
    while kills < MOST_KILLS and is_killed_at(2 + 3 * kills % 8, run, out):
        kills += 1
    assert kills >= 5
    run(out)
    assert losses(out) == losses(whole[experiment])
    assert not list(out.rglob("*.unfinished"))


def empty(path: Path) -> None:
    path.write_bytes(b"")


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip_the_last_digit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[max(place for place, byte in enumerate(content) if 48 <= byte < 58)] ^= 1
    path.write_bytes(content)


def make_it_another_object(path: Path) -> None:
    path.write_text('{"loss": "low"}')


def make_it_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "more").touch()


def make_it_a_link_to_nothing(path: Path) -> None:
    path.unlink()
    path.symlink_to("nothing")


DAMAGE = [empty, cut, flip_the_last_digit, make_it_another_object, make_it_a_folder, make_it_a_link_to_nothing]
FILES = {
    "compare": ["settings.json", "lengths.json", "costs.json", "results.json", "runs/bert-seed1*/result.json"],
    "search": ["settings.json", "result.json", "table.md", "trainings/000/*/result.json", "trainings/*/8/*.pt"],
    "supernet": ["settings.json", "result.json", "probabilities.png", "supernet/result.json", "supernet/run.json"],
    "demo": ["text.json", "*/result.json", "finetuned/*/result.json", "table.md", "data/shard0/valid.bin"],
}


@pytest.mark.slow
@pytest.mark.parametrize("experiment", NAMES)
def test_a_damaged_file_is_made_anew_or_named_with_a_remedy(experiment, experiments, whole, tmp_path, monkeypatch):
    monkeypatch.setattr(latency, "ROUNDS_OF_FRONTS", 3)
    run, losses = experiments[experiment]
    expected, wrong = losses(whole[experiment]), []
    for pattern in FILES[experiment]:
        for damage in DAMAGE:
            shutil.rmtree(tmp_path / "out", ignore_errors=True)
            shutil.copytree(whole[experiment], tmp_path / "out")
            path = min((tmp_path / "out").glob(pattern))
            damage(path)
            try:
                run(tmp_path / "out")
            except (UserError, OSError) as error:
                said = str(find_user_error(error))
                is_named = path.name in said or str(path.parent) in said
                if not is_named or not re.search("remove|run the same command again|a different folder", said):
                    wrong.append((pattern, damage.__name__, said))
            else:
                if losses(tmp_path / "out") != expected:
                    wrong.append((pattern, damage.__name__, "another table"))
    assert wrong == []
