"""Steps run once, resume, stop at a signal and fail in words; stubs stand for the commands."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.reproduce.steps import Step, record_of, run_steps

STUB = """
import signal, sys
from pathlib import Path

kind, made = sys.argv[1], Path(sys.argv[2])
with Path("called").open("a") as file:
    print(kind, made.name, file=file)
if kind == "refuses what is there" and made.parent.exists():
    sys.exit("is there already")
if kind == "fails once" and not Path("tried").exists():
    Path("tried").touch()
    sys.exit("no room for it")
if kind == "waits" and not Path("saved").exists():
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    print("ready", flush=True)
    heard = signal.sigwait({signal.SIGINT, signal.SIGTERM})
    Path("saved").write_text(signal.Signals(heard).name)
    sys.exit(130)
if kind != "makes nothing":
    made.parent.mkdir(parents=True, exist_ok=True)
    made.write_text(kind)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    (tmp_path / "stub.py").write_text(STUB)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    return tmp_path


def step(name: str, kind: str = "works", **more) -> Step:
    made = Path("out") / name / "result"
    return Step(name, f"the step {name}", ("stub", kind, str(made)), made, **more)


def calls() -> list[str]:
    return Path("called").read_text().splitlines()


def run(*steps: Step, settings=None) -> list[str]:
    return run_steps(steps, Path("out"), settings or {"size": "tiny"})


def test_what_is_done_is_not_done_again_unless_it_was_removed():
    run(step("a"), step("b"))
    run(step("a"), step("b"), step("c"))
    assert len(calls()) == 3
    assert record_of(Path("out"), step("b"))["command"] == "stub works out/b/result"
    assert not list(Path("out").glob("*.unfinished"))
    Path("out/a/result").unlink()
    assert record_of(Path("out"), step("a")) is None
    run(step("a"))
    assert Path("out/a/result").exists() and len(calls()) == 4
    with pytest.raises(UserError, match="of other settings .size is 'tiny' there, 'paper' here"):
        run(step("a"), settings={"size": "paper"})


def test_a_step_that_fails_is_named_and_tried_again():
    first, second, third = step("a", "fails once"), step("b", needs=("a",)), step("c")
    failed, left_out = run(first, second, third)
    assert failed == "step a failed with exit code 1; look at what it printed"
    assert left_out == "step b was left out: it needs a"
    assert [bool(record_of(Path("out"), each)) for each in (first, second, third)] == [False, False, True]
    assert run(first, second, third) == []
    assert Path("out/b/result").exists() and len(calls()) == 4
    [failed] = run(step("d", "makes nothing"))
    assert failed == "step d ended, but out/d/result is not there; look at what it printed"


def test_what_a_command_would_refuse_is_cleared_first_but_only_where_the_step_says_so():
    Path("out/a").mkdir(parents=True)
    Path("out/a/half").touch()
    [failed] = run(step("a", "refuses what is there"))
    assert failed.startswith("step a failed with exit code 1")
    assert Path("out/a/half").exists()
    run(step("a", "refuses what is there", starts_anew=True))
    assert os.listdir("out/a") == ["result"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_the_step_save_and_the_next_start_goes_on(folder, number):
    program = (
        "from pathlib import Path; import sys\n"
        "from lazyformer_fairseq.experiments.reproduce.steps import Step, run_steps\n"
        "one = lambda name: Step(name, name, ('stub', 'waits', f'out/{name}/result'), Path(f'out/{name}/result'))\n"
        "try:\n    run_steps([one('a'), one('b')], Path('out'), {})\n"
        "except KeyboardInterrupt:\n    sys.exit(130)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert any(line == "ready\n" for line in process.stdout)
        process.send_signal(number)
        process.stdout.read()
    assert process.returncode == 130
    assert Path("saved").read_text() == number.name
    assert not Path("out/steps").exists()
    again = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert Path("out/b/result").exists()
