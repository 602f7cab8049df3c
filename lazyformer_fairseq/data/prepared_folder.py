"""A folder that ``lazyformer glue prepare`` or ``lazyformer squad prepare`` wrote, by its manifest."""

import hashlib
import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self, Union

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.storage.json_files import read_json

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class PreparedFolder(ABC):
    """A folder, whole and of this version. `manifest` is what prepare wrote; it holds all counts.

    Attributes:
        FORMAT, FORMAT_VERSION: the manifest's.
        SETTINGS: the fields of a manifest that decide the data.
        CONTENT: what the folder holds, in messages.
        COMMAND: what writes it.
    """

    folder: Path
    manifest: dict[str, Any]

    FORMAT: ClassVar[str]
    FORMAT_VERSION: ClassVar[int]
    SETTINGS: ClassVar[tuple[str, ...]]
    CONTENT: ClassVar[str]
    COMMAND: ClassVar[str]

    @classmethod
    def load(cls, folder: Union[str, Path]) -> Self:
        """Raises a UserError where prepare did not write the folder, or wrote it in another version."""
        folder = Path(folder)
        path = folder / MANIFEST
        manifest = read_json(path, f"run `{cls.COMMAND}`")
        if manifest.get("format") != cls.FORMAT:
            raise UserError(f"{path}: is not the manifest of {cls.CONTENT}; run `{cls.COMMAND}`")
        if manifest.get("format_version") != cls.FORMAT_VERSION:
            raise UserError(
                f"{path}: format version {manifest.get('format_version')!r}, but this program reads "
                f"{cls.FORMAT_VERSION}; remove {folder} and run `{cls.COMMAND}` again"
            )
        if not (all(name in manifest for name in cls.SETTINGS) and cls.is_whole(manifest)):
            raise UserError(f"{path}: damaged; remove {folder} and run `{cls.COMMAND}` again")
        return cls(folder, manifest)

    @staticmethod
    @abstractmethod
    def is_whole(manifest: dict[str, Any]) -> bool:
        """Whether a manifest that has all SETTINGS has every other field that is read."""

    @staticmethod
    def is_at(folder: Union[str, Path]) -> bool:
        return (Path(folder) / MANIFEST).is_file()

    @property
    def sha256(self) -> str:
        """Hash of what decides the data: files, tokenizer, sizes."""
        return hashlib.sha256(json.dumps([self.manifest[name] for name in self.SETTINGS]).encode()).hexdigest()

    @property
    def tokenizer_folder(self) -> Path:
        return self.folder / "tokenizer"
