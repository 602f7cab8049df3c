"""``lazyformer export --to hub``: uploads checkpoints to a repository on the Hugging Face Hub.

The newest checkpoint is uploaded to the ``main`` branch. Each checkpoint that was kept after a certain number of
training words is uploaded to a separate branch, such as ``chck_10M`` for ten million words. BabyLM's evaluation
pipelines expect these names (https://github.com/babylm/evaluation-pipeline-2025).
"""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Optional

from huggingface_hub import HfApi
from huggingface_hub.errors import HFValidationError, HTTPError, LocalTokenNotFoundError
from huggingface_hub.utils import validate_repo_id

from lazyformer_fairseq.arguments import checkpoint_at
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.huggingface.export import AUTO, CARD_FILE, export_to_huggingface
from lazyformer_fairseq.training.word_counter import checkpoints_by_words

MAIN = "main"


def publish(
    checkpoints: Path,
    repository: str,
    form: str = AUTO,
    head: Optional[str] = None,
    private: bool = False,
) -> Iterator[str]:
    """Export checkpoints, upload each one to its branch, and yield each branch's name when its upload is finished.

    An existing model card in the repository is kept, because its author may have completed it.

    Args:
        checkpoints: A checkpoint, or a folder of checkpoints.
        repository: The repository's name, such as ``user/model``. It is created if it does not exist.
        form: The export's form; see :func:`~lazyformer_fairseq.huggingface.export.export_to_huggingface`.
        head: The name of the classification or span head to export.
        private: Whether a new repository is private.

    Raises:
        UserError: A checkpoint cannot be exported, the repository's name is invalid, there is no token, or the Hub
            rejects a request or cannot be reached.
    """
    try:
        validate_repo_id(repository)
        api = HfApi()
        repository = api.create_repo(repository, private=private, exist_ok=True).repo_id
        for branch, checkpoint in _checkpoints_by_branch(checkpoints).items():
            if branch != MAIN:
                api.create_branch(repository, branch=branch, exist_ok=True)
            kept = []
            if api.file_exists(repository, CARD_FILE, revision=branch):
                kept.append(CARD_FILE)
            with TemporaryDirectory() as scratch:
                folder = Path(scratch) / "export"
                export_to_huggingface(checkpoint, folder, form, head, name=repository)
                api.upload_folder(
                    repo_id=repository,
                    folder_path=folder,
                    revision=branch,
                    ignore_patterns=kept,
                    commit_message=f"Upload {checkpoint.name}",
                )
            yield branch
    except HFValidationError as error:
        raise UserError(f"{repository} is not the name of a repository on the Hub: {error}") from None
    except LocalTokenNotFoundError:
        raise UserError("the Hub requires a token with write access: run `hf auth login`, or set HF_TOKEN") from None
    except (HTTPError, OSError) as error:
        raise UserError(f"{repository}: the upload failed ({error}); run the command again to continue") from None


def _checkpoints_by_branch(checkpoints: Path) -> dict[str, Path]:
    branches = {MAIN: checkpoint_at(checkpoints)}
    if checkpoints.is_dir():
        for words, checkpoint in checkpoints_by_words(checkpoints).items():
            branches[f"chck_{words}"] = checkpoint
    return branches
