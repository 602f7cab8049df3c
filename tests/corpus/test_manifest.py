"""The report: what it says, that it needs nothing else, and that no text of the corpus gets out of its place."""

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from lazyformer_fairseq.corpus.manifest import write_report


def made_manifest() -> dict[str, Any]:
    split = {"sentences": 120_000, "words": 1_987_654, "tokens": 2_345_678, "unknown_share": 0.0123}
    split |= {"frequencies_bits": 9.5}
    return {
        "format_version": 1,
        "settings": {"vocab_size": 32_768, "spacy_model": None, "text": {"lower_case": True}},
        "inputs": [
            {"path": "raw/wiki.xml.bz2", "format": "mediawiki", "bytes": 5e6, "sha256": "ab" * 32, "documents": 90},
            {"path": "raw/books/a.txt", "format": "book", "bytes": 700, "sha256": "cd" * 32, "documents": 10},
        ],
        "documents": {"in": 100, "train": 80, "valid": 5, "dropped": {"duplicate": 9, "few letters": 6, "unused": 0}},
        "steps": [
            {"name": "read", "dropped": {}, "counts": {"files": 2}},
            {"name": "clean text", "documents in": 100, "documents out": 94, "characters in": 4000,
             "characters out": 3000, "dropped": {"few letters": 6}, "counts": {"<url>": 17}},
        ],
        "dropped_names": {"duplicate": ["raw/books/a.txt:1"], "bad file": ["raw/b.txt: ends early"]},
        "examples": {"clean text": [["see http://a.org now", "see <url> now"]], "no change": []},
        "vocabulary": {"words": 1000, "kept_words": 800, "min_count": 3, "dropped_types_share": 0.2,
                       "dropped_tokens_share": 0.004, "size": 32_768},
        "train": split,
        "valid": {"sentences": 0, "words": 0, "tokens": 0, "unknown_share": None, "frequencies_bits": None,
                  "neighbours_bits": None},
        "shards": 2,
        "versions": {"python": "3.11.2"},
        "timing": {
            "workers": 2, "seconds": 61.0, "megabytes": 5.0,
            "stages": [{"name": "words", "seconds": 60.0, "tasks": 8}],
        },
    }  # fmt: skip


def page_of(manifest: dict[str, Any], folder: Path) -> str:
    write_report(json.loads(json.dumps(manifest)), folder / "report.html")
    return (folder / "report.html").read_text(encoding="utf-8")


def tags_of(page: str) -> list[str]:
    return re.findall(r"</?[a-z][a-z0-9]*", page)


def text_of(page: str) -> str:
    return " ".join(unescape(re.sub(r"<style>.*?</style>|<[^>]*>", " ", page, flags=re.DOTALL)).split())


def test_it_says_what_the_manifest_knows_needs_nothing_else_and_runs_nothing(tmp_path):
    page = page_of(made_manifest(), tmp_path)
    for words in (
        "5.0 MB in 2 files, 2 shards",
        "100 documents = 80 train + 5 valid + 15 dropped.",
        "15 documents dropped (15%)",
        "2.35 M tokens",
        "1.2% of training tokens unknown",
        "61 s with 2 workers",
        "raw/wiki.xml.bz2 mediawiki 5.0 MB 90 abababababab",
        "clean text 100 94 few letters 6 4,000 → 3,000 75% <url> 17",
        "read – – – – files 2",
        "duplicate 9 9% raw/books/a.txt:1",
        "bad file – – raw/b.txt: ends early",
        "200 of them (20%) occur fewer than 3 times and become <unk>. They make up 0.4% of the running text",
        "train 80 120,000 1,987,654 2,345,678 1.2% 9.50",
        "valid: empty 5 0 0 0 – –",
        "words 8 60 s",
        "see http://a.org now see <url> now",
        "text.lower_case True",
        "python 3.11.2",
    ):
        assert words in text_of(page), words
    assert "unused" not in page and "no change" not in page
    assert not {"<script", "<link", "<iframe", "<a", "<object"} & set(tags_of(page)) and "url(" not in page
    assert not re.search(r"<[^>]*\s(on\w+|href|src)=", page)


hostile = st.text(
    st.one_of(st.sampled_from("<>&\"'$\\{}\n\u202e\ud800\x00 ab"), st.characters(exclude_categories=())), max_size=40
)


def test_no_text_gets_out_of_its_place(tmp_path):
    def tags(name: str, before: str, after: str) -> list[str]:
        manifest = made_manifest()
        manifest["inputs"][0]["path"] = name
        manifest["dropped_names"] = {name: [name]}
        manifest["steps"][1] |= {"name": name, "dropped": {name: 6}, "counts": {name: 1}}
        manifest["examples"] = {name: [[before, after]]}
        manifest["settings"]["text"] = {name: name}
        return tags_of(page_of(manifest, tmp_path))

    harmless = tags("name", "before", "after")

    @settings(max_examples=12)
    @given(hostile, hostile, hostile)
    def try_some(name, before, after):
        assert tags(name, before, after) == harmless

    try_some()
