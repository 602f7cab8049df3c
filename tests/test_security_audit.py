"""The package and the scripts run no code that stands in a file or a string: read from their syntax trees."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import ROOT

SOURCES = sorted([*ROOT.glob("lazyformer_fairseq/**/*.py"), *ROOT.glob("scripts/*.py"), ROOT / "setup.py"])
# Errors of theirs are named; nothing is unpickled.
MAY_NAME_PICKLE = {"lazyformer_fairseq/fairseq_plugin/reliability/checkpoints/loading.py": {"UnpicklingError"}}
PICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "pickletools"}
BUILTINS_THAT_RUN_CODE = {"eval", "exec", "compile", "__import__", "breakpoint"}


def dotted(node: ast.AST) -> str:
    """``a.b.c`` of a name or an attribute, else nothing."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def dangers(tree: ast.AST, may_name_pickle: frozenset[str] | set[str] = frozenset()) -> Iterator[str]:
    """What of a module could run code from outside of it, or follow an archive's members."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PICKLES:
            yield f"line {node.lineno}: from {node.module} import"
        if isinstance(node, ast.Import) and not may_name_pickle:
            yield from (f"line {node.lineno}: import {a.name}" for a in node.names if a.name.split(".")[0] in PICKLES)
        name = dotted(node)
        if isinstance(node, ast.Attribute) and name.split(".")[0] in PICKLES and node.attr not in may_name_pickle:
            yield f"line {node.lineno}: {name}"
        if isinstance(node, ast.Call):
            yield from (f"line {node.lineno}: {danger}" for danger in dangers_of_call(node))


def dangers_of_call(call: ast.Call) -> Iterator[str]:
    name = dotted(call.func)
    options = {keyword.arg: keyword.value for keyword in call.keywords}
    if name in BUILTINS_THAT_RUN_CODE:
        yield f"{name}()"
    shell = options.get("shell")
    if shell is not None and not (isinstance(shell, ast.Constant) and shell.value is False):
        yield f"{name}(shell=...)"
    if name == "os.execv":  # words, not a shell's line
        return
    if name in ("os.system", "os.popen") or name.startswith(("os.spawn", "os.exec", "subprocess.getoutput")):
        yield f"{name}()"
    if name == "torch.load" and not is_constant(options.get("weights_only"), True):
        yield "torch.load() without weights_only=True"
    if name.endswith("np.load") and "allow_pickle" in options and not is_constant(options["allow_pickle"], False):
        yield "np.load(allow_pickle=True)"
    if name in ("yaml.load", "yaml.unsafe_load", "yaml.full_load", "torch.hub.load", "torch.jit.load"):
        yield f"{name}()"
    if name.endswith((".extractall", ".extract", ".unpack_archive")):
        yield f"{name}()"


def is_constant(node: ast.AST | None, value: bool) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_code_of_ours_runs_strings_or_pickles(path):
    allowed = MAY_NAME_PICKLE.get(str(path.relative_to(ROOT)), frozenset())
    assert list(dangers(ast.parse(path.read_text(encoding="utf-8")), allowed)) == []


@pytest.mark.parametrize(
    "source",
    [
        *("eval('1')", "exec('1')", "compile('1', '', 'eval')", "__import__('os')", "import pickle", "import dill.x"),
        *("from pickle import loads", "import pickle as p", "pickle.loads(b'')", "import shelve", "os.system('ls')"),
        *("subprocess.run('ls', shell=True)", "Popen('ls', shell=flag)", "os.popen('ls')", "yaml.load(text)"),
        *("torch.load(path)", "torch.load(path, weights_only=False)", "torch.load(path, weights_only=flag)"),
        *("np.load(path, allow_pickle=True)", "archive.extractall()", "shutil.unpack_archive(path)"),
    ],
)
def test_the_audit_finds_what_it_looks_for(source):
    assert list(dangers(ast.parse(source)))


def test_the_audit_lets_ordinary_code_be():
    source = """
import subprocess, torch, numpy as np, ast
subprocess.run(["ls"], shell=False)
torch.load(path, map_location="cpu", weights_only=True)
np.load(path, allow_pickle=False), model.eval(), ast.literal_eval("1"), re.compile("x")
"""
    assert list(dangers(ast.parse(source))) == []
    errors = ast.parse("import pickle\ntry: pass\nexcept pickle.UnpicklingError: pass")
    assert list(dangers(errors)) and list(dangers(errors, {"UnpicklingError"})) == []
    assert list(dangers(ast.parse("import pickle\npickle.loads(b'')"), {"UnpicklingError"}))


def test_bandit_finds_nothing_that_is_not_answered():
    pytest.importorskip("bandit", reason="bandit is not installed; `make audit` installs it")
    command = [sys.executable, "-m", "bandit", "--quiet", "--configfile", "pyproject.toml"]
    run = subprocess.run(
        [*command, "--recursive", "lazyformer_fairseq", "scripts"], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout


def test_every_exception_of_bandit_is_answered():
    answered = (ROOT / "SECURITY.md").read_text()
    tree = (ROOT / "pyproject.toml").read_text().partition("[tool.bandit]")[2]
    skipped = {word.strip('",') for word in tree.split() if word.startswith('"B')}
    in_code = {
        code
        for path in SOURCES
        for line in Path(path).read_text().splitlines()
        if "# nosec" in line
        for code in line.split("# nosec")[1].split()
        if code.startswith("B")
    }
    assert skipped and in_code
    assert {code for code in skipped | in_code if f"`{code}`" not in answered} == set()
