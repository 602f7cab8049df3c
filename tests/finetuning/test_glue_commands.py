"""``lazyformer finetune`` as a user gives them, kills among it."""

import fcntl
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from helpers import ROOT

from lazyformer_fairseq.cli import main
from lazyformer_fairseq.errors import UserError


def invoke(*arguments) -> str:
    """What a command prints; an error of the user's is raised."""
    result = CliRunner().invoke(main, list(map(str, arguments)), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def options(toy_glue, start_checkpoint, tmp_path) -> list:
    return [
        *("finetune", f"m={start_checkpoint}", "--data", toy_glue, "--output", tmp_path / "out"),
        *("--tasks", "CoLA", "--lrs", "1e-3", "--epochs", "8", "--workers", "1"),
        *("--keep-checkpoints", "all"),
    ]


def test_prepare_tells_what_it_read(toy_glue, data_folder, tmp_path):
    arguments = ["glue", "prepare", "--data", toy_glue, "--tokenizer", data_folder, "--output", tmp_path / "out"]
    output = invoke(*arguments, "--tasks", "RTE", "STS-B", "--workers", "1")
    assert [path.name for path in sorted((tmp_path / "out" / "tasks").iterdir())] == ["RTE", "STS-B"]
    assert "dev.tsv" in output
    assert "RTE/train.tsv: ends at line 65 and has 64 rows, but the official file has 2,490" in output


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--tasks", "AX"], "AX has no training data"),
        (["--checkpoint", "x=nowhere.pt"], "nowhere.pt: no such file or folder"),
        (["--from-mnli"], "--from-mnli: went; fine-tune on MNLI first"),
        (["--checkpoint", "x=broken.pt"], "broken.pt: truncated, damaged or no checkpoint"),
        (["--tokenizer", "nowhere"], "nowhere: no such file or folder"),
        (["--tokenizer", "."], ".: no tokenizer there"),
        (["--data", "nowhere"], "nowhere: no such file or folder"),
        (["--data", "."], "CoLA: no such folder"),
        (["--epochs", "RTE=3"], "not among --tasks"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_is_done(options, tmp_path, monkeypatch, change, words):
    monkeypatch.chdir(tmp_path)
    Path("broken.pt").write_text("junk\n")
    with pytest.raises(UserError, match=words):
        invoke(*options, *change)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("change", [["--lrs", "2"], ["--seeds", "1", "1"], ["--seeds", "one"]])
def test_numbers_are_checked(options, change):
    result = CliRunner().invoke(main, list(map(str, [*options, *change])))
    assert result.exit_code == 2


def start(arguments: list) -> subprocess.Popen:
    program = "from lazyformer_fairseq.cli import main; main()"
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for_results(queue: subprocess.Popen, runs: Path, count: int) -> None:
    while len(list(runs.glob("*/*/*/result.json"))) < count:
        assert queue.poll() is None, queue.stdout.read()
        time.sleep(0.02)


def states(runs: Path) -> dict[Path, tuple[int, int]]:
    return {
        path: (path.stat().st_ino, path.stat().st_mtime_ns)
        for name in ("result.json", "checkpoint_best.pt")
        for path in runs.glob(f"*/*/*/{name}")
        if (path.parent / "result.json").exists()
    }


def wait_until_nothing_runs(runs: Path) -> None:
    """A run holds a file while it lives. One that outlives its queue would not let this end."""
    for path in runs.glob("*/*/*/.lock"):
        with path.open() as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(0.05)


@pytest.mark.slow
def test_stopped_it_goes_on_with_nothing_repeated_or_lost(options, tmp_path):
    runs, signals = tmp_path / "out" / "runs", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM]
    seeds = range(1, len(signals) + 2)
    options += ["--seeds", *seeds]
    before: dict = {}
    for count, stop in enumerate(signals, start=1):
        queue = start(options)
        wait_for_results(queue, runs, count)
        queue.send_signal(stop)
        output, _ = queue.communicate()
        wait_until_nothing_runs(runs)
        if stop != signal.SIGKILL:
            assert queue.returncode == 130, output
            assert f"of {len(seeds)} runs are finished; rerun to resume" in output
        after = states(runs)
        assert before.items() <= after.items()
        before = after
    assert len(list(runs.glob("*/*/*/result.json"))) < len(seeds)

    done = f"{len(seeds)} of {len(seeds)} runs are finished"
    assert done in invoke(*options)
    after = states(runs)
    assert before.items() <= after.items()
    results = [json.loads(path.read_text()) for path in runs.glob("*/*/*/result.json")]
    assert sorted(result["seed"] for result in results) == list(seeds)
    assert {result["train_rows"] for result in results} == {64}
    assert not list(runs.glob("*/*/*/failed.json"))

    assert done in invoke(*options)  # nothing is left to do
    assert states(runs) == after
    with pytest.raises(UserError, match="epochs is 8 there, 9 here"):
        invoke(*options, "--epochs", "9")


def test_a_report_ends_it_though_runs_have_failed(options, tmp_path):
    folder = tmp_path / "out" / "runs" / "m" / "CoLA" / "lr0.001_seed1"
    (folder / "checkpoint_best.pt" / "is a folder").mkdir(parents=True)  # no checkpoint can be written
    result = CliRunner().invoke(main, [*map(str, options), "--seeds", "1,2", "--epochs", "1"])
    assert result.exit_code == 1
    assert "CoLA/train.tsv: ends at line 64 and has 64 rows, but the official file has 8,551" in result.output
    assert "1 of 2 runs are finished" in result.output
    assert "failed: m CoLA lr0.001_seed1: exit code 1: " in result.output
    assert json.loads((folder / "failed.json").read_text())["attempts"] == 2
    markdown = (tmp_path / "out" / "report" / "glue.md").read_text()
    assert markdown.partition("![")[0] in result.output
    assert "## Incomplete grids" in markdown
    assert result.output.endswith(f"written to {tmp_path / 'out' / 'report'}\n")
