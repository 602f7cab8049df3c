"""Unpacks a zip archive from a server that is not trusted: unpack_zip.py ARCHIVE FOLDER

The archive is refused whole, before anything is written, if it holds a link, a name that points out of FOLDER, too many
files or too many bytes. The sizes that it states are binding: zipfile reads no further than them.
"""

import shutil
import stat
import sys
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path, PurePosixPath

MOST_MEMBERS = 1000
MOST_BYTES = 2 * 10**9  # WikiText-103 has 0.55 GB, the largest task of GLUE 0.2 GB


def unpack(archive: Path, folder: Path, is_wanted: Callable[[str], bool] = lambda name: True) -> list[Path]:
    """Unpack the wanted files of an archive under a folder, and return where they are.

    Args:
        archive: the zip file.
        folder: receives the files, in the archive's folders.
        is_wanted: whether a member of this name is unpacked.

    Raises:
        SystemExit: the archive is refused or damaged; the message says why.
    """
    try:
        with zipfile.ZipFile(archive) as file:
            members = [member for member in file.infolist() if is_wanted(member.filename) and not member.is_dir()]
            _refuse_excess(archive, file.infolist(), members)
            for member in members:
                _refuse_odd_member(archive, member)
            return [_write(file, member, folder) for member in members]
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, OSError) as error:
        sys.exit(f"{archive}: {error}")


def _refuse_excess(archive: Path, every: list[zipfile.ZipInfo], wanted: list[zipfile.ZipInfo]) -> None:
    total = sum(member.file_size for member in wanted)
    if len(every) > MOST_MEMBERS or total > MOST_BYTES:
        sys.exit(
            f"{archive}: holds {len(every):,} files, of which {total:,} bytes would be unpacked; refused beyond "
            f"{MOST_MEMBERS:,} files or {MOST_BYTES:,} bytes"
        )


def _refuse_odd_member(archive: Path, member: zipfile.ZipInfo) -> None:
    path = PurePosixPath(member.filename)
    if path.is_absolute() or ".." in path.parts or "\\" in member.filename or ":" in member.filename:
        sys.exit(f"{archive}: holds {member.filename!r}, a name that may point out of the folder; refused")
    if stat.S_ISLNK(member.external_attr >> 16):
        sys.exit(f"{archive}: holds {member.filename!r}, a link; refused")


def _write(file: zipfile.ZipFile, member: zipfile.ZipInfo, folder: Path) -> Path:
    path = folder / member.filename
    path.parent.mkdir(parents=True, exist_ok=True)
    with file.open(member) as source, path.open("wb") as target:
        shutil.copyfileobj(source, target)
    return path


if __name__ == "__main__":
    unpack(Path(sys.argv[1]), Path(sys.argv[2]))
