"""Divides cased text into sentences by spaCy, and mends what its rule-based sentencizer gets wrong in English.

Appendix A of the LazyFormer paper segments by spaCy. It must see the text before it is lower-cased.
"""

import importlib
import re
import sys
from collections.abc import Iterator
from functools import cache, lru_cache
from types import ModuleType
from typing import NamedTuple, Optional

from datatrove.data import Document

from lazyformer_fairseq.corpus.measures import has_words
from lazyformer_fairseq.corpus.sentences.english import mend
from lazyformer_fairseq.corpus.step import DocumentStep
from lazyformer_fairseq.errors import UserError

# All final marks, and distant letters too: the class of these marks alone is 10 times slower to search.
PERHAPS_FINAL = re.compile("[.?!\\u0589-\\u1fff\\u203c-\\U0010ffff]")
ODD_SPACE = re.compile(r"[^\S ]")
PLAIN_END = re.compile(r"([A-Z]?[a-z]{3,}|[0-9]+)[.?!][\"”)]?")  # spaCy divides it into these, but for exceptions
KNOWN_CHUNKS = 1 << 16  # spaCy's answers for so many chunks are kept; bounds the memory, spaCy's own too
LONGEST_CHUNK = 1000  # characters; spaCy's tokenizer takes quadratic time for what has no space
AFFIXES = frozenset("\"'“”‘’()[]{},;")


def load_spacy(with_torch: bool = False) -> ModuleType:
    """spaCy, imported without torch where only rules are wanted.

    spaCy imports torch wherever it is installed: two seconds and 300 MB for each process, and its rules have no use for
    it. A module that ``sys.modules`` has as None is one that spaCy does not find.
    """
    if with_torch or "torch" in sys.modules:
        return importlib.import_module("spacy")
    sys.modules["torch"] = None
    try:
        return importlib.import_module("spacy")
    finally:
        del sys.modules["torch"]


@cache
def final_marks() -> frozenset[str]:
    """The sentencizer's."""
    load_spacy()
    return frozenset(importlib.import_module("spacy.pipeline.sentencizer").Sentencizer.default_punct_chars)


class SentenceSplitter:
    """Callable: a paragraph of cased text -> its sentences, in order, stripped; no character but space is lost.

    Args:
        spacy_model: name of an installed spaCy pipeline that sets sentence boundaries (``en_core_web_sm``);
            None for the rules, which need no trained model and are far faster.

    Raises:
        UserError: ``spacy_model`` is not installed, or finds no sentences.
    """

    def __init__(self, spacy_model: Optional[str] = None):
        self._trained = None
        if spacy_model is None:
            self._rules = QuickSentencizer()
        else:
            try:
                self._trained = load_spacy(with_torch=True).load(spacy_model)
            except OSError:
                raise UserError(
                    f"spaCy model {spacy_model!r}: not installed; `python -m spacy download {spacy_model}`"
                ) from None
            if not self._trained("A word.").has_annotation("SENT_START"):
                raise UserError(f"spaCy model {spacy_model!r}: has no parser, senter or sentencizer; choose another")

    def __call__(self, paragraph: str) -> list[str]:
        starts = [0, *self._starts(paragraph)]
        sentences = (paragraph[start:end].strip() for start, end in zip(starts, [*starts[1:], None], strict=False))
        return [sentence for sentence in sentences if sentence]

    def _starts(self, paragraph: str) -> Iterator[int]:
        if self._trained is None:
            return mend(paragraph, self._rules, self._rules.exceptions)
        with self._trained.memory_zone():  # else its vocabulary grows with every new word
            return iter([sentence.start_char for sentence in self._trained(paragraph).sents][1:])


class Chunk(NamedTuple):
    """The sentencizer's view of a chunk, the text between two spaces. Places count from the chunk's start.

    Attributes:
        first_word: where the first token begins that is no punctuation; None where there is none.
        starts: where sentences start inside the chunk, for the final marks that are inside it too.
        is_open: the chunk ends in a final mark and perhaps more punctuation: the next word starts a sentence.
    """

    first_word: Optional[int]
    starts: tuple[int, ...]
    is_open: bool


PLAIN_CHUNK = Chunk(0, (), True)


class QuickSentencizer:
    """Callable: text -> where its sentences start, exactly as spaCy's ``sentencizer`` on ``spacy.blank("en")`` has it.

    spaCy's tokenizer works on each chunk between spaces alone, and its sentencizer looks for a final mark and the next
    token that is no punctuation. So only chunks with a final mark (and those after it, up to a word) need the
    tokenizer, and most of these have occurred before. One spaCy rule reaches over spaces: its emoticons and
    abbreviations are also searched for in the tokens of the whole text; where that could matter, spaCy itself reads it.

    A chunk of more than ``LONGEST_CHUNK`` characters is not text; it counts as one word, unlike in spaCy.
    """

    def __init__(self):
        self._start_afresh()

    def _start_afresh(self) -> None:
        self._final_marks = final_marks()
        self._spacy = load_spacy().blank("en")
        self._spacy.add_pipe("sentencizer")
        self._spacy.max_length = 1 << 31  # the default guards trained models' memory
        of_words = self._spacy.vocab.lex_attr_getters  # what it finds out about each new word; we ask for one thing
        for attribute in of_words.keys() - {importlib.import_module("spacy.attrs").IS_PUNCT}:
            del of_words[attribute]
        self.exceptions = frozenset(self._spacy.tokenizer.rules)
        self._reaching = {text for text in self.exceptions if len(text) > 1 and not text.replace("'", "").isalpha()}
        self._chunks: dict[str, Chunk] = {}

    def __call__(self, text: str) -> list[int]:
        try:
            return list(self._starts(text))
        except _NeedsSpacy:
            return [sentence.start_char for sentence in self._spacy(text).sents]

    def _starts(self, text: str) -> Iterator[int]:
        if text:
            yield 0
        spaced = ODD_SPACE.sub(" ", text) if ODD_SPACE.search(text) else text
        last, position = 0, 0
        while mark := PERHAPS_FINAL.search(text, position):
            begin = max(position, spaced.rfind(" ", position, mark.start()) + 1)
            end = spaced.find(" ", mark.end())
            end = len(text) if end < 0 else end
            chunk = self._chunk(text[begin:end])
            for start in chunk.starts:
                if begin + start > last:
                    yield begin + start
                    last = begin + start
            position = end
            if chunk.is_open:
                start, position = self._next_word(text, spaced, end)
                if start is not None:
                    yield start
                    last = start

    def _next_word(self, text: str, spaced: str, position: int) -> tuple[Optional[int], int]:
        """(start of the first token that is not punctuation, from ``position``, a space, on; where to continue)."""
        while position < len(text):
            if text[position] == " ":  # a single space is no token; all else between two chunks is
                position += 1
                if position == len(text):
                    break
            letter = text[position]
            if letter.isalnum() or letter.isspace():
                return position, position
            end = spaced.find(" ", position)
            end = len(text) if end < 0 else end
            first_word = self._chunk(text[position:end]).first_word
            if first_word is not None:
                return position + first_word, position
            position = end
        return None, position

    def _chunk(self, text: str) -> Chunk:
        chunk = self._chunks.get(text)
        if chunk is None:
            plain = PLAIN_END.fullmatch(text)
            if plain and plain[1] not in self.exceptions and plain[1] + "." not in self.exceptions:
                return PLAIN_CHUNK
            if len(text) > LONGEST_CHUNK:
                return Chunk(0, (), text[-1] in self._final_marks)
            if len(self._chunks) == KNOWN_CHUNKS:
                self._start_afresh()
            chunk = self._chunks[text] = self._read_chunk(text)
        return chunk

    def _read_chunk(self, text: str) -> Chunk:
        first_word, starts, is_open = None, [], False
        for token in self._spacy.tokenizer(text):
            if token.text in self._reaching and not _stands_alone(text, token.idx, len(token)):
                raise _NeedsSpacy
            is_final = token.text in self._final_marks
            if not is_final and not token.is_punct:
                first_word = token.idx if first_word is None else first_word
                if is_open:
                    starts.append(token.idx)
                is_open = False
            is_open = is_open or is_final
        return Chunk(first_word, tuple(starts), is_open)


class _NeedsSpacy(Exception):
    """Neighbours beyond a space may change how spaCy divides this chunk."""


def _stands_alone(chunk: str, start: int, length: int) -> bool:
    """Whether nothing but quotes and the like surrounds these characters, so that spaCy takes them off one by one."""
    return AFFIXES.issuperset(chunk[:start]) and AFFIXES.issuperset(chunk[start + length :])


class SplitSentences(DocumentStep):
    """Text of one paragraph a line -> one cased sentence a line; short sentences are joined to a neighbour.

    "Concatenate short sequences" (appendix A of the LazyFormer paper): a sentence of fewer than ``min_words`` goes to
    the one before it in its paragraph, else to the next one (of a later paragraph too); at the document's end, to the
    one before. Never across documents.

    Its statistics: ``sentences`` passed on, ``short sentences joined``. Drops documents with ``no sentence`` left.

    Args:
        spacy_model: see :class:`SentenceSplitter`.
        min_words: words (between spaces) that a sentence has at least, unless its document has fewer; 0: no joining.

    Raises:
        UserError: with the first document: ``spacy_model`` is not installed.
    """

    name = "sentences"

    def __init__(self, spacy_model: Optional[str] = None, min_words: int = 4):
        super().__init__()
        self.spacy_model = spacy_model
        self.min_words = min_words

    def process(self, document: Document) -> Optional[str]:
        split = load_splitter(self.spacy_model)
        paragraphs = [split(paragraph) for paragraph in document.text.split("\n")]
        sentences = join_short(paragraphs, self.min_words)
        if not sentences:
            return "no sentence"
        self.stat_update("sentences", value=len(sentences))
        joined = sum(map(len, paragraphs)) - len(sentences)
        if joined:
            self.stat_update("short sentences joined", value=joined)
        document.text = "\n".join(sentences)
        return None


load_splitter = lru_cache(maxsize=1)(SentenceSplitter)  # once per process, for any number of units


def join_short(paragraphs: list[list[str]], min_words: int) -> list[str]:
    """The sentences of all paragraphs, in order; one of fewer than ``min_words`` words is joined to a neighbour."""
    sentences: list[str] = []
    waiting = ""  # short ones at the beginning of a paragraph: a number, a heading, "No."
    for paragraph in paragraphs:
        has_sentence = False
        for sentence in paragraph:
            sentence = f"{waiting} {sentence}" if waiting else sentence
            waiting = ""
            if has_words(sentence, min_words):
                sentences.append(sentence)
                has_sentence = True
            elif has_sentence:
                sentences[-1] += f" {sentence}"
            else:
                waiting = sentence
    if waiting and sentences:
        sentences[-1] += f" {waiting}"
    elif waiting:
        sentences.append(waiting)
    return sentences
