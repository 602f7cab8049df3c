"""Links and names of files in the pages lead somewhere."""

import re

import pytest
from helpers import ROOT
from pages import PAGES

# docs/add_a_kind.md walks through the one, a command writes the other.
MADE_BY_READERS = {"lazyformer_fairseq/modules/sublayers/local_mean.py", "modeling_lazyformer.py"}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)]+)\)", PAGES[page]):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        assert file.exists(), target
        if anchor:
            heads = re.findall(r"^#+ (.*)", file.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w\- ]", "", head).lower().replace(" ", "-") for head in heads}, target


def test_the_index_has_every_page():
    linked = set(re.findall(r"^\| \[[\w.]+\]\(([\w.]+)\)", PAGES["docs/README.md"], re.MULTILINE))
    assert linked == {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}


def test_python_files_that_pages_name_are_there():
    roots = (ROOT / name for name in ("lazyformer_fairseq", "scripts", "tests"))
    there = ["/setup.py", *(f"/{path.relative_to(ROOT)}" for root in roots for path in root.rglob("*.py"))]
    for page, text in PAGES.items():
        for name in set(re.findall(r"\w[\w/]*\.py\b", text)) - MADE_BY_READERS:
            assert any(path.endswith(f"/{name}") for path in there), (page, name)


@pytest.mark.parametrize("page", PAGES)
def test_files_and_folders_that_a_page_names_are_there(page):
    named = set(re.findall(r"(?<![\w/.-])(?:scripts|configs|docs|tests|lazyformer_fairseq)/[\w./-]*\w", PAGES[page]))
    in_package = set(
        re.findall(
            r"`((?:patterns|modules|fairseq_plugin|data|finetuning|experiments|measure|storage)/[\w./]+\w)`",
            PAGES[page],
        )
    )
    for path in named | {f"lazyformer_fairseq/{path}" for path in in_package}:
        assert (ROOT / path).exists() or path in MADE_BY_READERS, path


def test_the_tree_in_contributing_is_the_packages():
    tree = PAGES["CONTRIBUTING.md"].split("```")[1]
    named = set(re.findall(r"^  (\w+)/", tree, re.MULTILINE))
    assert named == {path.parent.name for path in (ROOT / "lazyformer_fairseq").glob("*/__init__.py")}


def test_the_readme_is_short():
    assert len(PAGES["README.md"].split()) < 1000
