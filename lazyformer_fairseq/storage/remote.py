"""Access to files at URLs that fsspec supports, such as ``s3://bucket/folder``, through local copies.

The copies are stored in a per-user folder in the system's temporary folder (``TMPDIR``).
"""

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, Union

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.storage.atomic import OUT_OF_SPACE, atomic_file
from lazyformer_fairseq.storage.run_lock import file_lock


def is_url(path: Union[str, Path]) -> bool:
    """Return True if a path is a URL; a ``Path`` is never a URL, because it cannot contain two adjacent slashes."""
    return "://" in str(path)


@contextmanager
def opened(url: str) -> Iterator[tuple[Any, str]]:
    """Yield fsspec's file system for a URL and the path in it.

    Raises:
        UserError: an operation on the file system fails in the block.
        OSError: the local disk is full.
    """
    from fsspec.core import url_to_fs

    try:
        # Do not cache listings, because other machines may write there at the same time.
        files, path = url_to_fs(url, use_listings_cache=False)
        yield files, path.rstrip("/")
    except UserError:
        raise
    except ImportError as error:
        package = getattr(error.__cause__, "name", None) or "the package"
        raise UserError(f"{url} requires a package that is not installed: pip install {package}") from None
    except FileNotFoundError as error:
        raise UserError(f"{url}: no such file, folder or bucket ({error})") from None
    except Exception as error:  # each file system raises its own errors
        if getattr(error, "errno", None) in OUT_OF_SPACE:
            raise
        message = str(error).strip() or type(error).__name__
        reason = message.splitlines()[0]
        raise UserError(
            f"{url}: cannot be reached ({reason}); check the URL, the network and your credentials"
        ) from error


def files_at(url: str) -> list[str]:
    """Return the URLs of all files in a folder, or the URL itself if it is a file."""
    with opened(url) as (files, path):
        if files.isfile(path):
            return [url]
        names = files.find(path)
        if not names:
            raise FileNotFoundError(path)
        return [url.rstrip("/") + name.removeprefix(path) for name in names]


def local_copy(path: Union[str, Path]) -> Union[str, Path]:
    """Return a local path unchanged; for a URL, download the current version and return the path of the copy."""
    if not is_url(path):
        return path
    with opened(str(path)) as (files, there):
        copy = _versions(str(path)) / files.ukey(there)
        fetch(files, there, copy)
    return copy


def remove_copies(url: str) -> None:
    """Remove all copies of a URL made by :func:`local_copy`."""
    shutil.rmtree(_versions(url), ignore_errors=True)


def remove(url: str) -> None:
    """Remove a folder at a URL."""
    with opened(url) as (files, path):
        if files.exists(path):
            files.rm(path, recursive=True)


def fetch(files: Any, there: str, copy: Path) -> None:
    """Download a remote file atomically unless the copy exists; only one of several processes downloads it."""
    if copy.exists():
        return
    locks = copies() / "locks"
    locks.mkdir(exist_ok=True)
    with file_lock(locks / digest(str(copy))[:2]):
        if not copy.exists():
            with atomic_file(copy, durable=False) as file:
                files.get_file(there, file.name)


def copies() -> Path:
    """Return the user's folder for copies, creating it if necessary.

    Raises:
        UserError: the path belongs to another user, or is not a folder.
    """
    folder = Path(tempfile.gettempdir(), f"lazyformer-{os.getuid()}")
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode):
        raise UserError(f"{folder} does not belong to you; set TMPDIR to a folder that does")
    return folder


def digest(text: str) -> str:
    """Return a short hash of a URL or a path, for use as a file name."""
    return sha256(text.encode()).hexdigest()[:16]


def _versions(url: str) -> Path:
    return copies() / "inputs" / digest(url)
