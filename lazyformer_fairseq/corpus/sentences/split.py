"""The step that divides documents into sentences."""

from functools import lru_cache
from typing import Optional

from datatrove.data import Document

from lazyformer_fairseq.corpus.measures import has_words
from lazyformer_fairseq.corpus.sentences.ends import SentenceSplitter
from lazyformer_fairseq.corpus.step import DocumentStep


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
