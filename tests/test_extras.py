"""What README's lines of pip install is enough for the pages: run without any other package.

pip install 'torch<2.14' cython 'numpy>=2,<3' 'setuptools<81' wheel
pip install --no-build-isolation '.[corpus,huggingface,bench]'
pip uninstall --yes torchaudio
"""

import ast
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from unittest import mock

import pytest
from helpers import PAGES, ROOT, mostly_slow, toy_texts
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from test_documents import blocks_of

PACKAGE = "lazyformer_fairseq"
TRAINER_SCRIPT = ROOT / "scripts" / "examples" / "train_with_transformers.py"  # docs/trainers.md runs it
OF_A_READER = {"docs/add_a_kind.md"}  # whose code stands in files of a package of theirs


def declared() -> dict[str, list[str]]:
    """Return what setup.py requires, by extra; "" for what is always installed."""
    with mock.patch("setuptools.setup") as called:
        exec(compile((ROOT / "setup.py").read_text(), ROOT / "setup.py", "exec"), {"__file__": str(ROOT / "setup.py")})
    given = called.call_args.kwargs
    return {"": given["install_requires"], **given["extras_require"]}


def extras_of_readme() -> list[str]:
    ((extras),) = re.findall(r"^pip install .*'\.\[(.*)\]'$", PAGES["README.md"], re.MULTILINE)
    return extras.split(",")


def with_all_they_need(requirements: list[str]) -> set[str]:
    """Return the names of the installed distributions that these requirements bring."""
    found: set[str] = set()
    waiting = [(Requirement(each), "") for each in requirements]
    while waiting:
        requirement, extra = waiting.pop()
        name = canonicalize_name(requirement.name)
        is_wanted = requirement.marker is None or requirement.marker.evaluate({"extra": extra})
        installed = next(iter(metadata.distributions(name=requirement.name)), None)
        if not is_wanted or installed is None or (name in found and not requirement.extras):
            continue
        found.add(name)
        of_it = [Requirement(each) for each in installed.requires or ()]
        waiting += [(each, own) for each in of_it for own in ("", *requirement.extras)]
    return found


def link_environment(folder: Path, extras: list[str], without: tuple[str, ...] = ()) -> None:
    """Fill a folder as site-packages are after README's lines: with links to what is installed, and no more."""
    table = declared()
    names = with_all_they_need([*table[""], *(each for extra in extras for each in table[extra])])
    for name in sorted(names - {*without, "torchaudio"}):
        distribution = metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or () if file.parts[0] != ".."}:
            target = Path(distribution.locate_file(top))
            if target.exists() and not (folder / top).exists():
                (folder / top).symlink_to(target)
    for name in (PACKAGE, "configs"):
        (folder / name).symlink_to(ROOT / name)
    own = folder / f"{PACKAGE}-0.1.0.dist-info"
    own.mkdir()
    lines = [f"Requires-Dist: {each}" for each in table[""]]
    lines += [f'Requires-Dist: {each}; extra == "{extra}"' for extra in table for each in table[extra] if extra]
    (own / "METADATA").write_text("\n".join(["Metadata-Version: 2.1", f"Name: {PACKAGE}", "Version: 0.1.0", *lines]))


def run_there(folder: Path, site: Path, *words: str) -> subprocess.CompletedProcess:
    """Run Python with these packages alone."""
    environment = {**os.environ, "PYTHONPATH": str(site), "PYTHONNOUSERSITE": "1", "HF_HUB_OFFLINE": "1"}
    # -S: without the site-packages of this environment.
    command = [sys.executable, "-S", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def imports_in(block: str) -> str:
    statements = ast.parse(block).body
    return "\n".join(ast.unparse(each) for each in statements if isinstance(each, (ast.Import, ast.ImportFrom)))


@pytest.fixture
def site(tmp_path) -> Path:
    (tmp_path / "site").mkdir()
    return tmp_path / "site"


PAGES_WITH_CODE = [page for page in PAGES if any(language == "python" for language, _ in blocks_of(page))]


@pytest.mark.parametrize("page", mostly_slow(sorted({*PAGES_WITH_CODE} - OF_A_READER), "README.md"))
def test_what_a_page_imports_is_what_readme_installs(page, site, tmp_path):
    link_environment(site, extras_of_readme())
    lines = [imports_in(block) for language, block in blocks_of(page) if language == "python"]
    if page == "docs/trainers.md":
        lines.append(imports_in(TRAINER_SCRIPT.read_text()))
        lines.append("TrainingArguments('trained', report_to=[])")  # which asks for accelerate
    run = run_there(tmp_path, site, "-c", "\n".join(lines))
    assert run.returncode == 0, run.stderr[-3000:]
    assert not (site / "pytest").exists()


@pytest.mark.parametrize("package", mostly_slow(["accelerate", "transformers"], "accelerate"))
def test_what_lacks_a_package_of_an_extra_names_both(package, site, tmp_path):
    link_environment(site, extras_of_readme(), without=(package,))
    run = run_there(tmp_path, site, "-c", "from lazyformer_fairseq.huggingface import ShardTrainer")
    message = f"ShardTrainer requires {package} (not installed): pip install 'lazyformer_fairseq[huggingface]'"
    assert message in run.stderr.splitlines()[-1]


@pytest.mark.slow
def test_the_page_of_the_trainer_runs_with_what_readme_installs(site, tmp_path):
    link_environment(site, extras_of_readme())
    (tmp_path / "my_texts").mkdir()
    (tmp_path / "my_texts" / "toy.txt").write_text("\n\n".join(toy_texts(150)))
    tiny = "--vocab-size 160 --valid-share 0.1"
    commands = [["-m", f"{PACKAGE}.cli", *f"corpus my_texts data {tiny}".split()]]
    commands.append([str(TRAINER_SCRIPT), "data", "for_transformers", "--updates", "20"])
    commands += [["-c", block] for language, block in blocks_of("docs/trainers.md") if language == "python"]
    for command in commands:
        run = run_there(tmp_path, site, *command)
        assert run.returncode == 0, run.stderr[-3000:]
    for folder in ("for_transformers", "mine"):
        assert (tmp_path / folder / "model.safetensors").is_file()
