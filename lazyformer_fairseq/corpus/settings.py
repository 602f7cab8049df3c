"""The settings that, together with the inputs, determine a corpus byte for byte."""

from dataclasses import asdict, dataclass, field
from typing import Any, Optional, Union

from lazyformer_fairseq.data.text.library_recipe import LibrarySettings
from lazyformer_fairseq.data.text.normalisation import TextSettings
from lazyformer_fairseq.options import check, option

WORD_COVERAGE = 0.999
VOCAB_SIZE = 32_768


@dataclass(frozen=True)
class CorpusSettings:
    """Settings of ``lazyformer corpus``; all but the last two are options of the command.

    Raises:
        UserError: a value is invalid; the message names it.
    """

    vocab_size: Optional[int] = option(
        None,
        "Number of entries in the dictionary, including special symbols.",
        low=10,
        shown="32768, or fewer if the text is too small",
    )
    """The default follows the LazyFormer paper, appendix A."""

    word_coverage: Optional[float] = option(
        None,
        "Keep the most frequent words that together make up this fraction of the text; rarer words become <unk>.",
        low=0,
        is_open=True,
        high=1,
        shown="0.999, or 1 with another model's tokenizer",
    )
    """Words of equal frequency are kept or dropped together.

    With another model's tokenizer, all words are kept by default, because that tokenizer was trained to encode rare
    words too.

    The larger the text, the more words are dropped, which is intended. In 9 million words of running text (Wikipedia
    and novels), the default drops none: half a percent of these words occur only once, and most of those are valid
    English words that BPE can encode, such as "cordially" and "vapors". In 3 billion words, the default drops words
    that occur fewer than about 15 times. This estimate assumes that the fraction of rare words is inversely
    proportional to the text's size to the power of 0.6.
    """

    valid_share: float = option(
        0.005,
        "Fraction of documents to hold out for validation. If it is above 0, at least one document is held out; if it "
        "is 0, train with --disable-validation.",
        low=0,
        high=1,
    )
    """A document's text and the seed alone decide whether it is held out."""

    min_document_characters: int = option(
        100,
        "Drop documents with fewer characters than this; a Chinese, Japanese or Korean character counts as three.",
        low=0,
    )
    min_line_words: int = option(
        5,
        "Drop lines with fewer words than this unless they end in terminal punctuation; two Chinese, Japanese or "
        "Korean characters count as a word.",
        low=0,
    )
    min_line_letters: float = option(
        0.5, "Drop lines in which less than this fraction of the characters are letters or spaces.", low=0, high=1
    )
    near_duplicates: bool = option(False, "Also drop near-duplicate documents, which are found with MinHash.")
    spacy_model: Optional[str] = option(
        None, "Installed spaCy model to use for splitting text into sentences.", shown="rules for English"
    )
    bad_input: str = option(
        "stop",
        "What to do with a broken record or a damaged file: stop with an error that names it, or skip and count it.",
        choices=("stop", "skip"),
    )
    """A build that was begun with "stop" may be resumed with "skip"."""

    seed: int = option(1, "Random seed for choosing the documents to hold out.", low=0)
    shards: Optional[int] = option(
        None, "Number of shards (folders of training data).", low=1, shown="one per gigabyte of input"
    )
    tokenizer: Optional[str] = option(
        None,
        "Folder of an existing tokenizer to use; it also determines the casing and the vocabulary.",
        metavar="FOLDER",
        shown="train a new one",
    )
    """An existing tokenizer determines ``vocab_size`` and ``text``."""

    unit_megabytes: Optional[float] = None
    """Megabytes of input per unit of work; by default 1/64 of the input, limited to between 0.25 and 32."""

    text: Union[TextSettings, LibrarySettings] = field(default_factory=TextSettings)

    def __post_init__(self):
        check(self)

    @property
    def share_of_kept_words(self) -> float:
        """The word coverage in effect: the configured value or the default."""
        if self.word_coverage is not None:
            return self.word_coverage
        if isinstance(self.text, LibrarySettings):
            return 1.0
        return WORD_COVERAGE

    def as_json(self, tokenizer: Optional[str]) -> dict[str, Any]:
        """Return all settings as JSON-serializable values, with the text settings under ``text``.

        Args:
            tokenizer: digest of the user's tokenizer, which replaces its path; None if the user provides none.
        """
        values = asdict(self)
        values["word_coverage"] = self.share_of_kept_words
        values["tokenizer"] = tokenizer
        values["vocab_size"] = self.vocab_size or VOCAB_SIZE
        values["text"]["special_tokens"] = list(self.text.special_tokens)
        return values
