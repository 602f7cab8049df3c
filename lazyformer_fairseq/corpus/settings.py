"""Everything that decides the bytes of a corpus, apart from its inputs."""

from dataclasses import asdict, dataclass, field
from typing import Any, Optional, Union

from lazyformer_fairseq.data.text.library_recipe import LibrarySettings
from lazyformer_fairseq.data.text.normalisation import TextSettings
from lazyformer_fairseq.options import check, option

WORD_COVERAGE = 0.999
VOCAB_SIZE = 32_768


@dataclass(frozen=True)
class CorpusSettings:
    """Settings of ``lazyformer corpus``, one option each but for the last two.

    Raises:
        UserError: a value that is not possible; the message names it.
    """

    vocab_size: Optional[int] = option(
        None,
        "Size of the dictionary, all included.",
        low=10,
        shown="32768; fewer if the text is too small for it",
    )
    """By default as in LazyFormer, appendix A."""

    word_coverage: Optional[float] = option(
        None,
        "Keep the most frequent words that make up this share of the text; rarer ones become <unk>.",
        low=0,
        is_open=True,
        high=1,
        shown="0.999; 1 with another model's tokenizer",
    )
    """Words equally frequent go together. A tokenizer that came with another model has learnt to spell the rare ones.

    The number of rare words grows with the text as it should: of 9 million running words of Wikipedia and novels the
    default drops none (half a percent occur once, most of them good English that BPE can spell: "cordially", "vapors");
    of 3 thousand million, by the same law (the share of rare words falls with the power 0.6 of the text), those that
    occur less than some 15 times.
    """

    valid_share: float = option(
        0.005,
        "Share of documents held out, at least one; 0 for none: train with --disable-validation.",
        low=0,
        high=1,
    )
    """Which ones depends on their text and the seed alone."""

    min_document_characters: int = option(
        100,
        "Drop shorter documents; a sign of Chinese, Japanese or Korean counts for three letters.",
        low=0,
    )
    min_line_words: int = option(
        5,
        "Drop shorter lines unless they end like a sentence; two signs count for a word.",
        low=0,
    )
    min_line_letters: float = option(0.5, "Drop lines with a smaller share of letters and spaces.", low=0, high=1)
    near_duplicates: bool = option(False, "Drop near-duplicates (MinHash), not only equal documents.")
    spacy_model: Optional[str] = option(None, "Installed spaCy model that finds sentences.", shown="rules for English")
    bad_input: str = option(
        "stop",
        "At a broken record or a damaged file: stop and name it, or leave it out, count it and go on.",
        choices=("stop", "skip"),
    )
    """A corpus that was begun with "stop" may go on with "skip"."""

    seed: int = option(1, "Chooses the documents held out.", low=0)
    shards: Optional[int] = option(None, "Folders of training data.", low=1, shown="one a gigabyte of input")
    tokenizer: Optional[str] = option(
        None,
        "Use this tokenizer, case and vocabulary.",
        metavar="FOLDER",
        shown="train one",
    )
    """It decides ``vocab_size`` and ``text``."""

    unit_megabytes: Optional[float] = None
    """Input in a unit, the atom of work; by default a 64th of the input, 0.25 to 32."""

    text: Union[TextSettings, LibrarySettings] = field(default_factory=TextSettings)

    def __post_init__(self):
        check(self)

    @property
    def share_of_kept_words(self) -> float:
        """The word coverage that is meant."""
        if self.word_coverage is not None:
            return self.word_coverage
        if isinstance(self.text, LibrarySettings):
            return 1.0
        return WORD_COVERAGE

    def as_json(self, tokenizer: Optional[str]) -> dict[str, Any]:
        """Return all settings; those of the text under ``text``, and of a tokenizer its digest, which is given."""
        values = asdict(self)
        values["word_coverage"] = self.share_of_kept_words
        values["tokenizer"] = tokenizer
        values["vocab_size"] = self.vocab_size or VOCAB_SIZE
        values["text"]["special_tokens"] = list(self.text.special_tokens)
        return values
