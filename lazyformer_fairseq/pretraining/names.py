"""What a user may name on the line of a launch: archs, YAML files, options of fairseq-train."""

from collections.abc import Iterable
from pathlib import Path

from lazyformer_fairseq.errors import UserError, nearest

PACKAGE_FOLDER = Path(__file__).absolute().parents[1]
CONFIGS = next(path / "configs" for path in (PACKAGE_FOLDER, PACKAGE_FOLDER.parent) if (path / "configs").is_dir())
OWN = {  # what a launch decides: given a second time, it would no longer be true
    "--user-dir": "leave it out: this command brings its own",
    "--distributed-world-size": "give --gpus and --nodes",
    "--update-freq": "it is worked out; give the size of an update, or run fairseq-train yourself",
    "--max-tokens": "give --batch-size, in sequences, or run fairseq-train yourself",
}


def refuse_own(given: tuple[str, ...]) -> None:
    """Raises a UserError for an option of fairseq-train that a launch decides."""
    for word in given:
        if advice := OWN.get(word.partition("=")[0]):
            raise UserError(f"{word.partition('=')[0]}: {advice}")


def refuse_unknown_arch(name: str, known: Iterable[str]) -> None:
    """Raises a UserError, with the nearest names."""
    if name not in known:
        raise UserError(f"{name}: no such arch{nearest(name, known)}")


def find_config(name: str, kind: str) -> Path:
    """A user's YAML file, else the one of that name that comes with this package, of ``configs/KIND``.

    Raises:
        UserError: there is none; with the nearest names.
    """
    folder = CONFIGS / kind
    for path in (Path(name), folder / name):
        if path.is_file():
            return path
    known = [path.name for path in folder.glob("*.yaml")]
    raise UserError(f"{name}: no such file, here or in {folder}{nearest(Path(name).name, known)}")
