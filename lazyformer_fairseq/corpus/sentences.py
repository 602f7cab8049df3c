"""Splits cased text into sentences, either with rules for English or with a spaCy model.

The LazyFormer paper uses spaCy (appendix A). Text must be split before it is converted to lowercase.

:func:`starts_of_sentences` applies the rules at every terminal mark that is followed by a space. They consider, in this
order, the next letter, the mark, and the word before the mark, which may be an abbreviation. Unless a rule says
otherwise, the sentence ends there. The rules are tested on ``tests/corpus/sentence_gold.txt``.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Optional

from lazyformer_fairseq.corpus.steps import Document, DocumentStep, has_words
from lazyformer_fairseq.errors import UserError

# A terminal mark and the marks that follow it (closing quotes, a dash, a footnote number), if a space comes next. The
# decimal point, which WikiText writes as @.@, does not match.
END = re.compile(r"[.?!…։؟۔।॥።](?:(?!\[\w)[^\w\s@]|_){0,30}+(?:\[\w{1,3}\]){0,9}+(?=\s)")
SPACE = re.compile(r"\s+")
LONE_MARKS = re.compile(r"(?:[^\w\s]|_){1,30}(?=\s)")
MARKS = re.compile(r"(?:[^\w\s]|_|\s){0,30}")
CLOSING = frozenset(")]}”’»")
NEVER_FIRST = frozenset("&,;:/%+=.?!…)]}”»|")  # no sentence begins with one of these
LONGEST_WORD = 40  # characters to consider before a terminal mark

# Abbreviations that precede a name and never end a sentence.
TITLES = frozenset(
    """Mr Mrs Ms Messrs Mme Mlle M Dr Prof Ste Mt Ft Gen Col Lt Maj Capt Cpt Cmdr Cdr Sgt Cpl Pvt Adm Rev Hon Sen Rep
    Gov Pres Supt Insp Fr Atty Dep Asst Brig Ven Pte vs v cf viz e.g i.e E.g I.e Cf approx Approx ca est resp
    esp incl Proc Natl Acad Sci Biol Chem Phys Univ Dept""".split()
)
# Abbreviations that do not end a sentence if a number follows.
BEFORE_NUMBERS = frozenset(
    """No Nos no nos Fig Figs fig figs Eq Eqs eq Sec Secs sec Sect Vol Vols vol vols Ch Chs ch Chap chap Art Arts art p
    pp P Pp Op op fol ff ll vv Bk bk Pt pt Tab Temp Pop Alt Max Min Rs Ps Ex ex Cor Rom Matt Gal Heb Lev Deut""".split()
)
MONTHS = frozenset("Jan Feb Mar Apr Jun Jul Aug Sep Sept Oct Nov Dec".split())
# Abbreviations that end a sentence only if the next word is one that often starts a sentence.
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
DOTTED = re.compile(r"(?:[^\W\d_]{1,2}\.)+-?[^\W\d_]")  # U.S, p.m, J.R.R, J.-P without their last period
LIST_NUMBER = re.compile(r"\W{0,3}(?:\d{1,3}|[A-Za-z]|[IVXLC]{1,6})\.")
LAST_WORD = re.compile(r"(?:\w[\w'’]*\.)*(?:\w[\w'’]*)?\Z")  # U.S in then-U.S, Mr in --Mr, but all of isn't
LETTERS = re.compile(r"[^\W\d_]*")
ROMAN_OR_NUMBER = re.compile(r"[\d(#]|[IVXLC]+\b")
SAID = re.compile(
    r"""(?:(?:[A-Z][\w.'’-]*\s){1,3}|(?:[Tt]he|[Mm]y|[Hh]is|[Hh]er)\s(?:[\w'’-]+\s){1,2})(?:\w+ly\s)?
    (?:said|asked|cried|replied|answered|exclaimed|whispered|shouted|called|added|demanded|inquired|enquired|repeated|began
    |murmured|muttered|returned|continued|screamed|sighed|laughed|thought|wondered|observed|remarked|told|yelled|growled)\b""",
    re.VERBOSE,
)


def starts_of_sentences(text: str) -> Iterator[int]:
    """Yield, in order, the start offsets of the sentences in a cased paragraph, except for the first sentence."""
    quotes = _Quotes(text)
    sentence = 0
    for mark in END.finditer(text):
        if mark.start() < sentence:
            continue
        start, word = _next(text, mark.end(), quotes)
        if word == len(text):
            return
        if _is_end(text, sentence, mark, start, word):
            yield start
            sentence = start


class _Quotes:
    """A counter that tells whether a straight quote between spaces, as in WikiText, opens or closes a quotation."""

    def __init__(self, text: str):
        self._text = text
        self._counted = 0
        self._is_open = False

    def closes(self, place: int) -> bool:
        """Return whether the quote at offset ``place``, which must increase from call to call, is a closing one."""
        self._is_open ^= self._text.count('"', self._counted, place) % 2 == 1
        self._counted = place
        return self._is_open


def _next(text: str, end: int, quotes: _Quotes) -> tuple[int, int]:
    """Return the offsets at which the next sentence and, after any opening marks, its first word would start.

    Standalone closing marks belong to the preceding sentence.
    """
    position = SPACE.match(text, end).end()
    while lone := LONE_MARKS.match(text, position):
        marks = lone[0]
        if marks == '"':
            closes = quotes.closes(position)
        else:
            closes = CLOSING.issuperset(marks) or marks in ("''", "'")
        if not closes:
            break
        position = SPACE.match(text, lone.end()).end()
    return position, MARKS.match(text, position).end()


def _is_end(  # noqa: PLR0911  (a list of rules)
    text: str,
    sentence: int,
    mark: re.Match,
    start: int,
    word: int,
) -> bool:
    """Return whether the sentence that starts at ``sentence`` ends at ``mark`` and the next one starts at ``start``."""
    letter = text[word]
    marks = mark[0]
    if text[start] in NEVER_FIRST or marks[-1] in ",;:":
        return False

    is_special_token = text[word - 1] == "<"  # <url> has no case
    is_camel_case = text[word + 1 : word + 2].isupper()  # iPod may start a sentence
    if letter.islower() and not is_special_token and not is_camel_case:
        first = MARKS.match(text, sentence).end()
        # Text without capitals has sentences too.
        if not text[first].islower():
            return False

    is_ellipsis = marks.startswith(("..", "…")) or text.endswith(". .", sentence, mark.start() + 1)
    if is_ellipsis:
        is_pronoun = text[word : word + 2] in ("I ", "I'", "I’")
        return letter.isupper() and not is_pronoun
    if marks[0] in "?!":
        quote = text[mark.end() : start].strip()
        is_speech = marks[-1] in "\"'”’" or quote in ('"', "”")
        return not (is_speech and start == word and SAID.match(text, word, word + 80))

    if marks[0] != ".":
        return True
    if LIST_NUMBER.fullmatch(text, sentence, mark.end()):
        return False
    earliest = max(sentence, mark.start() - LONGEST_WORD)
    begin = max(earliest, text.rfind(" ", earliest, mark.start()) + 1)
    if marks == "." or marks[1] == "[":
        return _is_end_after(text, begin, mark.start(), word)
    is_remark = text[begin] in "([" and marks[1] in ")]"  # (ed.)
    return not is_remark or begin == sentence


def _is_end_after(  # noqa: PLR0911  (a list of rules)
    text: str,
    begin: int,
    stop: int,
    word: int,
) -> bool:
    """Return whether a period ends a sentence, judging by the words before and after it.

    Args:
        text: the paragraph.
        begin: offset after the last space before ``stop``.
        stop: offset of the period.
        word: offset of the first letter after the period.
    """
    before = LAST_WORD.search(text, begin, stop)[0]
    if before in BEFORE_NUMBERS and ROMAN_OR_NUMBER.match(text, word):
        return False
    if before == "I":  # the pronoun, a monarch's number or an initial
        space_before = text.rfind(" ", max(0, begin - LONGEST_WORD), max(0, begin - 1))
        follows_lowercase_word = text[space_before + 1].islower()
        next_is_initial = text[word + 1 : word + 2] == "."
        if follows_lowercase_word and not next_is_initial:
            return True
        return _often_starts_sentence(text, word)
    if before in TITLES:
        return False
    if before.lower() in ("a.m", "p.m"):
        return text[word].isupper() and AFTER_HOURS.match(text, word) is None
    if before == "etc" or before in MONTHS:
        return text[word].isupper()
    is_initial = len(before) == 1 and before.isupper()
    if is_initial or before in UNSURE or DOTTED.fullmatch(before):
        return _often_starts_sentence(text, word)
    return True


def _often_starts_sentence(text: str, word: int) -> bool:
    """Return whether the word at offset ``word`` is one of FIRST_WORDS and not an initial such as ``A.``."""
    letters = LETTERS.match(text, word)
    return letters[0] in FIRST_WORDS and text[letters.end() : letters.end() + 1] != "."


class SentenceSplitter:
    """A callable that splits a paragraph of cased text into sentences, losing no characters except spaces.

    Args:
        spacy_model: name of an installed spaCy pipeline that sets sentence boundaries, such as ``en_core_web_sm``;
            None for the rules, which are much faster.

    Raises:
        UserError: ``spacy_model`` is not installed, or does not set sentence boundaries.
    """

    def __init__(self, spacy_model: Optional[str] = None):
        self._trained = None
        if spacy_model is None:
            return
        import spacy

        try:
            self._trained = spacy.load(spacy_model)
        except OSError:
            raise UserError(
                f"spaCy model {spacy_model!r} is not installed; run `python -m spacy download {spacy_model}`"
            ) from None
        if not self._trained("A word.").has_annotation("SENT_START"):
            raise UserError(f"spaCy model {spacy_model!r} has no parser, senter or sentencizer; choose another one")

    def __call__(self, paragraph: str) -> list[str]:
        """Return a paragraph's sentences in order, with surrounding spaces stripped."""
        starts = [0, *self._starts(paragraph)]
        ends = [*starts[1:], None]
        sentences = (paragraph[start:end].strip() for start, end in zip(starts, ends, strict=True))
        return [sentence for sentence in sentences if sentence]

    def _starts(self, paragraph: str) -> Iterator[int]:
        if self._trained is None:
            return starts_of_sentences(paragraph)
        with self._trained.memory_zone():  # otherwise spaCy's vocabulary would grow with every new word
            return iter([sentence.start_char for sentence in self._trained(paragraph).sents][1:])


@dataclass
class SplitSentences(DocumentStep):
    """The step that splits paragraphs (one per line) into cased sentences (one per line), and joins short ones.

    The LazyFormer paper concatenates short sequences (appendix A). Here, a sentence with fewer than ``min_words`` words
    is joined to the previous sentence in its paragraph or, if there is none, to the next sentence, even across
    paragraphs; at the end of the document, it is joined to the last sentence before it. Sentences are never joined
    across documents.

    The step counts the ``sentences`` that it passes on and the ``short sentences joined``, and drops documents that
    have ``no sentence`` left.

    Args:
        spacy_model: see :class:`SentenceSplitter`.
        min_words: minimum number of words in a sentence, counted as in ``steps.py``, unless the whole document has
            fewer; 0 to join no sentences.

    Raises:
        UserError: ``spacy_model`` is not installed; raised at the first document.
    """

    name = "sentences"
    spacy_model: Optional[str] = None
    min_words: int = 4

    def process(self, document: Document) -> Optional[str]:
        """Split a document into sentences."""
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
    """Return the sentences of all paragraphs in order, joining those with fewer than ``min_words`` to a neighbor."""
    sentences: list[str] = []
    waiting = ""  # short sentences at the beginning of a paragraph, such as a number, a heading or "No."
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
