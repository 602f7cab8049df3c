"""The documentation builds into a site without a broken link."""

import html
import importlib.util
import os
import re
import subprocess
import sys

import click
import pytest
from helpers import ROOT

import lazyformer_fairseq
from lazyformer_fairseq import huggingface
from lazyformer_fairseq.cli import main

REPOSITORY = "https://example.org/repository"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site; mkdocs fails at a link to a page, an anchor or a file that is not there."""
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("needs mkdocs: pip install '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = (sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder))
    environment = os.environ | {"REPOSITORY_URL": REPOSITORY, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def text_of(page):
    """What a reader sees."""
    return html.unescape(re.sub(r"<[^>]+>", "", page.read_text(encoding="utf-8")))


@pytest.mark.slow
def test_the_reference_has_every_public_name_and_every_command(site):
    pages = {name: text_of(site / "reference" / name / "index.html") for name in ("python", "huggingface")}
    for name in {*lazyformer_fairseq.__all__} - {"USER_DIR"} - {*huggingface.PARTS}:
        assert f"lazyformer_fairseq.{name}" in pages["python"]
    for name in huggingface.PARTS:
        assert f"lazyformer_fairseq.huggingface.{name}" in pages["huggingface"]
    assert not re.search(":(func|class|meth):", "".join(pages.values()))
    shown = text_of(site / "reference" / "command_line" / "index.html")
    for name, command in main.commands.items():
        assert f"lazyformer {name}" in shown
        for option in command.params:
            assert not isinstance(option, click.Option) or option.opts[0] in shown


@pytest.mark.slow
def test_links_between_pages_stay_on_the_site_and_others_lead_to_the_repository(site):
    links = re.findall('href="([^"]*)"', (site / "faq" / "index.html").read_text(encoding="utf-8"))
    assert "../patterns/#named-models" in links
    assert f"{REPOSITORY}/blob/HEAD/CITATION.cff" in links
    index = (site / "index.html").read_text(encoding="utf-8")
    assert 'href="CONTRIBUTING/"' in index
    assert (site / "records" / "babylm-10M.json").is_file() and (site / "babylm.png").is_file()
