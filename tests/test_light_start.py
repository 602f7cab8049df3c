"""Help, completion and mistyped paths cost no import of what is heavy."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import click
import pytest
from helpers import ROOT

from lazyformer_fairseq.cli import main

HEAVY = {"torch", "fairseq", "spacy", "matplotlib", "sklearn", "scipy", "hydra", "sentencepiece"}
TELL = f"""
import atexit, resource, sys
@atexit.register
def tell():
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(sorted({HEAVY!r} & set(sys.modules)), used.ru_utime + used.ru_stime, file=sys.stderr)
"""
FORKS = f"""
import json, os, sys, tempfile
from lazyformer_fairseq.cli import main
for line in sys.stdin:
    arguments, environment = json.loads(line)
    output, errors = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")
    child = os.fork()
    if child == 0:
        os.dup2(output.fileno(), 1)
        os.dup2(errors.fileno(), 2)
        os.environ.update(environment)
        sys.argv[1:] = arguments
        exec({TELL!r})
        main(prog_name="lazyformer")
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    for file in (output, errors):
        file.seek(0)
    print(json.dumps([code, output.read(), errors.read()]), flush=True)
"""
Run = Callable[..., tuple[int, str, str]]


def light(code: int, output: str, errors: str) -> tuple[int, str, str]:
    """Exit code, standard output, the errors; refuses a process that has imported something heavy."""
    *errors, told = errors.strip().splitlines()
    imported, seconds = told.rsplit(" ", 1)
    assert imported == "[]", imported
    assert float(seconds) < 5, "0.1 s of CPU on an idle machine; what is heavy costs more than that everywhere"
    return code, output, "\n".join(errors)


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """``run("curves", "--help")``: each in its own process, forked from one that has imported the command alone."""
    pipe, environment = subprocess.PIPE, os.environ | {"PYTHONPATH": str(ROOT)}
    forks = [sys.executable, "-c", FORKS]
    with subprocess.Popen(forks, stdin=pipe, stdout=pipe, text=True, cwd=ROOT, env=environment) as process:

        def run(*arguments: str, **environment: str) -> tuple[int, str, str]:
            print(json.dumps([arguments, environment]), file=process.stdin, flush=True)
            return light(*json.loads(process.stdout.readline()))

        yield run
        process.stdin.close()


def all_commands(command: click.Command = main, path: tuple[str, ...] = ()):
    yield path
    for name, inner in getattr(command, "commands", {}).items():
        yield from all_commands(inner, (*path, name))


@pytest.mark.parametrize("path", list(all_commands()), ids=" ".join)
def test_help_is_light(run, path):
    code, output, _ = run(*path, "--help")
    assert code == 0 and output.startswith(f"Usage: {' '.join(('lazyformer', *path))}")


def test_the_version_is_light_from_the_start_of_python():
    code = f'{TELL}\nfrom lazyformer_fairseq.cli import main\nmain(prog_name="lazyformer")'
    done = subprocess.run([sys.executable, "-c", code, "--version"], cwd=ROOT, capture_output=True, text=True)
    assert light(done.returncode, done.stdout, done.stderr) == (0, "lazyformer, version 0.1.0\n", "")


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("lazyformer ", "plain,search"),
        ("lazyformer lm ", "plain,evaluate"),
        ("lazyformer search run --", "plain,--latency-price"),
        ("lazyformer lm prepare ", "plain,enwik8"),
        ("lazyformer lm evaluate nowhere ", "file,"),
    ],
)
def test_completion_is_light(run, words, offered):
    _, output, _ = run(
        _LAZYFORMER_COMPLETE="bash_complete", COMP_WORDS=words, COMP_CWORD=str(len(words.split(" ")) - 1)
    )
    assert offered in output.splitlines()


@pytest.mark.parametrize(
    "command",
    [
        "corpus nowhere out",
        "corpus jsonl:nowhere out",
        "demo --corpus nowhere",
        "export nowhere out",
        "finetune --data nowhere --tokenizer tests --output out",
        "finetune --data tests --tokenizer nowhere --output out",
        "finetune bert=nowhere --output out",
        "finetune README.md --data nowhere --output out",
        "evaluate nowhere",
        "predict nowhere --output out",
        "lm prepare enwik8 nowhere out",
        "lm evaluate nowhere tests",
        "lm evaluate README.md nowhere",
        "compare nowhere out --task masked-lm",
        "compare nowhere out --task language-model",
        "search nowhere out --task masked-lm --arch bert_base",
    ],
)
def test_a_mistyped_path_is_found_before_anything_heavy_is_imported(run, command):
    code, output, errors = run(*command.split())
    assert (code, output) == (1, "")
    assert errors.startswith("error: ") and "nowhere" in errors and "\n" not in errors


@pytest.mark.parametrize("command", ["bench --output tests", "predict tests --output tests"])
def test_a_folder_that_would_be_overwritten_is_found_as_soon(run, command):
    assert run(*command.split())[2] == "error: tests: exists already; remove it or choose another folder"


def test_a_corpus_is_built_without_torch_and_fairseq():
    """They cost each process of a corpus seconds and hundreds of megabytes."""
    loaded = """import sys
import lazyformer_fairseq.corpus.build, lazyformer_fairseq.corpus.worker_imports
import lazyformer_fairseq.data.text.tokenizer
from lazyformer_fairseq.corpus.sentences import SentenceSplitter
SentenceSplitter()("One. Two.")
print(*({"torch", "fairseq", "sklearn"} & set(sys.modules)))"""
    done = subprocess.run([sys.executable, "-c", loaded], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
