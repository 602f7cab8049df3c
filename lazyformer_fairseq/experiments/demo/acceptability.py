"""A small acceptability task in CoLA's layout: real sentences against sentences with their words shuffled.

``train.tsv`` and ``dev.tsv`` without a header; columns: source, label (1 acceptable), ``*`` where not, sentence.
"""

import random
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, Union

from datatrove.data import Document

from lazyformer_fairseq.corpus.duplicates import is_held_out
from lazyformer_fairseq.corpus.sentences import SentenceSplitter
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.storage.atomic import atomic_folder

FEWEST_WORDS, MOST_WORDS = 5, 25
FINAL_MARK = re.compile(r"[.?!]+$")
BRACKETS = ("()", "[]")
TRIES = 100
FEWEST_EXAMPLES = 20


class Example(NamedTuple):
    """A row: label 1 for a real sentence, 0 for a shuffled one."""

    label: int
    sentence: str


def write_acceptability_task(
    documents: Iterable[Document],
    folder: Union[str, Path],
    valid_share: float,
    seed: int,
    train_size: int = 2000,
    dev_size: int = 500,
) -> dict[str, int]:
    """Writes ``folder/train.tsv`` and ``folder/dev.tsv``, whole or not at all, from held-out documents.

    Half of each file is real; a sentence appears once, as it is or shuffled, never as both. Where the text does not
    suffice, both files shrink in proportion.

    Args:
        documents: clean and with their fingerprints, see :func:`~lazyformer_fairseq.corpus.stages.clean_documents`.
        valid_share, seed: those of the corpus: what it trains on is left out here.

    Returns:
        the number of rows by split.

    Raises:
        UserError: too little text held out, or a folder that exists.
    """
    sentences = held_out_sentences(documents, valid_share, seed)
    if len(sentences) < FEWEST_EXAMPLES:
        raise UserError(
            f"acceptability task: only {len(sentences)} sentences of {FEWEST_WORDS} to {MOST_WORDS} words are held out "
            f"and {FEWEST_EXAMPLES} are needed; give more text or a larger valid_share ({valid_share})"
        )
    chance = random.Random(seed)
    chance.shuffle(sentences)
    fits = min(1.0, len(sentences) / (train_size + dev_size))
    sizes = {"train": int(train_size * fits) // 2 * 2, "dev": int(dev_size * fits) // 2 * 2}
    with atomic_folder(Path(folder)) as unfinished:
        for split, size in sizes.items():
            chosen, sentences = sentences[:size], sentences[size:]
            rows = (
                f"prose\t{example.label}\t{'' if example.label else '*'}\t{example.sentence}\n"
                for example in half_shuffled(chosen, chance)
            )
            (unfinished / f"{split}.tsv").write_text("".join(rows), encoding="utf-8")
    return sizes


def held_out_sentences(documents: Iterable[Document], valid_share: float, seed: int) -> list[str]:
    """Sentences of 5 to 25 words that stand in held-out documents alone, each once, in order of place."""
    split_sentences = SentenceSplitter()
    trained_on, held_out = set(), {}
    for document in documents:
        sentences = [sentence for paragraph in document.text.split("\n") for sentence in split_sentences(paragraph)]
        if is_held_out(document.metadata["fingerprint"], valid_share, seed):
            held_out.update(dict.fromkeys(sentences))
        else:
            trained_on.update(sentences)
    return [sentence for sentence in held_out if sentence not in trained_on and _is_usable(sentence)]


def half_shuffled(sentences: list[str], chance: random.Random) -> list[Example]:
    """The first half of the sentences as they are, the second half shuffled; the rows in random order."""
    half = len(sentences) // 2
    examples = [Example(1, sentence) for sentence in sentences[:half]]
    examples += [Example(0, shuffle_words(sentence, chance)) for sentence in sentences[half:]]
    chance.shuffle(examples)
    return examples


def shuffle_words(sentence: str, chance: random.Random) -> str:
    """The sentence with its words in another order; the final mark stays, and so does a capital at the start.

    Raises:
        UserError: no other order was found (one word, repeated).
    """
    bare = FINAL_MARK.sub("", sentence)
    words = bare.split()
    if words[0][1:].islower():  # no name of capitals and no "I": its capital comes from its place alone
        words[0] = words[0].lower()
    for _ in range(TRIES):
        shuffled = chance.sample(words, len(words))
        if shuffled != words and shuffled[-1][-1] not in ",;:":  # ",." at the end would give the answer away
            return shuffled[0][0].upper() + " ".join(shuffled)[1:] + sentence[len(bare) :]
    raise UserError(f"the words of {sentence!r} cannot be shuffled: {TRIES} tries gave no other order")


def _is_usable(sentence: str) -> bool:
    bare = FINAL_MARK.sub("", sentence)
    words = bare.split()
    return (
        bare != sentence
        and FEWEST_WORDS <= len(words) <= MOST_WORDS
        and len({word.lower() for word in words}) >= FEWEST_WORDS
        and sentence[0].isupper()
        and words[-1][-1] not in ",;:"
        and all(map(_has_its_marks_in_pairs, words))
        and "\t" not in sentence
    )


def _has_its_marks_in_pairs(word: str) -> bool:
    """Whether no quote or bracket of the word has its partner elsewhere: torn apart they would give the answer away."""
    in_single_quotes = word.startswith("'") == word.rstrip(",;:").endswith("'")
    return in_single_quotes and word.count('"') % 2 == 0 and all(word.count(a) == word.count(b) for a, b in BRACKETS)
