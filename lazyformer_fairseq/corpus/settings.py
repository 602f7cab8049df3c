"""The settings that, together with the inputs, determine the bytes of a corpus."""

from dataclasses import asdict, dataclass, field
from typing import Any, Optional, Union

from lazyformer_fairseq.data.text.library_recipe import LibrarySettings
from lazyformer_fairseq.data.text.normalisation import TextSettings
from lazyformer_fairseq.options import check, option

WORD_COVERAGE = 0.999
VOCAB_SIZE = 32_768


@dataclass(frozen=True)
class CorpusSettings:
    """Settings of ``lazyformer corpus``; each is an option of the command, except for the last two.

    Raises:
        UserError: a value is not allowed; the message names it.
    """

    vocab_size: Optional[int] = option(
        None,
        "Number of entries in the dictionary, special symbols included.",
        low=10,
        shown="32768, or fewer if the text is too small",
    )
    """The default follows LazyFormer, appendix A."""

    word_coverage: Optional[float] = option(
        None,
        "Keep the most frequent words that make up this share of the text; rarer ones become <unk>.",
        low=0,
        is_open=True,
        high=1,
        shown="0.999, or 1 with another model's tokenizer",
    )
    """Words of equal frequency are kept or dropped together.

    With a tokenizer from another model, all words are kept by default, because it has learnt to spell rare ones.

    The number of dropped words grows with the text, as it should. From 9 million running words of Wikipedia and
    novels, the default drops none: half a percent of them occur once, and most of these are good English that BPE can
    spell, such as "cordially" and "vapors". From 3,000 million words it drops those that occur fewer than about 15
    times, by the same law (the share of rare words falls with the text's size to the power of 0.6).
    """

    valid_share: float = option(
        0.005,
        "Share of documents to hold out for validation, at least one document; after 0, train with "
        "--disable-validation.",
        low=0,
        high=1,
    )
    """Whether a document is held out depends only on its text and the seed."""

    min_document_characters: int = option(
        100,
        "Drop documents of fewer characters; a Chinese, Japanese or Korean character counts as three.",
        low=0,
    )
    min_line_words: int = option(
        5,
        "Drop lines of fewer words unless they end like a sentence; two Chinese, Japanese or Korean characters count "
        "as a word.",
        low=0,
    )
    min_line_letters: float = option(0.5, "Drop lines with a smaller share of letters and spaces.", low=0, high=1)
    near_duplicates: bool = option(False, "Drop near-duplicate documents (found by MinHash), not only equal ones.")
    spacy_model: Optional[str] = option(
        None, "Installed spaCy model that splits text into sentences.", shown="rules for English"
    )
    bad_input: str = option(
        "stop",
        "Whether to stop at a broken record or a damaged file and name it, or to skip it, count it and continue.",
        choices=("stop", "skip"),
    )
    """A corpus that was begun with "stop" may be continued with "skip"."""

    seed: int = option(1, "Seed that chooses the documents to hold out.", low=0)
    shards: Optional[int] = option(
        None, "Number of shards, the folders of training data.", low=1, shown="one per gigabyte of input"
    )
    tokenizer: Optional[str] = option(
        None,
        "Existing tokenizer to use, with its case and vocabulary.",
        metavar="FOLDER",
        shown="train one",
    )
    """It determines ``vocab_size`` and ``text``."""

    unit_megabytes: Optional[float] = None
    """Megabytes of input per unit of work; by default 1/64 of the input, but at least 0.25 and at most 32."""

    text: Union[TextSettings, LibrarySettings] = field(default_factory=TextSettings)

    def __post_init__(self):
        check(self)

    @property
    def share_of_kept_words(self) -> float:
        """The word coverage in effect: the one that was set, or the default."""
        if self.word_coverage is not None:
            return self.word_coverage
        if isinstance(self.text, LibrarySettings):
            return 1.0
        return WORD_COVERAGE

    def as_json(self, tokenizer: Optional[str]) -> dict[str, Any]:
        """Return all settings as values for JSON, those of the text under ``text``.

        Args:
            tokenizer: digest of the user's tokenizer, which takes the place of its path; None if there is none.
        """
        values = asdict(self)
        values["word_coverage"] = self.share_of_kept_words
        values["tokenizer"] = tokenizer
        values["vocab_size"] = self.vocab_size or VOCAB_SIZE
        values["text"]["special_tokens"] = list(self.text.special_tokens)
        return values
