"""Hashes of files."""

import hashlib
from pathlib import Path


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
