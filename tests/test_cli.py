"""The command ``lazyformer``: its help, its launchers in scripts/, what it lacks, and that it starts light."""

import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from importlib import metadata
from unittest import mock

import click
import pytest
from click.testing import CliRunner
from helpers import ROOT, lack_of_fairseq, run_script
from in_process import invoke, refusal

from lazyformer_fairseq import __version__, extras
from lazyformer_fairseq.cli import main
from lazyformer_fairseq.errors import UserError

LAUNCHER = '\nexec bash "$(dirname "$0")/lazyformer.sh"'  # below two comments
LAUNCHERS = sorted(p.name for p in (ROOT / "scripts").glob("*.sh") if p.read_text().find(LAUNCHER, 0, 300) > 0)
USAGE = {
    **dict.fromkeys(("pretrain", "continue", "train"), "pretrain [OPTIONS] ARCH DATA"),
    **{"finetune": "finetune [OPTIONS] CHECKPOINT...", "reproduce": "reproduce [OPTIONS] COMMAND"},
}


def help_of(*command: str) -> str:
    return " ".join(CliRunner().invoke(main, [*command, "--help"]).output.split())


def test_help_names_commands_and_defaults():
    assert {"corpus", "demo"} <= set(help_of().split())
    assert "[default: results/demo]" in help_of("demo")
    assert "[default: (32768, or fewer" in help_of("corpus") and "[default: 0.005;" in help_of("corpus")
    for group in ("", "bench", "lm", "pattern"):
        listed = help_of(*group.split()).split("Commands: ")[1]
        assert "..." not in listed.replace(", ...", "") and listed.endswith("."), "whole sentences"
        assert group != "lm" or "Measure CHECKPOINT's perplexity per word or bits per character over all" in listed


def test_a_script_is_its_command():
    assert len(LAUNCHERS) >= 6
    path = {"PATH": f"{sys.prefix}/bin:/usr/bin:/bin"}
    for name in LAUNCHERS:
        done = run_script(name, "--help", env=path)
        assert (done.returncode, done.stderr) == (0, "") and USAGE[name.split("_")[0].split(".")[0]] in done.stdout
        if name.startswith("finetune"):
            done = run_script(name, *"model.pt --data data --output out --seeds 1".split(), env=path)
            assert done.returncode == 1 and "no such" in done.stderr


@pytest.mark.parametrize("name", [name for name, each in main.commands.items() if getattr(each, "default", "")])
def test_help_of_a_group_shows_what_it_does_without_a_command(name):
    group = main.commands[name]
    shown = help_of(name)
    assert f"Without COMMAND, `main {name}` runs `main {name} {group.default}`:" in shown
    for param in group.commands[group.default].params:
        assert param.opts[0] in shown or isinstance(param, click.Argument), param.opts
    assert all(f" {command} " in shown.split("Commands:")[1] for command in group.commands)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("pretran bert_base data", "No such command 'pretran'. Did you mean 'pretrain'?"),
        ("compare reprot out", "No such command 'reprot'. Did you mean 'report'?"),
        ("lm evalute x", "No such command 'evalute'. Did you mean 'evaluate'?"),
        ("bench --lenghts 8", "No such option '--lenghts'. Did you mean '--lengths'?"),
        ("compare data out --budgt 1s", "(Did you mean one of: '--budget', "),
        ("compare data out --task maskedlm", "; did you mean masked-lm?"),
        ("search data out --task masked_lm --arch bert_base", "; did you mean masked-lm?"),
        ("pretrain bert_base data --recipe latop", "; did you mean laptop?"),
        ("finetune x --output out --metric acuracy", "; did you mean accuracy?"),
        ("bench --what trainig", "; did you mean training?"),
        ("lm prepare wikitxt . out", "; did you mean wikitext?"),
        ("corpus bok:. out", "; did you mean book?"),
        ("plan bert_bas", "bert_bas: no such arch; did you mean bert_base, "),
        ("pattern show --arch lazyformer_m2x6s", "no such arch; did you mean lazyformer_m2x6_s, "),
        ("pattern show bert_base", "bert_base is the name of a model, not a pattern; use --arch bert_base"),
        ("finetune . --task squd --output out", "; did you mean squad?"),
    ],
)
def test_what_is_misspelt_gets_the_nearest_names(command, said):
    assert said in refusal(*command.split())


def test_a_corpus_without_a_folder_to_write_to():
    assert "specify the output folder too, as in: lazyformer corpus my_texts data" in refusal("corpus", "my_texts")


def test_a_folder_may_be_called_almost_like_a_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reports").mkdir()
    assert "reports/dict.txt: no such file" in refusal("compare", "reports", "out", "--task", "masked-lm")


def test_where_names_the_folders_that_fairseq_needs():
    shown = dict(line.split(": ") for line in invoke("where").splitlines())
    assert shown == {"user-dir": str(ROOT / "lazyformer_fairseq"), "config-dir": str(ROOT / "configs" / "pretraining")}


# --- extras

REQUIRED = [
    "torch>=2.6",
    'not-there<2,>=1; extra == "corpus"',
    'not_there.too; extra == "corpus"',
    'click; extra == "corpus"',
    "not-there-either; platform_system == 'Linux' and extra == 'huggingface'",
    "nor-this; extra == 'cluster'",
]


@pytest.mark.parametrize(
    ("command", "missing"),
    [
        ("corpus . out", r"lazyformer corpus requires not-there, not_there.too \(not installed\)"),
        ("demo", "lazyformer demo requires not-there, not_there.too"),
        ("export . out --to huggingface", r"requires not-there-either.*lazyformer_fairseq\[huggingface\]"),
        ("an executor", "--executor ray requires nor-this"),
    ],
)
def test_a_command_says_what_it_lacks_and_help_needs_nothing(command, missing, tmp_path, monkeypatch):
    monkeypatch.setattr(metadata, "requires", lambda package: REQUIRED)
    with pytest.raises(UserError, match=missing):
        if command == "an executor":
            from lazyformer_fairseq.executors.ray_cluster import RayCluster

            RayCluster()
        CliRunner().invoke(main, command.split(), catch_exceptions=False)
    assert CliRunner().invoke(main, ["corpus", "--help"]).exit_code == 0
    assert extras.missing_packages("bench") == [], "what is unknown is not missing"
    with mock.patch.object(metadata, "requires", side_effect=metadata.PackageNotFoundError):
        assert extras.missing_packages("corpus") == []


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (
            "pretrain bert_base data",
            "lazyformer pretrain requires fairseq, which is not installed in Python 3.*; *; without fairseq, use *",
        ),
        ("reproduce par demo out --tiny", "lazyformer reproduce requires fairseq, *; without fairseq, use *"),
        ("-c 'import fairseq_cli.train'", "this requires fairseq, *"),
    ],
)
def test_a_command_says_that_it_needs_fairseq(command, says, without_fairseq, tmp_path):
    program, words = "lazyformer", shlex.split(command)
    if words[0] == "-c":  # what nobody has foreseen
        program, words[1] = (
            "python",
            f"from lazyformer_fairseq.cli import main; main.main(['-h'], standalone_mode=False); {words[1]}",
        )
    done = subprocess.run([without_fairseq / program, *words], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and fnmatch(done.stderr, f"error: {says}\n"), done.stderr
    assert len(done.stderr.splitlines()) == 1 and not [*tmp_path.iterdir()]


# --- help, completion and mistyped paths cost no import of what is heavy

RUN_EACH = """
import json, sys
from click.testing import CliRunner
from lazyformer_fairseq.cli import main
for line in sys.stdin:
    words, environment = json.loads(line)
    done = CliRunner().invoke(main, words, prog_name="lazyformer", env=environment)
    heavy = {"torch", "fairseq", "spacy", "matplotlib", "sklearn", "scipy", "hydra", "sentencepiece"} & {*sys.modules}
    print(json.dumps([done.output, f"{type(done.exception).__name__}: {done.exception}", sorted(heavy)]), flush=True)
"""


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[..., tuple[str, str]]]:
    """``run("curves", "--help")``: output and error; all in one process, which is to stay without what is heavy."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", RUN_EACH], cwd=ROOT, **pipes) as process:

        def run(*arguments: str, **environment: str) -> tuple[str, str]:
            print(json.dumps([arguments, environment]), file=process.stdin, flush=True)
            output, error, heavy = json.loads(process.stdout.readline())
            assert heavy == []
            return output, error

        yield run
        process.stdin.close()


def all_commands(command: click.Command = main, path: tuple[str, ...] = ()):
    yield path
    for name, inner in getattr(command, "commands", {}).items():
        yield from all_commands(inner, (*path, name))


def test_help_and_the_version_are_light(run):
    for path in all_commands():
        shown = run(*path, "--help")[0]
        assert shown.startswith(f"Usage: {' '.join(('lazyformer', *path))}"), path
        assert "\\b" not in shown, f"{path}: a mark of click's is shown as text"
    assert run("--version")[0] == f"lazyformer, version {__version__}\n"


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("lazyformer ", "plain,search"),
        ("lazyformer search run --", "plain,--latencies"),
        ("lazyformer lm evaluate nowhere ", "file,"),
    ],
)
def test_completion_is_light(run, words, offered):
    asked = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    output, _ = run(_LAZYFORMER_COMPLETE="bash_complete", **asked)
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
        "evaluate --data nowhere model",
        "report nowhere",
        "predict nowhere --output out",
        "lm prepare enwik8 nowhere out",
        "lm evaluate nowhere tests",
        "lm evaluate README.md nowhere",
        "compare nowhere out --task masked-lm",
        "compare nowhere out --task language-model",
        "search nowhere out --task masked-lm --arch bert_base",
        "bench --output tests",  # which would be overwritten
        "predict tests --output tests",
    ],
)
def test_a_wrong_path_is_found_before_anything_heavy_is_imported(run, command):
    output, error = run(*command.split())
    assert output == "" and error.startswith("UserError: ") and "\n" not in error
    if lack_of_fairseq(ValueError(error)):
        pytest.skip(error)
    taken = "UserError: tests already exists; remove it or choose another folder"
    assert "nowhere" in error if "nowhere" in command else error == taken


def test_a_corpus_is_built_without_torch_and_fairseq():
    """They cost each process of a corpus seconds and hundreds of megabytes."""
    loaded = """import sys
import lazyformer_fairseq.corpus.build, lazyformer_fairseq.corpus.worker_imports
import lazyformer_fairseq.data.text.tokenizer
from lazyformer_fairseq.corpus.sentences import SentenceSplitter
SentenceSplitter()("One. Two.")
print(*({"torch", "fairseq", "sklearn", "spacy"} & set(sys.modules)))"""
    done = subprocess.run([sys.executable, "-c", loaded], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
