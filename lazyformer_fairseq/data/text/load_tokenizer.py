"""A tokenizer's folder, of either kind, says in its tokenizer.json which it is."""

from pathlib import Path
from typing import Union

from lazyformer_fairseq.data.text.interface import SETTINGS_FILE, FolderName, TextTokenizer
from lazyformer_fairseq.data.text.library_recipe import LibraryNormaliser, LibrarySettings
from lazyformer_fairseq.data.text.library_tokenizer import KIND, LibraryTokenizer
from lazyformer_fairseq.data.text.normalisation import TextNormaliser, TextSettings
from lazyformer_fairseq.data.text.tokenizer import Tokenizer
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.storage.hashes import sha256_of
from lazyformer_fairseq.storage.json_files import read_json


def load_tokenizer(folder: FolderName) -> TextTokenizer:
    """Reads a tokenizer folder; nothing in it is run or unpickled.

    Raises:
        UserError: no such folder; a file is missing, damaged, of another format version, or does not match the others.
    """
    return class_of(folder).load(folder)


def class_of(folder: FolderName) -> type[Union[Tokenizer, LibraryTokenizer]]:
    """The class that reads a folder."""
    path = Path(folder) / SETTINGS_FILE
    description = read_json(path, f"is {path.parent} a tokenizer folder, copied whole?")
    if "format_version" not in description and isinstance(description.get("model"), dict):
        raise UserError(
            f"{path}: is a tokenizer as Hugging Face writes it; make a folder for this program of it first: "
            "docs/your_tokenizer.md, 'Take the tokenizer of a BERT'"
        )
    return LibraryTokenizer if description.get("kind") == KIND else Tokenizer


def find_tokenizer_folder(path: Path) -> Path:
    """A tokenizer's folder, given itself, a folder of checkpoints, or a checkpoint; UserError where there is none."""
    folder = path.parent if path.is_file() else path
    for candidate in (folder, folder / "tokenizer"):
        if (candidate / SETTINGS_FILE).is_file():
            return candidate
    raise UserError(f"{path}: no tokenizer there ({SETTINGS_FILE}); give its folder, or the folder of a checkpoint")


def tokenizer_hashes(folder: FolderName) -> dict[str, str]:
    """SHA-256 of each file of a tokenizer's folder, by name."""
    return {name: sha256_of(Path(folder) / name) for name in class_of(folder).files}


def normaliser_of(settings: Union[TextSettings, LibrarySettings]) -> Union[TextNormaliser, LibraryNormaliser]:
    """What makes a tokenizer's words of a text, by its settings alone."""
    return LibraryNormaliser(settings) if isinstance(settings, LibrarySettings) else TextNormaliser(settings)
