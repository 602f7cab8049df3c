"""Cleans documents line by line (a line is a paragraph), and drops the lines and documents that are not prose."""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from typing import Optional

from datatrove.data import Document

from lazyformer_fairseq.corpus.cleaning.rules import HALVES, INVISIBLE, UNDECODABLE, Rule, rules_for
from lazyformer_fairseq.corpus.measures import has_words, length_in_letters
from lazyformer_fairseq.corpus.step import DocumentStep

PASSES = 8  # markup nested deeper than this is not prose
MOST_UNDECODABLE = 0.1  # share of a line's characters
ENDS_A_SENTENCE = re.compile(r"""[.!?…。！？।؟][ "'”’»)\]*_-]*$""")
FEW = 5  # signs, which even the shortest line may have: "No!"
LETTER = re.compile(r"[^\W\d_]")
TABLE = re.compile(r"\{\||\||\!\s.*\!\!")
# Deleting these bytes of UTF-8 leaves ASCII's digits and signs; every character outside ASCII counts as a letter.
LETTERS_AND_SPACE = bytes(c for c in range(256) if c >= 128 or chr(c).isalpha() or c == 32)
SENTENCE_END_OR_SPACE = (re.compile(r".*[.!?][\"'”’)\]]* |.*[。！？।]", re.DOTALL), re.compile(r".* ", re.DOTALL))


class CleanText(DocumentStep):
    """Text of one paragraph a line -> the same without markup, odd characters and spaces, with links as ``<url>`` etc.

    The rules run on each line until none changes it, so cleaning a text again changes nothing. Unicode
    becomes NFC, one spelling for what looks the same; not NFKC, which would make 102 of 10². Statistics: ``lines in`` =
    ``lines out`` + the sum of all ``lines dropped: REASON``; ``replaced: <url>``, ``removed: tags`` ... count places.

    Args:
        min_line_words: a line with fewer words is dropped unless it ends like a sentence: a title, a caption, an item.
        min_line_letters: share of letters and spaces among a line's characters.
        min_document_characters: a document that keeps less is dropped as too short; one that lost more than half
            of its characters in lines of few letters is dropped for that.
        max_line_characters: a longer line is divided, after the last sentence that fits, or at a space, and its parts
            count as lines. One without any such place is dropped.

    Words and characters are counted as ``measures.py`` does, so that they fit the script.
    """

    name = "clean"

    def __init__(
        self,
        min_line_words: int = 5,
        min_line_letters: float = 0.5,
        min_document_characters: int = 100,
        max_line_characters: int = 100_000,
    ):
        super().__init__()
        self.min_line_words, self.min_line_letters = min_line_words, min_line_letters
        self.min_document_characters, self.max_line_characters = min_document_characters, max_line_characters

    def process(self, document: Document) -> Optional[str]:
        counts: Counter[str] = Counter()
        kept, characters, characters_of_few_letters = [], 0, 0
        paragraphs = document.text.split("\n")
        for line in chain.from_iterable(divided(paragraph, self.max_line_characters) for paragraph in paragraphs):
            line, reason = self._cleaned(line, counts)
            characters += len(line)
            counts["lines in"] += 1
            if reason is None:
                kept.append(line)
                continue
            counts[f"lines dropped: {reason}"] += 1
            if reason == "few letters":
                characters_of_few_letters += len(line)
        counts["lines out"] = len(kept)
        document.text = "\n".join(kept)
        for label, number in counts.items():
            self.stat_update(label, value=number)
        if characters_of_few_letters > characters / 2:
            return "few letters"
        return "too short" if length_in_letters(document.text) < self.min_document_characters else None

    def _cleaned(self, line: str, counts: Counter[str]) -> tuple[str, Optional[str]]:
        """The clean line, and the reason to drop it or None."""
        if UNDECODABLE in line and line.count(UNDECODABLE) > MOST_UNDECODABLE * len(line):
            return line, "undecodable"
        line = clean_characters(line, counts)
        for _ in range(PASSES):
            before, line = line, replace_once(line, counts)
            if line == before:
                return line, self._reason_to_drop(line)
        return line, "endless markup"

    def _reason_to_drop(self, line: str) -> Optional[str]:
        if not line:
            return "empty"
        if len(line) > self.max_line_characters:
            return "too long"
        if line.startswith("==") and line.endswith("=="):
            return "heading"
        if TABLE.match(line):
            return "table"
        others = len(line.encode().translate(None, LETTERS_AND_SPACE))
        if others > max(FEW, (1 - self.min_line_letters) * len(line)) or not LETTER.search(line):
            return "few letters"
        if not has_words(line, self.min_line_words) and not ENDS_A_SENTENCE.search(line[-16:]):
            return "short, not a sentence"
        return None


def clean_characters(line: str, counts: Counter[str]) -> str:
    """The line without invisible characters, in NFC, with single spaces."""
    if UNDECODABLE in line:
        counts["removed: undecodable characters"] += line.count(UNDECODABLE)
        line = line.replace(UNDECODABLE, "")
    if not line.isprintable():
        line, number = INVISIBLE.subn("", line)
        if number:
            counts["removed: invisible characters"] += number
    if not line.isascii() and not unicodedata.is_normalized("NFC", line):
        line = unicodedata.normalize("NFC", line)
        counts["replaced: lines not in NFC"] += 1
    if "  " in line or not line.isprintable() or line[:1] == " " or line[-1:] == " ":
        line = " ".join(line.split())
    return line


def replace_once(line: str, counts: Counter[str]) -> str:
    """One pass of the rules over a line of clean characters."""
    before = line
    for rule in rules_for(line):
        line = _replace(rule, line, counts)
    if line == before:
        for rule in HALVES:
            line = _replace(rule, line, counts)
    return line if line == before else clean_characters(line, counts)


def _replace(rule: Rule, line: str, counts: Counter[str]) -> str:
    if not rule.applies(line):
        return line
    replaced, number = rule.pattern.subn(rule.replacement, line)
    if replaced != line:
        counts[f"{'replaced' if rule.label.startswith('<') else 'removed'}: {rule.label}"] += number
    return replaced


def divided(line: str, most: int) -> Iterator[str]:
    """Parts of at most ``most`` characters, cut after a sentence or at a space; whole if there is neither."""
    start = 0
    while len(line) - start > most:
        for place in SENTENCE_END_OR_SPACE:
            cut = place.match(line, start, start + most)
            if cut:
                break
        else:
            break
        yield line[start : cut.end()]
        start = cut.end()
    yield line[start:]
