"""SQuAD in miniature: files of the official layout, in which a tiny model can learn to answer."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from helpers import NAMES, ROOT, THINGS

START = ROOT / "tests" / "fixtures" / "checkpoints" / "m2x2" / "checkpoint_last.pt"  # it has 64 positions
SIZES = ("--max-length", "64")
SIX = ("Anna", "Otto", "Maria", "Peter", "Clara", "Emil")
FIVE = ("garden", "river", "house", "tower", "bridge")


def article(title: str, *paragraphs: tuple[str, Sequence[tuple[str, str]]]) -> dict[str, Any]:
    """An article of contexts, each with questions and their answers, which stand where the context first has them."""
    return {
        "title": title,
        "paragraphs": [
            {
                "context": context,
                "qas": [
                    {
                        "id": f"{title}-{number}-{place}",
                        "question": question,
                        "answers": [{"text": answer, "answer_start": context.index(answer)}],
                    }
                    for place, (question, answer) in enumerate(questions)
                ],
            }
            for number, (context, questions) in enumerate(paragraphs)
        ],
    }


def write_squad(path: Path, *articles: dict[str, Any], version: str = "1.1") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"version": version, "data": articles}), encoding="utf-8")
    return path


def write_toy_squad(folder: Path, train: int = 60, valid: int = 12) -> Path:
    """Both files: who sees, and what? A name of the context, or a thing. Returns the folder."""

    def paragraph(number: int) -> tuple[str, list[tuple[str, str]]]:
        name, thing = NAMES[number % len(NAMES)].title(), THINGS[number % 7]
        return f"{name} sees the {thing}!", [("Who sees?", name), ("Sees what?", thing)]

    write_squad(folder / "train-v1.1.json", article("Walks", *map(paragraph, range(train))))
    write_squad(folder / "dev-v1.1.json", article("Finds", *map(paragraph, range(train, train + valid))))
    return folder


def toy_article(number: int) -> dict:
    """Who sees what: two paragraphs of three questions."""
    paragraphs = []
    for part in range(2):
        pairs = [(SIX[(number + part + place) % 6], FIVE[(number + place) % 5]) for place in range(3)]
        context = " ".join(f"{name} sees the {thing}." for name, thing in pairs)
        paragraphs.append((context, [(f"Who sees the {thing}?", name) for name, thing in pairs]))
    return article(f"Article {number}", *paragraphs)


def write_articles(folder: Path, train: int = 8, dev: int = 2) -> Path:
    """A folder as the official download: articles to train on, and others to validate on. Returns `folder`."""
    write_squad(folder / "train-v1.1.json", *map(toy_article, range(train)))
    write_squad(folder / "dev-v1.1.json", *map(toy_article, range(train, train + dev)))
    return folder
