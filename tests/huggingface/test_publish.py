"""``lazyformer export --to hub``: which checkpoint goes to which branch, what is kept there, and refusals in words."""

import inspect
import re
import shutil
from pathlib import Path

import huggingface_hub
import pytest
from helpers import ROOT
from huggingface_hub.errors import HTTPError, LocalTokenNotFoundError
from in_process import invoke, refusal

from lazyformer_fairseq.huggingface import publish
from lazyformer_fairseq.huggingface.models.heads import LazyFormerForMaskedLM
from lazyformer_fairseq.training.word_counter import WordCounter, checkpoints_by_words

ENCODER = ROOT / "tests/fixtures/checkpoints/encoder"


class FolderHub:
    """A Hub whose repositories are folders with a subfolder per branch; its methods have the signatures of HfApi."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.private: list[bool] = []

    def create_repo(self, repo_id, *, private, exist_ok):
        (self.root / repo_id / "main").mkdir(parents=True, exist_ok=exist_ok)
        self.private.append(private)
        return huggingface_hub.RepoUrl(f"https://huggingface.co/{repo_id}")

    def create_branch(self, repo_id, *, branch, exist_ok):
        (self.root / repo_id / branch).mkdir(exist_ok=exist_ok)

    def file_exists(self, repo_id, filename, *, revision):
        return (self.root / repo_id / revision / filename).is_file()

    def upload_folder(self, *, repo_id, folder_path, revision, ignore_patterns, commit_message):
        target = self.root / repo_id / revision
        assert target.is_dir(), "the branch must exist before something is uploaded to it"
        assert commit_message
        shutil.copytree(folder_path, target, ignore=shutil.ignore_patterns(*ignore_patterns), dirs_exist_ok=True)


@pytest.fixture
def hub(tmp_path, monkeypatch) -> FolderHub:
    hub = FolderHub(tmp_path / "hub")
    monkeypatch.setattr(publish, "HfApi", lambda: hub)
    return hub


@pytest.fixture
def checkpoints(tmp_path) -> Path:
    """A folder of a run that kept checkpoints at 500,000 and at two million words."""
    folder = tmp_path / "run"
    shutil.copytree(ENCODER, folder)
    counter = WordCounter(marks=[500_000, 2_000_000], words_per_token=1.0)
    for name in counter.add(3_000_000):
        shutil.copy(folder / "checkpoint_last.pt", folder / f"{name}.pt")
    return folder


def uploads_in(printed: str) -> list[str]:
    """Return the lines that report an upload; transformers' progress bars are left out."""
    return re.findall(r"uploaded: [^\r\n]*", printed)


def test_each_checkpoint_has_a_branch_that_transformers_loads(hub, checkpoints):
    printed = invoke("export", checkpoints, "ann/model", "--to", "hub", "--private")
    branches = ["main", "chck_0.5M", "chck_2M"]
    assert uploads_in(printed) == [f"uploaded: ann/model, branch {branch}" for branch in branches]
    assert hub.private == [True]
    for branch in branches:
        LazyFormerForMaskedLM.from_pretrained(hub.root / "ann/model" / branch)
    assert 'from_pretrained("ann/model"' in (hub.root / "ann/model/main/README.md").read_text()


def test_a_card_that_was_completed_on_the_hub_is_kept(hub, checkpoints):
    invoke("export", checkpoints, "ann/model", "--to", "hub")
    card = hub.root / "ann/model/main/README.md"
    card.write_text("completed by its author")
    (hub.root / "ann/model/main/config.json").unlink()
    invoke("export", checkpoints, "ann/model", "--to", "hub")
    assert card.read_text() == "completed by its author"
    assert (hub.root / "ann/model/main/config.json").is_file(), "everything else is renewed"


def test_a_file_goes_to_main_alone(hub, checkpoints):
    printed = invoke("export", checkpoints / "checkpoint_2M_words.pt", "ann/model", "--to", "hub")
    assert uploads_in(printed) == ["uploaded: ann/model, branch main"]


def test_the_methods_of_the_real_hub_take_these_arguments():
    for name in ("create_repo", "create_branch", "file_exists", "upload_folder"):
        ours = inspect.signature(getattr(FolderHub, name)).parameters
        theirs = inspect.signature(getattr(huggingface_hub.HfApi, name)).parameters
        assert ours.keys() <= theirs.keys(), name


def test_refusals(hub, checkpoints, monkeypatch):
    assert "'a/b/c'" in refusal("export", checkpoints, "a/b/c", "--to", "hub")
    assert "--private requires --to hub" in refusal("export", checkpoints, "out", "--private")

    def without_token(*arguments, **named):
        raise LocalTokenNotFoundError("no token")

    monkeypatch.setattr(hub, "create_repo", without_token)
    assert "hf auth login" in refusal("export", checkpoints, "ann/model", "--to", "hub")

    def without_network(*arguments, **named):
        raise HTTPError("no route to host")

    monkeypatch.setattr(hub, "create_repo", without_network)
    message = refusal("export", checkpoints, "ann/model", "--to", "hub")
    assert message.startswith("ann/model: the upload failed (no route to host")


def test_checkpoints_are_listed_by_number_of_words(tmp_path):
    for name in ("checkpoint_10M_words.pt", "checkpoint_2M_words.pt", "checkpoint_xM_words.pt", "checkpoint_last.pt"):
        (tmp_path / name).touch()
    assert list(checkpoints_by_words(tmp_path)) == ["2M", "10M"]
