"""Records of steps that are done, and what a page's tables say."""

from pathlib import Path


def record(out: Path, *names: str) -> None:
    (out / "steps").mkdir(parents=True, exist_ok=True)
    for name in names:
        (out / "steps" / f"{name}.json").write_text('{"command": "", "ended": "", "seconds": 1800}')


def rows_of(page: str, start: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith(start)]
