"""BPE on counted words is BPE on the sentences, in any order of the words, on any machine."""

import io
import random
import string

import sentencepiece
from helpers import count_words

from lazyformer_fairseq.data.text.normalisation import TextSettings
from lazyformer_fairseq.data.text.tokenizer import LONGEST_TRAINING_WORD, train_model

ALL_CHARACTERS = TextSettings(character_coverage=1.0)
SYMBOLS_BESIDE_PIECES = 7  # <s> <pad> </s> <url> <email> <file> <mask>
TEXT = [
    " ".join(random.Random(n).choices("the house houses mouse old older of king".split(), k=9)) + f" {n} ."
    for n in range(200)
]


def pieces_of(model):
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    return [processor.id_to_piece(index) for index in range(processor.get_piece_size())]


def pieces_by_sentences(sentences, vocab_size, character_coverage=1.0):
    """sentencepiece's usual way."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocab_size - SYMBOLS_BESIDE_PIECES,
        character_coverage=character_coverage,
        normalization_rule_name="identity",
        unk_id=0,
        bos_id=-1,
        eos_id=-1,
        pad_id=-1,
        minloglevel=2,
    )
    return pieces_of(model.getvalue())


def test_same_pieces_as_from_sentences():
    assert pieces_of(train_model(count_words(TEXT), 80, ALL_CHARACTERS)) == pieces_by_sentences(TEXT, 80)


def test_same_pieces_as_from_sentences_of_wikitext(real_data):
    text = (real_data / "lm/wikitext-2/wiki.valid.tokens").read_text(encoding="utf-8").lower()
    lines = [line for line in text.replace("<unk>", "").splitlines() if line.strip()]
    ours = pieces_of(train_model(count_words(lines), 8000, TextSettings()))
    assert ours == pieces_by_sentences(lines, 8000, TextSettings().character_coverage)


def test_counts_beyond_32_bits():
    counts = [("ab", 2**33), ("cd", 2**32 + 1), ("ef", 2**31)]
    assert pieces_of(train_model(counts, 19, ALL_CHARACTERS))[1:5] == ["ab", "▁ab", "cd", "▁cd"]


def test_a_very_long_word():
    counts = [("x" * (1 << 21), 1), ("猫" * (LONGEST_TRAINING_WORD + 1), 1), (string.ascii_lowercase, 3)]
    assert {"xx", "猫猫"} <= set(pieces_of(train_model(counts, 60, ALL_CHARACTERS)))


def test_symbols_are_not_learnt_from():
    counts = [*count_words(TEXT), ("<url>", 10_000), ("a<mask>b", 10_000), ("<UNK>", 10_000)]
    pieces = pieces_of(train_model(counts, 80, ALL_CHARACTERS))
    assert not any("<" in piece or "mask" in piece for piece in pieces[1:])
