"""Everything that decides the bytes of a corpus, apart from its inputs."""

import hashlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Optional, Union

from lazyformer_fairseq.data.text.interface import SETTINGS_FILE
from lazyformer_fairseq.data.text.library_recipe import LibrarySettings
from lazyformer_fairseq.data.text.normalisation import TextSettings
from lazyformer_fairseq.errors import UserError

WORD_COVERAGE = 0.999


@dataclass(frozen=True)
class CorpusSettings:
    """Settings of ``lazyformer corpus``, one option each.

    Raises:
        UserError: a value that is not possible; the message names it.
    """

    vocab_size: int = 32_768
    """Symbols of the dictionary, all included (LazyFormer, appendix A)."""

    valid_share: float = 0.005
    """Share of the documents held out; which ones depends on their text and the seed alone."""

    seed: int = 1
    """Chooses the documents held out."""

    min_document_characters: int = 100
    """A document that keeps fewer is dropped; a sign of Chinese, Japanese or Korean counts for three."""

    min_line_words: int = 5
    """A line of fewer words that does not end like a sentence is dropped; two signs of Chinese, Japanese or Korean
    count for a word."""

    min_line_letters: float = 0.5
    """A line with a smaller share of letters and spaces is dropped."""

    min_words: int = 4
    """A sentence of fewer words is joined to its neighbour in the same document."""

    tokenizer: Optional[str] = None
    """A tokenizer folder to use in place of one that is trained; it decides ``vocab_size`` and ``text``."""

    word_coverage: Optional[float] = None
    """Words are kept, from the most frequent on, until they make up this share of all running words; rarer ones
    become ``<unk>``. Words equally frequent go together. See ``min_word_count``.

    None: 0.999; all of them for a tokenizer that came with another model, which has learnt to spell the rare ones.

    It grows with the text as it should: of 9 million running words of Wikipedia and novels the default drops none (half
    a percent occur once, most of them good English that BPE can spell: "cordially", "vapors"); of 3 thousand million,
    by the same law (the share of rare words falls with the power 0.6 of the text), those that occur less than some 15
    times.
    """

    min_word_count: Optional[int] = None
    """In place of ``word_coverage``: words that occur less often become ``<unk>``."""

    near_duplicates: bool = False
    """Drop near-duplicates (MinHash) too, not only equal documents."""

    spacy_model: Optional[str] = None
    """An installed spaCy pipeline that finds sentences; None: rules, which need no model."""

    bad_files: Literal["stop", "skip"] = "stop"
    """What to do at a file that cannot be read to its end: stop there, or note it and go on."""

    shards: Optional[int] = None
    """Folders ``shard0``, ``shard1``, ... of about equal size; None: one for each gigabyte of input."""

    unit_megabytes: Optional[float] = None
    """Input in a unit, the atom of work and of resuming; None: a 64th of the input, between 0.25 and 32."""

    text: Union[TextSettings, LibrarySettings] = field(default_factory=TextSettings)

    def __post_init__(self):
        limits = {
            "vocab_size": self.vocab_size >= 10,
            "valid_share": 0 <= self.valid_share <= 1,
            "min_document_characters": self.min_document_characters >= 0,
            "min_line_words": self.min_line_words >= 0,
            "min_line_letters": 0 <= self.min_line_letters <= 1,
            "min_words": self.min_words >= 1,
            "word_coverage": self.word_coverage is None or 0 < self.word_coverage <= 1,
            "min_word_count": self.min_word_count is None or self.min_word_count >= 1,
            "shards": self.shards is None or self.shards >= 1,
            "unit_megabytes": self.unit_megabytes is None or self.unit_megabytes > 0,
            "bad_files": self.bad_files in ("stop", "skip"),
        }
        for name, is_possible in limits.items():
            if not is_possible:
                raise UserError(f"corpus setting {name} = {getattr(self, name)!r}: not possible")

    @property
    def share_of_kept_words(self) -> float:
        """The word coverage that is meant."""
        if self.word_coverage is not None:
            return self.word_coverage
        return 1.0 if isinstance(self.text, LibrarySettings) else WORD_COVERAGE

    def as_json(self) -> dict[str, Any]:
        """All settings; those of the text under ``text``, and of a tokenizer its digest."""
        values = {**asdict(self), "word_coverage": self.share_of_kept_words}
        if self.tokenizer:
            values["tokenizer"] = hashlib.sha256(Path(self.tokenizer, SETTINGS_FILE).read_bytes()).hexdigest()
        values["text"]["special_tokens"] = list(self.text.special_tokens)
        return values
