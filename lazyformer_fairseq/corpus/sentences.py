"""Divides cased text into sentences by spaCy, and mends what its rule-based sentencizer gets wrong in English.

Appendix A of the LazyFormer paper segments by spaCy. It must see the text before it is lower-cased.

The rules for English come first: :func:`mend` checks, for every final mark before a space, in this order: the next
letter, which mark it is, and the word before the mark, which may be an abbreviation. Where no rule here decides, the
sentencizer's answer stands. ``tests/corpus/sentence_gold.txt`` measures the rules.
"""

import importlib
import re
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import NamedTuple, Optional

from lazyformer_fairseq.corpus.steps import Document, DocumentStep, has_words
from lazyformer_fairseq.errors import UserError

# A final mark, the rest of its marks (closing quotes, a dash, a footnote's number) and then space.
END = re.compile(r"[.?!…\u0589-\u1fff\u203c-\U0010ffff](?<!\w)(?:(?!\[\w)[^\w\s]|_){0,30}+(?:\[\w{1,3}\]){0,9}+(?=\s)")
SPACE = re.compile(r"\s+")
LONE_MARKS = re.compile(r"(?:[^\w\s]|_){1,30}(?=\s)")
MARKS = re.compile(r"(?:[^\w\s]|_|\s){0,30}")
CLOSING = frozenset(")]}”’»")
NEVER_FIRST = frozenset("&,;:/%+=.?!…)]}”»|")  # no sentence begins with one of these
LONGEST_WORD = 40  # characters looked at before a final mark

# With a name after it: never an end.
TITLES = frozenset(
    """Mr Mrs Ms Messrs Mme Mlle M Dr Prof Ste Mt Ft Gen Col Lt Maj Capt Cpt Cmdr Cdr Sgt Cpl Pvt Adm Rev Hon Sen Rep
    Gov Pres Supt Insp Fr Atty Dep Asst Brig Ven Pte vs v cf viz e.g i.e E.g I.e Cf approx Approx ca est resp
    esp incl Proc Natl Acad Sci Biol Chem Phys Univ Dept""".split()
)
# With a number after it: never an end.
BEFORE_NUMBERS = frozenset(
    """No Nos no nos Fig Figs fig figs Eq Eqs eq Sec Secs sec Sect Vol Vols vol vols Ch Chs ch Chap chap Art Arts art p
    pp P Pp Op op fol ff ll vv Bk bk Pt pt Tab Temp Pop Alt Max Min Rs Ps Ex ex Cor Rom Matt Gal Heb Lev Deut""".split()
)
MONTHS = frozenset("Jan Feb Mar Apr Jun Jul Aug Sep Sept Oct Nov Dec".split())
# Perhaps an end: one if the next word likes to begin a sentence.
UNSURE = frozenset(
    """Inc Ltd Co Corp Bros Plc plc Cos Jr Sr jr sr al seq Ave Rd Blvd Bldg Esq Ala Ariz Ark Calif Colo Conn Del Fla Ga
    Ill Ind Kan Ky La Mass Md Me Mich Minn Miss Mo Mont Neb Nev Okla Ore Pa Penn Tenn Tex Va Vt Wash Wis Wyo Mon
    Tue Tues Wed Thu Thurs Fri Sat Sun St MS Dist Div ed eds trans repr Ed Eds a b c d e f g h i j k l m n o p q
    r s t u v w x y z a.m p.m A.M P.M Ph.D""".split()
)
FIRST_WORDS = frozenset(
    """A About After Again All Also Although Among An And Another Any Anyone Are As At Because Before Being Besides
    Both But By Can Could Critics Despite Did Do Does During Each Eight Either Even Eventually Every Everyone
    Few Finally First Five For Former Four From Further Furthermore Had Has Have He Hence Her Here Hers His How
    However I If In Indeed Instead Into Is It Its Last Later Let Like Many May Maybe Meanwhile More Moreover
    Most Much My Neither Never Nevertheless Next Nine No Nobody None Nor Not Nothing Now Of Often On Once One
    Only Or Other Others Our Out Over People Perhaps Seven Several She Should Similarly Since Six So Some
    Sometimes Soon Still Subsequently Such Ten Than That The Their Them Then There Therefore These They This
    Those Though Three Through Throughout Thus To Today Together Too Two Under Unlike Until Upon Us Was We Were
    What When Whenever Where Whether Which While Who Whose Why Will With Within Without Would Yes Yet You
    Your""".split()
)
AFTER_HOURS = re.compile(
    r"(?:[A-Z]{2,4}|(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day)\b|(?:Eastern|Pacific|Central) \W{0,30}\w"
)
DOTTED = re.compile(r"(?:[^\W\d_]{1,2}\.)+-?[^\W\d_]")  # U.S, p.m, J.R.R, J.-P without their last mark
LIST_NUMBER = re.compile(r"\W{0,3}(?:\d{1,3}|[A-Za-z]|[IVXLC]{1,6})\.")
LETTERS = re.compile(r"[^\W\d_]*")
ROMAN_OR_NUMBER = re.compile(r"[\d(#]|[IVXLC]+\b")
SAID = re.compile(
    r"""(?:(?:[A-Z][\w.'’-]*\s){1,3}|(?:[Tt]he|[Mm]y|[Hh]is|[Hh]er)\s(?:[\w'’-]+\s){1,2})(?:\w+ly\s)?
    (?:said|asked|cried|replied|answered|exclaimed|whispered|shouted|called|added|demanded|inquired|enquired|repeated|began
    |murmured|muttered|returned|continued|screamed|sighed|laughed|thought|wondered|observed|remarked|told|yelled|growled)\b""",
    re.VERBOSE,
)


def mend(text: str, starts_of: Callable[[str], Sequence[int]]) -> Iterator[int]:
    """Yield the places in a cased ``text`` where sentences start, but for the first, in order, each after a space.

    Args:
        text: a cased paragraph.
        starts_of: the sentencizer: text -> where it starts sentences, the first word (or sign) of each, ascending.
    """
    quotes = _Quotes(text)
    sentence = 0
    starts: Optional[Sequence[int]] = None
    for mark in END.finditer(text):
        if mark.start() < sentence:
            continue
        cut, word = _next(text, mark.end(), quotes)
        if word == len(text):
            return
        is_end = _opinion(text, sentence, mark, cut, word)
        if is_end is None:
            if starts is None:
                starts = starts_of(text)
            after = bisect_right(starts, mark.start())
            is_end = after < len(starts) and starts[after] <= word
        if is_end:
            yield cut
            sentence = cut


class _Quotes:
    """Tells the opening from the closing ones among straight quotes that have space on both sides, as in WikiText."""

    def __init__(self, text: str):
        self._text = text
        self._counted = 0
        self._is_open = False

    def closes(self, place: int) -> bool:
        """Return whether the quote at ``place`` closes what another has opened. Places ascend from call to call."""
        self._is_open ^= self._text.count('"', self._counted, place) % 2 == 1
        self._counted = place
        return self._is_open


def _next(text: str, end: int, quotes: _Quotes) -> tuple[int, int]:
    """Return (where the next sentence would start, if one does; where its first word does, past opening marks).

    Closing marks that stand alone stay with the sentence before.
    """
    position = SPACE.match(text, end).end()
    while lone := LONE_MARKS.match(text, position):
        marks = lone[0]
        closes = CLOSING.issuperset(marks) or (marks == '"' and quotes.closes(position)) or marks in ("''", "'")
        if not closes:
            break
        position = SPACE.match(text, lone.end()).end()
    return position, MARKS.match(text, position).end()


def _opinion(  # noqa: PLR0911  (a list of rules)
    text: str,
    sentence: int,
    mark: re.Match,
    cut: int,
    word: int,
) -> Optional[bool]:
    """Return whether the sentence from ``sentence`` on ends at ``mark``; None: the sentencizer decides."""
    letter = text[word]
    marks = mark[0]
    if text[cut] in NEVER_FIRST or marks[-1] in ",;:":
        return False
    is_special_token = text[word - 1] == "<"  # <url> has no case
    if letter.islower() and not is_special_token and not text[word + 1 : word + 2].isupper():  # iPod may be first
        first = MARKS.match(text, sentence).end()
        # a text without capitals has sentences too
        if text[first].islower():
            return None
        return False
    if marks.startswith(("..", "…")) or text.endswith(". .", sentence, mark.start() + 1):
        return text[word : word + 2] not in ("I ", "I'", "I’") if letter.isupper() else None
    if marks[-1] in "-–—" and letter.isupper():
        return True
    if marks[0] in "?!":
        is_speech = marks[-1] in "\"'”’" or text[mark.end() : cut].strip() in (
            '"',
            "”",
        )
        if is_speech and cut == word and SAID.match(text, word, word + 80):
            return False
        return None
    if marks[0] != ".":
        return None
    if LIST_NUMBER.fullmatch(text, sentence, mark.end()):
        return False
    earliest = max(sentence, mark.start() - LONGEST_WORD)
    begin = max(earliest, text.rfind(" ", earliest, mark.start()) + 1)
    before = text[begin : mark.start()]
    if marks == "." or marks[1] == "[":
        is_end = _after_abbreviation(before.lstrip("([{\"'“‘_*-—"), text, word, begin)
        # a footnote's number hides the stop
        if is_end is None and marks != ".":
            return letter.isupper()
        return is_end
    if before[:1] in ("(", "[") and marks[1] in ")]" and begin > sentence:  # (ed.)
        return False
    return _likes_to_begin(text, word) or None


def _likes_to_begin(text: str, word: int) -> bool:
    """Return whether the word at ``word`` is one of FIRST_WORDS, and no initial such as ``A.``."""
    letters = LETTERS.match(text, word)
    return letters[0] in FIRST_WORDS and text[letters.end() : letters.end() + 1] != "."


def _after_abbreviation(  # noqa: PLR0911  (a list of rules)
    before: str,
    text: str,
    word: int,
    begin: int,
) -> Optional[bool]:
    """Return whether a sentence ends between ``before`` (the word before a full stop) and the word at ``word``."""
    if before in BEFORE_NUMBERS and ROMAN_OR_NUMBER.match(text, word):
        return False
    if before == "I":  # the pronoun, a king's number or a name's letter
        previous = text[text.rfind(" ", max(0, begin - LONGEST_WORD), max(0, begin - 1)) + 1]
        return (previous.islower() and text[word + 1 : word + 2] != ".") or _likes_to_begin(text, word)
    if before in TITLES:
        return False
    if before.lower() in ("a.m", "p.m"):
        return text[word].isupper() and AFTER_HOURS.match(text, word) is None
    if before == "etc" or before in MONTHS:
        return text[word].isupper()
    is_initial = len(before) == 1 and before.isupper()
    if is_initial or before in UNSURE or DOTTED.fullmatch(before):
        return _likes_to_begin(text, word)
    return _likes_to_begin(text, word) or None  # spaCy misses stops after words such as pH


# All final marks, and distant letters too: the class of these marks alone is 10 times slower to search.
PERHAPS_FINAL = re.compile("[.?!\\u0589-\\u1fff\\u203c-\\U0010ffff]")
ODD_SPACE = re.compile(r"[^\S ]")
PLAIN_END = re.compile(r"([A-Z]?[a-z]{3,}|[0-9]+)[.?!][\"”)]?")  # spaCy divides it into these, but for exceptions
KNOWN_CHUNKS = 1 << 16  # spaCy's answers for so many chunks are kept; bounds the memory, spaCy's own too
LONGEST_CHUNK = 1000  # characters; spaCy's tokenizer takes quadratic time for what has no space
AFFIXES = frozenset("\"'“”‘’()[]{},;")


def load_spacy(with_torch: bool = False) -> ModuleType:
    """Import spaCy, without torch where only rules are wanted.

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


def final_marks() -> frozenset[str]:
    """Return the sentencizer's."""
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
        """Return the sentences of a paragraph."""
        starts = [0, *self._starts(paragraph)]
        sentences = (paragraph[start:end].strip() for start, end in zip(starts, [*starts[1:], None], strict=False))
        return [sentence for sentence in sentences if sentence]

    def _starts(self, paragraph: str) -> Iterator[int]:
        if self._trained is None:
            return mend(paragraph, self._rules)
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
        self._spacy = load_spacy().blank("en")
        self._final_marks = final_marks()
        self._spacy.add_pipe("sentencizer")
        self._spacy.max_length = 1 << 31  # the default guards trained models' memory
        of_words = self._spacy.vocab.lex_attr_getters  # what it finds out about each new word; we ask for one thing
        for attribute in of_words.keys() - {importlib.import_module("spacy.attrs").IS_PUNCT}:
            del of_words[attribute]
        self.exceptions = frozenset(self._spacy.tokenizer.rules)
        self._reaching = {text for text in self.exceptions if len(text) > 1 and not text.replace("'", "").isalpha()}
        self._chunks: dict[str, Chunk] = {}

    def __call__(self, text: str) -> list[int]:
        """Return where the sentences of a text start."""
        try:
            return list(self._starts(text))
        except _NeedsSpacyError:
            return [sentence.start_char for sentence in self._spacy(text).sents]

    def _starts(self, text: str) -> Iterator[int]:
        if text:
            yield 0
        spaced = text
        if ODD_SPACE.search(text):
            spaced = ODD_SPACE.sub(" ", text)
        last = 0
        position = 0
        while mark := PERHAPS_FINAL.search(text, position):
            begin = max(position, spaced.rfind(" ", position, mark.start()) + 1)
            end = spaced.find(" ", mark.end())
            if end < 0:
                end = len(text)
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
        """Return the start of the first token behind a space that is no punctuation, and where to go on."""
        while position < len(text):
            if text[position] == " ":  # a single space is no token; all else between two chunks is
                position += 1
                if position == len(text):
                    break
            letter = text[position]
            if letter.isalnum() or letter.isspace():
                return position, position
            end = spaced.find(" ", position)
            if end < 0:
                end = len(text)
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
        first_word = None
        starts = []
        is_open = False
        for token in self._spacy.tokenizer(text):
            if token.text in self._reaching and not AFFIXES.issuperset(
                text[: token.idx] + text[token.idx + len(token) :]
            ):
                raise _NeedsSpacyError  # else spaCy takes the quotes and the like around it off one by one
            is_final = token.text in self._final_marks
            if not is_final and not token.is_punct:
                if first_word is None:
                    first_word = token.idx
                if is_open:
                    starts.append(token.idx)
                is_open = False
            is_open = is_open or is_final
        return Chunk(first_word, tuple(starts), is_open)


class _NeedsSpacyError(Exception):
    """Neighbours beyond a space may change how spaCy divides this chunk."""


@dataclass
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
    spacy_model: Optional[str] = None
    min_words: int = 4

    def process(self, document: Document) -> Optional[str]:
        """Divide a document into sentences."""
        split = load_splitter(self.spacy_model)
        paragraphs = list(map(split, document.text.split("\n")))
        sentences = join_short(paragraphs, self.min_words)
        if not sentences:
            return "no sentence"
        self.counts["sentences"] += len(sentences)
        if joined := sum(map(len, paragraphs)) - len(sentences):
            self.counts["short sentences joined"] += joined
        document.text = "\n".join(sentences)
        return None


load_splitter = lru_cache(maxsize=1)(SentenceSplitter)  # once per process, for any number of units


def join_short(paragraphs: list[list[str]], min_words: int) -> list[str]:
    """Return the sentences of all paragraphs, in order; those of fewer than ``min_words`` words join a neighbour."""
    sentences: list[str] = []
    waiting = ""  # short ones at the beginning of a paragraph: a number, a heading, "No."
    for paragraph in paragraphs:
        has_sentence = False
        for part in paragraph:
            sentence = part
            if waiting:
                sentence = f"{waiting} {part}"
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
