"""Fairseq as a file that the user keeps, for a day on which no index has it; scripts/setup.sh runs this.

    keep_fairseq.py take FILE[#sha256=HASH] FOLDER   copies a wheel or source archive to FOLDER, if it is what it was
    keep_fairseq.py note FOLDER                      writes the SHA-256 of the wheel in FOLDER beside it

What a file's SHA-256 has to be is said by the caller, or by FILE.sha256, as `sha256sum` writes it; that of the source
archive is known.
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
    """What the file's SHA-256 has to be, and who says so; empty where nobody does."""
    note = file.with_name(f"{file.name}.sha256")
    if given:
        return given.removeprefix("sha256=").lower(), "FAIRSEQ_WHEEL"
    if file.name in SOURCE:
        return SOURCE[file.name], "the index"
    if not note.is_file():
        return "", ""
    if not (found := re.match(r"\s*([0-9a-fA-F]{64})\b", note.read_text(encoding="utf-8", errors="replace"))):
        sys.exit(f"{note}: holds no SHA-256; remove it, or write down what it has to be")
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
        sys.exit(f"FAIRSEQ_WHEEL={given}: behind # stands sha256= and 64 hexadecimal digits")
    (right, who), found = expected(file, wanted), sha256(file)
    if right and right != found:
        sys.exit(
            f"FAIRSEQ_WHEEL={name}: its SHA-256 is {found}, but {who} has {right}: it is another file, do not use it"
        )
    if file.resolve().parent != folder.resolve():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        shutil.copyfile(file, folder / file.name)
    if not right:
        print(f"Nobody says what the SHA-256 of {file.name} has to be. It is {found}", file=sys.stderr)


def note(folder: Path) -> None:
    for wheel in folder.glob(f"{NAME}-*.whl"):
        wheel.with_name(f"{wheel.name}.sha256").write_text(f"{sha256(wheel)}  {wheel.name}\n", encoding="utf-8")


if __name__ == "__main__":
    what, *words = sys.argv[1:]
    take(words[0], Path(words[1])) if what == "take" else note(Path(words[0]))
