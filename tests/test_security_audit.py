"""What ruff's rules S do not look for: calls that run or unpickle what stands in a file, read from the syntax trees."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
from helpers import ROOT, syntax_tree

SOURCES = sorted([*ROOT.glob("lazyformer_fairseq/**/*.py"), *ROOT.glob("scripts/*.py"), ROOT / "setup.py"])
NEVER = {"compile", "__import__", "breakpoint", "yaml.full_load", "torch.hub.load", "torch.jit.load"}
LAST_WORDS = {name.rpartition(".")[2] for name in NEVER} | {"load", "extractall", "extract", "unpack_archive", "open"}
# Modes of open() that write to what already has the name; "w" empties it, "x" makes a new file.
IN_PLACE = re.compile(r"'[rwb]*[a+][a+rwb]*'")
# One file names an error of pickle's; ruff looks at every use of the rest.
IMPORTS_PICKLE = "lazyformer_fairseq/storage/checkpoint_file.py"


def dangers(tree: ast.AST) -> Iterator[str]:
    """Calls of a module that could run code from outside of it, or follow an archive's members."""
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        if getattr(call.func, "attr", getattr(call.func, "id", "")) not in LAST_WORDS:
            continue
        name, options = ast.unparse(call.func), {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        if name in NEVER or name.endswith((".extractall", ".extract", ".unpack_archive")):
            yield f"line {call.lineno}: {name}()"
        if name == "torch.load" and options.get("weights_only") != "True":
            yield f"line {call.lineno}: torch.load() without weights_only=True"
        if name.endswith("np.load") and options.get("allow_pickle", "False") != "False":
            yield f"line {call.lineno}: np.load(allow_pickle=...)"
        is_in_place = any(IN_PLACE.fullmatch(ast.unparse(argument)) for argument in call.args)
        if name.endswith("open") and (is_in_place or "os.O_CREAT" in ast.unparse(call)) and "opener" not in options:
            yield f"line {call.lineno}: open() of what may be a link; storage/in_place.py opens it"


def test_no_code_of_ours_runs_strings_or_pickles():
    trees = {str(path.relative_to(ROOT)): syntax_tree(path) for path in SOURCES}
    assert {path: found for path, tree in trees.items() if (found := list(dangers(tree)))} == {}
    imports = re.compile(r"^\s*(import|from) (pickle|dill|cloudpickle|joblib|marshal|shelve)\b", re.MULTILINE)
    assert [path for path in trees if imports.search((ROOT / path).read_text())] == [IMPORTS_PICKLE]


@pytest.mark.parametrize(
    "source",
    [
        *("compile('1', '', 'eval')", "__import__('os')", "np.load(path, allow_pickle=flag)", "archive.extractall()"),
        *("open(path, 'a')", "path.open('a+')", "path.open('r+b')", "os.open(path, os.O_RDWR | os.O_CREAT)"),
        *("torch.load(path)", "torch.load(p, weights_only=flag)", "torch.hub.load(path)", "shutil.unpack_archive(p)"),
    ],
)  # fmt: skip
def test_the_audit_finds_what_it_looks_for(source):
    assert list(dangers(ast.parse(source)))
    assert list(dangers(ast.parse("torch.load(p, weights_only=True), re.compile('x'), np.load(p), model.eval()"))) == []
    assert list(dangers(ast.parse("open(p, 'a', opener=own_file), open(p, 'rb'), path.open('xb')"))) == []


def test_ruff_looks_for_the_rest_and_every_exception_is_answered(tmp_path):
    found = "eval('1')|exec('1')|pickle.loads(b'')|os.system('ls')|subprocess.run('ls', shell=True)|yaml.load(text)"
    (tmp_path / "bad.py").write_text("\n".join(["import os, pickle, subprocess, yaml", *found.split("|")]))
    command = [sys.executable, "-m", "ruff", "check", "--config", str(ROOT / "pyproject.toml"), "--select", "S"]
    command += ["--output-format", "concise", "bad.py"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert {line.split(":")[1] for line in run.stdout.splitlines() if line.startswith("bad.py")} == set("234567")
    answered, settings = (ROOT / "SECURITY.md").read_text(), (ROOT / "pyproject.toml").read_text()
    given = set(re.findall(r'"(S\d+)"', settings))
    given |= {code for path in SOURCES for code in re.findall(r"# noqa: (S\d+)", path.read_text())}
    assert given and {code for code in given if f"`{code}`" not in answered} == set()
