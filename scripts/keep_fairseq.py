"""Keeps a copy of fairseq, in case it is removed from the index. scripts/setup.sh runs this script.

    keep_fairseq.py take FILE[#sha256=HASH] FOLDER   verify FILE (a wheel or source archive), and copy it to FOLDER
    keep_fairseq.py note FOLDER                      write the SHA-256 of FOLDER's wheel to a file next to the wheel

The expected SHA-256 comes from the caller, or from FILE.sha256 in the format of `sha256sum`. The source archive's is
hard-coded.
"""

import hashlib
import re
import shutil
import sys
from pathlib import Path

NAME = "fairseq_fixed-0.12.3.1"
SOURCE = {f"{NAME}.tar.gz": "c607577a54ab30e2ee0f0b0a754ea5cdbc6ad0a9f99a1726638a2201445bc1cc"}


def sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def expected(file: Path, given: str) -> tuple[str, str]:
    """Return the expected SHA-256 of a file and where it is specified; both are empty if it is unknown."""
    note = file.with_name(f"{file.name}.sha256")
    if given:
        return given.removeprefix("sha256=").lower(), "FAIRSEQ_WHEEL"
    if file.name in SOURCE:
        return SOURCE[file.name], "the index"
    if not note.is_file():
        return "", ""
    if not (found := re.match(r"\s*([0-9a-fA-F]{64})\b", note.read_text(encoding="utf-8", errors="replace"))):
        sys.exit(f"{note} does not contain a SHA-256; remove this file, or write the expected SHA-256 to it")
    return found[1].lower(), str(note)


def take(given: str, folder: Path) -> None:
    name, _, wanted = given.partition("#")
    file = Path(name).expanduser()
    if not file.is_file():
        sys.exit(f"FAIRSEQ_WHEEL={name}: no such file")
    if not file.name.startswith(NAME) or not file.name.endswith((".whl", ".tar.gz")):
        sys.exit(
            f"FAIRSEQ_WHEEL={name}: must be a wheel or the source archive of fairseq-fixed: {NAME}-*.whl or .tar.gz"
        )
    if wanted and not re.fullmatch(r"sha256=[0-9a-fA-F]{64}", wanted):
        sys.exit(f"FAIRSEQ_WHEEL={given}: # must be followed by sha256= and 64 hexadecimal digits")
    (right, who), found = expected(file, wanted), sha256(file)
    if right and right != found:
        sys.exit(f"FAIRSEQ_WHEEL={name}: its SHA-256 is {found}, but {who} has {right}; do not use this file")
    if file.resolve().parent != folder.resolve():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        shutil.copyfile(file, folder / file.name)
    if not right:
        print(f"The expected SHA-256 of {file.name} is unknown. The actual one is {found}", file=sys.stderr)


def note(folder: Path) -> None:
    for wheel in folder.glob(f"{NAME}-*.whl"):
        wheel.with_name(f"{wheel.name}.sha256").write_text(f"{sha256(wheel)}  {wheel.name}\n", encoding="utf-8")


if __name__ == "__main__":
    what, *words = sys.argv[1:]
    take(words[0], Path(words[1])) if what == "take" else note(Path(words[0]))
