"""Programs that stand in for python behave as it does."""

import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere python itself is used")


@pytest.fixture
def run(warm_python, tmp_path, monkeypatch):
    """``run("-c", "...")``: what the stand-in gives, where python gives the same."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def run(*words: str, **options) -> subprocess.CompletedProcess:
        def done(program) -> subprocess.CompletedProcess:
            return subprocess.run([program, *words], capture_output=True, text=True, **options)

        ours, pythons = done(warm_python / "python"), done(sys.executable)
        assert (ours.returncode, ours.stdout) == (pythons.returncode, pythons.stdout)
        return ours

    return run


def test_words_folder_input_output_and_what_it_starts(run, tmp_path, warm_python):
    show = "import os, sys; print(sys.argv, os.getcwd(), sys.path[0], sys.path[1], __name__, input())"
    (tmp_path / "module.py").write_text(show)
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "script.py").write_text(show)
    for words in (("-c", show), ("-m", "module"), ("inner/script.py",), ("-u", "inner/script.py")):
        assert str(tmp_path) in run(*words, "a b", "--c", input="read\n").stdout
    loaded = "print(*(name in sys.modules for name in ('torch', 'fairseq', 'lazyformer_fairseq')))"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', 'import sys; ' + {loaded!r}])"
    done = subprocess.run([warm_python / "python", "-c", code], capture_output=True, text=True)
    assert done.stdout == "True False False\n", "what it starts is as quick, and has only libraries of others"
    assert run("-X", "utf8", "-c", "import sys; print(sys.flags.utf8_mode)").stdout == "1\n"


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("import sys; sys.exit(7)", 7),
        ("import sys; sys.exit('a reason')", 1),
        ("import os; os._exit(3)", 3),
        ("1 / 0", 1),
        ("import atexit; atexit.register(print, 'at the end')", 0),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("raise KeyboardInterrupt", -signal.SIGINT),
    ],
)
def test_it_ends_as_python_does(run, code, status):
    done = run("-c", code)
    assert done.returncode == status
    assert ("a reason" in done.stderr) == ("a reason" in code)
    assert ("ZeroDivisionError" in done.stderr) == (code == "1 / 0")


@pytest.fixture
def start(warm_python):
    """``start("...")``: a process that runs the code, once that has printed a line."""

    def start(code: str) -> subprocess.Popen:
        code = f"import signal; {code}; print('ready', flush=True); signal.pause()"
        run = subprocess.Popen([warm_python / "python", "-c", code], stdout=subprocess.PIPE, text=True)
        assert run.stdout.readline() == "ready\n"
        return run

    return start


def test_a_signal_reaches_the_process_and_killed_it_takes_the_process_along(start):
    with start("signal.signal(signal.SIGTERM, lambda *_: exit(75))") as run:
        run.terminate()
    assert run.returncode == 75
    with start("pass") as run:
        run.kill()
        assert run.stdout.read() == ""  # which ends with the last of both
    assert run.returncode == -signal.SIGKILL
