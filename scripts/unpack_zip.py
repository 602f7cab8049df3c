"""Unpacks a zip archive from an untrusted server: unpack_zip.py ARCHIVE FOLDER

Before anything is written, the archive is rejected as a whole if it contains a link, a path that leaves FOLDER, too
many files or too many bytes. Members cannot exceed the sizes in the archive's directory, because zipfile stops there.
"""

import shutil
import stat
import sys
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path, PurePosixPath

MOST_MEMBERS = 1000
MOST_BYTES = 2 * 10**9  # WikiText-103 takes 0.55 GB, and GLUE's largest task 0.2 GB


def unpack(archive: Path, folder: Path, is_wanted: Callable[[str], bool] = lambda name: True) -> list[Path]:
    """Unpack files of an archive to a folder, and return their paths.

    Args:
        archive: the zip file.
        folder: the target folder; the archive's folders are kept.
        is_wanted: a function that returns whether to unpack the member with this name.

    Raises:
        SystemExit: the archive is rejected or damaged; the message says why.
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
            f"{archive} contains {len(every):,} files, and {total:,} bytes would be unpacked; the limits are "
            f"{MOST_MEMBERS:,} files and {MOST_BYTES:,} bytes"
        )


def _refuse_odd_member(archive: Path, member: zipfile.ZipInfo) -> None:
    path = PurePosixPath(member.filename)
    if path.is_absolute() or ".." in path.parts or "\\" in member.filename or ":" in member.filename:
        sys.exit(f"{archive}: rejected, because {member.filename!r} may lead out of the folder")
    if stat.S_ISLNK(member.external_attr >> 16):
        sys.exit(f"{archive}: rejected, because {member.filename!r} is a link")


def _write(file: zipfile.ZipFile, member: zipfile.ZipInfo, folder: Path) -> Path:
    path = folder / member.filename
    path.parent.mkdir(parents=True, exist_ok=True)
    with file.open(member) as source, path.open("wb") as target:
        shutil.copyfileobj(source, target)
    return path


if __name__ == "__main__":
    unpack(Path(sys.argv[1]), Path(sys.argv[2]))
