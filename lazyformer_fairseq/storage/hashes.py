"""Hashes of files, by which data that was made knows what it was made of."""

import hashlib
from pathlib import Path


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
