"""Every step of a corpus takes time in proportion to its text, whatever the text: twice as much, twice as long."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lazyformer_fairseq.corpus.clean_text import CleanText
from lazyformer_fairseq.corpus.readers.files import Block, Piece, Watch
from lazyformer_fairseq.corpus.readers.formats import FORMATS
from lazyformer_fairseq.corpus.sentences import SplitSentences
from lazyformer_fairseq.corpus.steps import Document
from lazyformer_fairseq.corpus.wiki_markup import ExtractWikiMarkup
from lazyformer_fairseq.data.text import fast_tokenizer
from lazyformer_fairseq.data.text.normalisation import TextNormaliser, TextSettings

NORMALISER = TextNormaliser(TextSettings())
SIZE = 20_000  # characters


def document(text: str) -> Document:
    return Document(text, "file:1", {"format": "mediawiki"})


def parse(format: str, text: str) -> list:
    return list(FORMATS[format].parse(Block(0, 1, text.encode(), False), Piece("file", format), Watch()))


def recognise(text: str) -> list[bool]:
    return [format.recognises(text.encode(), Path("file")) for format in FORMATS.values()]


STEPS: dict[str, Callable[[str], object]] = {
    "wiki": lambda text: ExtractWikiMarkup().process(document(text)),
    "clean": lambda text: CleanText().process(document(text)),
    "sentences": lambda text: SplitSentences().process(document(text)),
    "words": NORMALISER,
    "places": fast_tokenizer.normaliser(TextSettings()).normalize_str,
    "page": lambda text: parse("mediawiki", f"<page>{text}"),
    "doc": lambda text: parse("wikiextractor", f"<doc {text}>\n</doc>"),
    "recognise": recognise,
}
SLOW = ("words", "places")  # rule after rule, in such texts
REPEATED_MARKUP = [
    *"[[a|[[ <ref> <ref <math> {{nowrap| {| [[a]] ]]}} <!-- ''' [//a __a | == (, {{a|[[b| <small><ref> {{frac|".split(),
    *("[http://a ", "[//a [b]", ", ;", "\n"),
]
HOSTILE_LINES = [
    *"mini| left| [[Datei: px| thumb|left| < a@ http:// ( [[ {{ &amp; a. a.com/ www.a. <ref> <http://a a/.txt".split(),
    *"formula_1 <!-- C:\\ a@b.".split(),
    *("(,", "<a ", "[//a ", "_a ", "( ,", "(;) ", " ,;", "'' ", "* ", ", ) ", "\u200d", "e\u0301", "\ufffda"),
]
# (step, how a text begins, what is repeated in it)
TEXTS = [
    *(("wiki", "", unit) for unit in REPEATED_MARKUP),
    *(("wiki", begin, " ") for begin in ("#a", "{{", "{{nowrap|", "{{nowrap|1", "==", "[//a", "(")),
    *(("clean", "[[(", unit) for unit in HOSTILE_LINES),
    *(("sentences", "", unit) for unit in ("a", ".", "A! ", '. " ', ". . ", "( ", "&c. x", ".[1]", "(word). ", "Mr. ")),
    ("sentences", "", "At 5 p.m. Eastern Mr "),
    ("sentences", "This is a long sentence. ", "No. "),
    ("sentences", "A :) b. ", "(x"),
    ("sentences", "", "\rU.S."),
    ("words", "a ", "."),
    ("words", "a ", '".'),
    ("places", "", '"a, \x01b…'),
    ("places", "", "1\u00a0000 "),
    ("page", "", "<page>"),
    ("page", "", "</page "),
    ("doc", "", 'title="a '),
    ("doc", 'title="a"', " "),
    ("recognise", "a", "\n"),
    ("recognise", "a", "\n\n= b"),
]


def seconds(step: Callable[[str], object], text: str) -> float:
    """Return the least processor time of three runs."""
    found = []
    for _ in range(3):
        began = time.process_time()
        step(text)
        found.append(time.process_time() - began)
    return min(found)


@pytest.mark.parametrize(("step", "begin", "unit"), TEXTS)
def test_twice_as_much_text_takes_about_twice_as_long(step, begin, unit):
    size = SIZE // 4 if step in SLOW else SIZE
    found = []
    for _ in range(5):  # a busy machine slows single runs; quadratic time shows in every round
        half = seconds(STEPS[step], begin + unit * (size // 2 // len(unit)))
        whole = seconds(STEPS[step], begin + unit * (size // len(unit)))
        found.append(whole / max(half, 0.01))
        if found[-1] < 3:
            break
    assert min(found) < 3
