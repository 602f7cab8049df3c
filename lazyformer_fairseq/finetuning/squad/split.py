"""A file is split by articles: every so many-th becomes the development set, so that no article is in both."""

import json
from pathlib import Path

from lazyformer_fairseq.data.squad.official import SPLITS
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.storage.atomic import atomic_folder, write_text
from lazyformer_fairseq.storage.hashes import sha256_of
from lazyformer_fairseq.storage.json_files import read_json, write_json

FORMAT = "lazyformer squad split"
MANIFEST = "split.json"
SETTINGS = ("format", "sha256", "every")  # fields of the manifest that decide the files


def split_by_articles(source: Path, every: int, folder: Path) -> Path:
    """Writes two official files, or reuses them: articles number `every`, 2 `every`, ... go to the second.

    There is no chance in it, so the same file gives the same split everywhere; the manifest names the articles.

    Args:
        every: 2 at least.
        folder: to write; it holds the files by their official names, and ``split.json``.

    Raises:
        UserError: no such file, another layout, fewer articles than `every`, or `folder` holds another split.
    """
    content = read_json(source, "give the official file, as train-v1.1.json")
    articles = content.get("data")
    if not isinstance(articles, list) or len(articles) < every:
        found = f"{len(articles)} articles" if isinstance(articles, list) else "no list 'data' of articles"
        raise UserError(f"{source}: has {found}, so that every {every}th cannot be held out (--dev-articles {every})")
    held_out = articles[every - 1 :: every]
    trained = [article for number, article in enumerate(articles, start=1) if number % every]
    manifest = {
        "format": FORMAT,
        "source": str(source),
        "sha256": sha256_of(source),
        "every": every,
        "train_articles": list(map(_title, trained)),
        "dev_articles": list(map(_title, held_out)),
    }
    if folder.exists():
        _refuse_other(folder, manifest)
        return folder
    with atomic_folder(folder) as unfinished:
        for file, part in zip(SPLITS.values(), (trained, held_out), strict=True):
            write_text(unfinished / file, json.dumps({**content, "data": part}, ensure_ascii=False))
        write_json(unfinished / MANIFEST, manifest)
    return folder


def _title(article: object) -> str:
    title = article.get("title") if isinstance(article, dict) else None
    return title if isinstance(title, str) else "untitled"


def _refuse_other(folder: Path, wanted: dict) -> None:
    there = read_json(folder / MANIFEST, f"remove {folder}, or give another --output")
    different = [name for name in SETTINGS if there.get(name) != wanted[name]]
    missing = [file for file in SPLITS.values() if not (folder / file).is_file()]
    if different or missing:
        raise UserError(
            f"{folder}: holds another split (other {' and '.join(different or missing)}); remove it, or give another "
            "--output"
        )
