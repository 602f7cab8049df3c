"""A small tokenizer of every ASCII character, for tests of tokenizers."""

import string

from helpers import train_tokenizer

from lazyformer_fairseq.data.text.normalisation import TextSettings

SENTENCES = [
    "The house of the old king is red, isn't it?",
    "A cat sat on the mat; it was “good” (so they said)...",
    "See <url> or write to <email> -- the kings' houses cost $5,300 each.",
    string.printable,  # every ASCII character gets a piece
]
ALL_CHARACTERS = TextSettings(character_coverage=1.0)


def train(folder, sentences=SENTENCES * 20, vocab_size=160, settings=ALL_CHARACTERS):
    return train_tokenizer(folder, sentences, vocab_size, settings)


def symbols(tokenizer, ids):
    return [tokenizer.dictionary[index] for index in ids]
