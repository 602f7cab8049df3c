"""What of the set-up can be checked without installing anything."""

import hashlib
import os
import re
import runpy
import shutil
import subprocess
import sys
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import setuptools
from helpers import ROOT, false_nvidia_smi, load_script, write_program
from hypothesis import given
from hypothesis import strategies as st
from packaging.requirements import Requirement
from packaging.version import Version

from lazyformer_fairseq import extras

choose_torch = load_script("choose_torch")
keep_fairseq = load_script("keep_fairseq")


@pytest.fixture
def setup_py(monkeypatch):
    """The globals of setup.py, which is kept from installing anything."""
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    return runpy.run_path(str(ROOT / "setup.py"))


def run(*command, **environment):
    """The command from the repository's root, without the settings of a make that runs these tests."""
    inherited = {name: value for name, value in os.environ.items() if name not in {"MAKEFLAGS", "PYTEST_ARGS"}}
    return subprocess.run(command, cwd=ROOT, env=inherited | environment, capture_output=True, text=True)


# --- setup.py


def test_bounds_allow_what_is_installed_and_versions_that_stand_in_two_places_agree(setup_py):
    for requirement in map(Requirement, setup_py["INSTALL_REQUIRES"] + setup_py["EXTRAS_REQUIRE"]["test"]):
        if requirement.marker and not requirement.marker.evaluate():
            continue
        line = str(requirement)
        assert requirement.specifier.contains(metadata.version(requirement.name), prereleases=True), line
    requirements = {Requirement(line).name: line for line in setup_py["INSTALL_REQUIRES"]}
    fairseq = Requirement(requirements["fairseq-fixed"])
    assert f"fairseq={fairseq.name}{fairseq.specifier}\n" in (ROOT / "scripts" / "setup.sh").read_text()
    assert f"{fairseq.name}{fairseq.specifier}" == extras.FAIRSEQ
    assert extras.FAIRSEQ.replace("-", "_").replace("==", "-") == keep_fairseq.NAME
    allowed = {version: fairseq.marker.evaluate({"python_version": version}) for version in ("3.11", "3.12", "3.13")}
    assert allowed == {"3.11": True, "3.12": True, "3.13": False}
    ruff = next(Requirement(line) for line in setup_py["EXTRAS_REQUIRE"]["test"] if line.startswith("ruff"))
    hook = re.search(r"ruff-pre-commit\n\s+rev: v([\d.]+)", (ROOT / ".pre-commit-config.yaml").read_text())
    assert ruff.specifier.contains(hook[1])
    torch = Requirement(requirements["torch"])
    tried, anything = (Requirement(wish) for wish in choose_torch.WISHES)
    assert torch.specifier == anything.specifier
    assert torch.specifier.contains(str(tried.specifier).removeprefix("=="))
    assert str(tried) == f"torch=={choose_torch.torch_builds.BUILDS[0].version}"


def test_a_wheel_carries_configs_that_its_launcher_finds(tmp_path, warm_python):
    build = ("egg_info", "--egg-base", str(tmp_path), "build_py", "--build-lib", str(tmp_path / "lib"))
    done = run(sys.executable, "setup.py", "--quiet", *build)
    assert done.returncode == 0, done.stderr
    package = tmp_path / "lib" / "lazyformer_fairseq"
    carried = {path.relative_to(package / "configs") for path in package.glob("configs/*/*.yaml")}
    assert carried == {path.relative_to(ROOT / "configs") for path in ROOT.glob("configs/*/*.yaml")}
    assert (package / "py.typed").is_file()
    command = "-m lazyformer_fairseq.cli pretrain bert_base.yaml data --dry-run --no-fit".split()
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "lib")}
    launched = subprocess.run(
        [warm_python / "python", *command], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert f"--config-dir {package}/configs/pretraining --config-name bert_base" in launched.stdout, launched.stderr
    assert f"common.user_dir={package}" in launched.stdout.replace("'", "").replace('"', "")


def test_where_the_repository_is_known_its_address_leads_the_links_of_the_package_page(setup_py, monkeypatch):
    assert "](docs/start.md)" in setup_py["README"]
    monkeypatch.setenv("REPOSITORY_URL", "https://example.org/repository")
    readme = runpy.run_path(str(ROOT / "setup.py"))["README"]
    links = re.findall(r"(!?)\[[^]]*\]\(([^)]*)\)", readme)
    assert ("", "https://example.org/repository/blob/HEAD/docs/start.md") in links
    assert ("!", "https://example.org/repository/raw/HEAD/docs/babylm.png") in links
    assert all(target.startswith(("https://", "#")) for _, target in links)


@pytest.mark.slow
def test_an_installed_package_trains_and_runs_the_example_of_the_readme(tmp_path):
    """From the source distribution alone, in a folder where the checkout is not."""
    built = run(sys.executable, "setup.py", "--quiet", "egg_info", "-e", tmp_path, "sdist", "-d", tmp_path)
    assert built.returncode == 0, built.stderr
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    others = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "others.pth").write_text("\n".join(others))
    (archive,) = tmp_path.glob("*.tar.gz")

    def succeed(*command):
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    # The environment's own pip, which cannot change ours: that of another one would remove the package from there.
    pip_install = ("-m", "pip", "install", "--quiet", "--ignore-installed", "--no-index", "--no-deps")
    succeed(python, *pip_install, "--no-build-isolation", archive)
    package = packages / "lazyformer_fairseq"
    assert (package / "py.typed").is_file() and (package / "corpus" / "report.html.jinja").is_file()
    assert len([*package.glob("configs/*/*.yaml")]) == len([*ROOT.glob("configs/*/*.yaml")])

    shutil.copytree(ROOT / "tests/fixtures/checkpoints/m2x2", tmp_path / "checkpoints" / "laptop")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```python\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    printed = succeed(python, "-c", f"{example}\nimport lazyformer_fairseq\nprint(lazyformer_fairseq.__file__)")
    *answers, origin = printed.splitlines()
    assert len(answers) == 3 and Path(origin).parent == package
    program = tmp_path / "venv" / "bin" / "lazyformer"
    assert "Pre-train a tiny BERT and a tiny LazyFormer" in succeed(program, "demo", "--help")
    succeed(program, "demo", "--updates", "6", "--output", "demo")
    assert (tmp_path / "demo" / "table.md").is_file()


# --- which torch

CUDA = ['nvidia-cudnn-cu13==9.20.0.48; platform_system != "Nowhere"', 'triton==3.7.1; platform_system != "Nowhere"']
OTHERS = ["filelock", "typing-extensions>=4.10.0", 'cuda-toolkit[cublas]==13.0.3; platform_system == "Nowhere"']
# PyPI's builds, one without a tag or requirements, and one of an index of the user's.
OFFERS = {
    **{"cpu": ("2.13.0+cpu", OTHERS), "PyPI": ("2.13.0", OTHERS + CUDA), "own": ("2.13.0+cu126", OTHERS + CUDA)},
    "bare": ("2.13.0", []),
}


@pytest.fixture
def choose(monkeypatch, tmp_path):
    """``choose("7.0", offer="PyPI")``: the requirement and the reason on such a machine, of what pip would install."""

    def choose(*capabilities: str, offer="PyPI", system="Linux", **more) -> list[str]:
        false_nvidia_smi(tmp_path, monkeypatch, *capabilities, **more)
        version, requires = OFFERS[offer]
        report = {"install": [{"metadata": {"version": version, "requires_dist": requires}}]}
        monkeypatch.setattr(choose_torch, "installed_version", lambda package: None)
        monkeypatch.setattr(choose_torch, "pip_report", lambda wish: report)
        monkeypatch.setattr(choose_torch.platform, "machine", lambda: "x86_64")
        monkeypatch.setattr(choose_torch.platform, "system", lambda: system)
        return choose_torch.choose().splitlines()

    return choose


@pytest.mark.parametrize(
    ("capabilities", "driver", "offer", "wanted", "reason"),
    [
        ("7.0 " * 8, "580.65.06", "PyPI", "torch===2.10.0", "with kernels for compute capability 7.0 that runs"),
        ("7.0", "580.65.06", "own", "torch==2.13.0+cu126", "for the GPU, several GB"),
        ("8.0", "580.65.06", "cpu", "torch===2.13.0", "with CUDA for the GPU, several GB"),
        ("8.0", "550.54.14", "PyPI", "torch===2.10.0", "runs with driver 550; several GB"),
        ("12.0", "580.65.06", "PyPI", "torch==2.13.0", "for the GPU, several GB"),
        ("12.0 7.0", "580.65.06", "PyPI", "torch===2.10.0", "the newest on PyPI with kernels for compute capability 7"),
        ("3.5", "470.82.01", "cpu", "torch==2.13.0+cpu", "torch 2.6 and later do not support driver 470 with a GPU"),
        ("", "", "PyPI", "torch==2.13.0", "several GB, because pip finds no CPU build"),
        ("", "", "cpu", "torch==2.13.0+cpu", "a CPU build because there is no GPU (about a minute)"),
        ("", "", "bare", "torch==2.13.0", "a CPU build because there is no GPU (about a minute)"),
    ],
)
def test_choice_for_the_gpus_of_this_machine(choose, capabilities, driver, offer, wanted, reason):
    requirement, why = choose(*capabilities.split(), offer=offer, driver=driver)
    assert requirement == wanted and reason in why


def test_choice_where_nothing_is_told(choose, monkeypatch):
    requirement, why = choose("7.0", driver="450.80.02", knows_capabilities=False)
    assert requirement == "torch==2.13.0"
    assert "torch 2.6 and later do not support driver 450 with a GPU of unknown capability" in why
    assert choose(system="Darwin") == ["torch==2.13.0", "torch 2.13.0, the only build for macOS (about a minute)"]
    offers = {"torch>=2.6,<2.14": {"install": [{"metadata": {"version": "2.9.0", "requires_dist": OTHERS}}]}}
    monkeypatch.setattr(choose_torch, "pip_report", offers.get)
    assert choose_torch.choose().startswith("torch==2.9.0\n"), "the range where the tried version is not offered"
    offers.clear()
    with pytest.raises(SystemExit, match="finds no torch"):
        choose_torch.choose()


@given(
    release=st.tuples(st.integers(1, 4), st.integers(0, 14)),
    tail=st.sampled_from(["", ".0", ".1", ".0a0+git12ab", ".0rc2", ".0.dev20260101+cpu", ".0+cpu", ".1.post2", ".0b1"]),
)
def test_a_torch_is_kept_exactly_when_setup_py_allows_it(release, tail):
    version = f"{release[0]}.{release[1]}{tail}"
    allowed = Requirement(choose_torch.WISHES[1]).specifier
    assert choose_torch.fits(version) == allowed.contains(Version(version), prereleases=True)


def test_what_is_there_is_held_and_an_older_torch_refused_not_replaced(monkeypatch):
    monkeypatch.setattr(choose_torch, "installed_version", {"torch": "2.7.0a0+nv25"}.get)
    assert choose_torch.constrain() == "torch==2.7.0a0+nv25\ntorchaudio==2.11.0"
    monkeypatch.setattr(choose_torch, "installed_version", {"torch": "2.4.1", "torchaudio": "2.4.1"}.get)
    assert choose_torch.constrain().endswith("torchaudio==2.4.1") and choose_torch.installed() is None
    with pytest.raises(SystemExit, match=r"2\.4\.1"):
        choose_torch.choose()


# --- the scripts


def test_python_that_exists_but_fails_is_passed_over(tmp_path):
    for folder, script in (("shims", "exit 127"), ("real", f'exec "{sys.executable}" "$@"')):
        write_program(tmp_path / folder / "python3.11", script)
    path = f"{tmp_path / 'shims'}:{tmp_path / 'real'}:{os.environ['PATH']}"
    found = run("scripts/find_python.sh", PATH=path, PYTHON="")
    assert found.stdout.strip() == str(tmp_path / "real" / "python3.11")


def test_set_up_explains_itself():
    for option in ("-h", "--help"):
        answer = run("scripts/setup.sh", option)
        assert answer.returncode == 0 and answer.stdout.startswith("Installs the project and its dependencies")
        assert "set -euo" not in answer.stdout and "#" not in answer.stdout.replace("FILE#sha256", "")
    answer = run("scripts/setup.sh", "--venv")
    assert answer.returncode == 2 and "--venv: no such option; see scripts/setup.sh --help" in answer.stderr


def test_what_cannot_be_filled_is_refused_and_left_alone(tmp_path):
    write_program(tmp_path / "python", "exit 127")
    answer = run("scripts/setup.sh", str(tmp_path / "venv"), PYTHON=str(tmp_path / "python"))
    assert answer.returncode != 0 and f"PYTHON={tmp_path}/python" in answer.stderr
    assert not (tmp_path / "venv").exists()

    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "thesis.tex").touch()
    answer = run("scripts/setup.sh", str(tmp_path / "own"))
    assert answer.returncode != 0 and "use another VENV" in answer.stderr
    assert [path.name for path in (tmp_path / "own").iterdir()] == ["thesis.tex"]

    for name, what in (("setup.log", Path.symlink_to), ("setup.constraints", Path.hardlink_to)):
        folder = tmp_path / f"with_{name}"
        folder.mkdir()
        what(folder / name, tmp_path / "own" / "thesis.tex")
        answer = run("scripts/setup.sh", str(folder))
        assert answer.returncode != 0 and f"{folder / name} is a link" in answer.stderr

    version_check = "case $2 in *version_info*) exit 1;; esac"  # everything else, such as its pip, works
    write_program(tmp_path / "bin" / "python", f"[ $1 = --version ] && echo Python 3.9.1; {version_check}")
    answer = run("scripts/setup.sh", str(tmp_path))
    assert answer.returncode != 0 and "has Python 3.9.1, but 3.11 to 3.14 is required" in answer.stderr


@pytest.mark.parametrize("misfit", ["", "torch 2.13.0 has no kernels for GPUs of compute capability 7.0"])
def test_a_kept_torch_that_cannot_use_the_gpus_is_named_at_the_end(tmp_path, misfit):
    answers = f'case "$*" in *torch_builds) echo "{misfit}";; *choose_torch.py\\ installed) echo 2.13.0;; esac'
    write_program(tmp_path / "bin" / "python", answers)  # all that set-up runs succeeds
    answer = run("scripts/setup.sh", str(tmp_path))
    assert "Keeping torch 2.13.0." in answer.stdout and "Ready: " in answer.stdout, answer.stderr
    assert answer.stderr.strip() == (f"WARNING: {misfit}" if misfit else "")


# --- fairseq from a file


@pytest.fixture
def wheel(tmp_path):
    """One of the name that set-up asks for, which is no fairseq."""
    path, about = tmp_path / "kept" / f"{keep_fairseq.NAME}-py3-none-any.whl", f"{keep_fairseq.NAME}.dist-info"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("kept_fairseq.py", "")
        file.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: fairseq-fixed\nVersion: 0.12.3.1\n")
        file.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{about}/RECORD", "")
    return path


def take(given: object, folder: Path) -> str:
    return run(sys.executable, "scripts/keep_fairseq.py", "take", str(given), str(folder)).stderr


def test_a_kept_wheel_is_taken_by_its_hash(wheel, tmp_path):
    folder, right = tmp_path / "fairseq", hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert f"The actual one is {right}" in take(wheel, folder), "nobody says what it has to be"
    assert take(f"{wheel}#sha256={right.upper()}", folder) == ""
    assert take(folder / wheel.name, folder), "from where it is"
    keep_fairseq.note(folder)
    shutil.copy(folder / f"{wheel.name}.sha256", wheel.parent)
    assert [take(wheel, folder), [path.name for path in folder.iterdir()]] == ["", [wheel.name]]
    with wheel.open("ab") as file:
        file.write(b"more")
    assert f"but {wheel}.sha256 has {right}; do not use this file" in take(wheel, folder)
    assert f"but FAIRSEQ_WHEEL has {'0' * 64}" in take(f"{wheel}#sha256={'0' * 64}", folder)
    assert "64 hexadecimal digits" in take(f"{wheel}#md5=12", folder)
    assert "no such file" in take(tmp_path / "gone.whl", folder)
    (torn := wheel.with_name(f"{wheel.name}.sha256")).write_text("")
    assert take(wheel, folder).startswith(f"{torn} does not contain a SHA-256")
    (other := tmp_path / "fairseq-0.12.2.tar.gz").touch()
    assert "must be a wheel or the source archive of fairseq-fixed" in take(other, folder)
    (source := tmp_path / f"{keep_fairseq.NAME}.tar.gz").touch()
    assert "but the index has c607577a54ab" in take(source, folder)


@pytest.mark.slow
def test_set_up_installs_the_kept_wheel_and_asks_no_index(wheel, tmp_path):
    venv, calls = tmp_path / "venv", tmp_path / "calls"
    real = f'exec "{sys.executable}" "$@" --quiet --target "{tmp_path / "installed"}"'
    write_program(
        venv / "bin" / "python",
        f'echo "$*" >> "{calls}"; case "$*" in *torch.py\\ installed) echo 2.13.0;;'
        f' scripts/keep_fairseq.py*) exec "{sys.executable}" "$@";; *--no-index*) {real};; esac',
    )
    make = (
        "make",
        "setup",
        f"VENV={venv}",
        f"FAIRSEQ_WHEEL={wheel}#sha256={hashlib.sha256(wheel.read_bytes()).hexdigest()}",
    )
    for _ in range(2):  # though nothing has changed
        calls.unlink(missing_ok=True)
        done = run(*make)
        assert done.returncode == 0 and "Installing fairseq" in done.stdout, done.stderr
    assert (tmp_path / "installed" / "kept_fairseq.py").is_file()
    assert "pip wheel" not in calls.read_text() and "import fairseq, sacremoses" in calls.read_text()
    refused = run(*make[:-1], f"FAIRSEQ_WHEEL={wheel}#sha256={'0' * 64}")
    assert refused.returncode != 0 and "do not use this file" in refused.stderr


@pytest.mark.parametrize("has_fairseq", [True, False])
def test_set_up_keeps_the_wheel_that_it_builds_or_says_that_there_is_none(wheel, tmp_path, has_fairseq):
    venv = tmp_path / "venv"
    builds = f'*pip\\ wheel*) mkdir -p "{venv}/fairseq" && cp "{wheel}" "{venv}/fairseq";;'
    write_program(
        venv / "bin" / "python",
        f"""case "$*" in *torch.py\\ installed) echo 2.13.0;; --version) echo Python 3.1x;; {builds}
        *yes*) echo {"yes" * has_fairseq};; *version\\(*) exit 1;;  # what it is asked: is there to be one, is there one
        scripts/keep_fairseq.py*) exec "{sys.executable}" "$@";; esac""",
    )
    done = run("scripts/setup.sh", str(venv))
    says = (
        "fairseq's wheel and its SHA-256 are in"
        if has_fairseq
        else "Python 3.1x does not support fairseq: training with fairseq-train requires"
    )
    assert done.returncode == 0 and says in done.stdout, done.stderr
    assert len([*venv.glob("fairseq/*.whl.sha256")]) == has_fairseq


# --- the Makefile


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize("target", ["setup", "test", "test-all", "demo", "docs", "lint", "format", "clean"])
def test_make_sets_up_again_when_what_it_depends_on_has_changed(tmp_path, target):
    def plan(*arguments):
        """What make would run, with an environment that is filled already."""
        (tmp_path / "setup.stamp").touch()
        answer = run("make", "--dry-run", f"VENV={tmp_path}", target, *arguments)
        assert answer.returncode == 0, answer.stderr
        return answer.stdout

    assert "setup.sh" not in plan()
    for changed in ("setup.py", "pyproject.toml", "scripts/setup.sh", "scripts/choose_torch.py"):
        assert ("setup.sh" in plan("-W", changed)) == (target != "clean")
    if "test" in target:
        assert ("not slow" in plan()) == (target == "test")
