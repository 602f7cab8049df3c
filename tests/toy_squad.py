"""Made files of SQuAD's official layout."""

import json
from pathlib import Path

NAMES = ("Anna", "Otto", "Maria", "Peter", "Clara", "Emil")
THINGS = ("garden", "river", "house", "tower", "bridge")


def toy_article(number: int) -> dict:
    """Who sees what, in two paragraphs; each question has the place of the name that answers it."""
    paragraphs = []
    for part in range(2):
        pairs = [(NAMES[(number + part + place) % 6], THINGS[(number + place) % 5]) for place in range(3)]
        context = " ".join(f"{name} sees the {thing}." for name, thing in pairs)
        questions = [
            {
                "id": f"{number}-{part}-{place}",
                "question": f"Who sees the {thing}?",
                "answers": [{"text": name, "answer_start": context.index(f"{name} sees the {thing}")}],
            }
            for place, (name, thing) in enumerate(pairs)
        ]
        paragraphs.append({"context": context, "qas": questions})
    return {"title": f"Article {number}", "paragraphs": paragraphs}


def write_squad(path: Path, articles: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"version": "1.1", "data": articles}))
    return path


def write_toy_squad(folder: Path, train: int = 8, dev: int = 2) -> Path:
    """A folder as the official download: articles to train on, and others to validate on. Returns `folder`."""
    write_squad(folder / "train-v1.1.json", [toy_article(number) for number in range(train)])
    write_squad(folder / "dev-v1.1.json", [toy_article(number) for number in range(train, train + dev)])
    return folder
