"""The tokenizer folder: loading it, damaged ones, and models of one's own."""

import hashlib
import json

import pytest
import sentencepiece
from toy_tokenizer import SENTENCES, symbols, train

from lazyformer_fairseq.data.text.normalisation import TextSettings
from lazyformer_fairseq.data.text.tokenizer import FORMAT_VERSION, Tokenizer
from lazyformer_fairseq.errors import UserError


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return train(tmp_path_factory.mktemp("trained") / "tokenizer")


@pytest.fixture
def copy(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "copy")
    tokenizer.save(tmp_path / "copy")  # the same again: nothing to do
    return tmp_path / "copy"


def describe(folder, **changes):
    """Rewrites tokenizer.json, with the true hashes of what lies there."""
    path = folder / "tokenizer.json"
    description = json.loads(path.read_text())
    for name in description["sha256"]:
        description["sha256"][name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    path.write_text(json.dumps({**description, **changes}))


def test_a_copy_is_the_same_tokenizer(tokenizer, copy):
    loaded = Tokenizer.load(copy)
    assert loaded.settings == tokenizer.settings
    assert loaded.dictionary == tokenizer.dictionary
    assert loaded.encode(SENTENCES[2]) == tokenizer.encode(SENTENCES[2])


def swap_two_symbols(folder):
    lines = (folder / "dict.txt").read_text().splitlines(keepends=True)
    (folder / "dict.txt").write_text("".join([lines[1], lines[0], *lines[2:]]))
    describe(folder)


def write_a_pickle(folder):
    (folder / "sentencepiece.model").write_bytes(b"\x80\x04cos\nsystem\n")
    describe(folder)


def remove(name):
    return lambda folder: (folder / name).unlink()


def truncate(name):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-20])


def write_description(text):
    return lambda folder: (folder / "tokenizer.json").write_text(text)


DAMAGE = [
    *((remove(name), f"{name}: cannot be read") for name in ("tokenizer.json", "sentencepiece.model", "dict.txt")),
    *((truncate(name), f"{name}: is not the file") for name in ("sentencepiece.model", "dict.txt")),
    (write_a_pickle, r"sentencepiece\.model: not a sentencepiece model"),
    (swap_two_symbols, r"dict\.txt: its symbols are not those of"),
    (lambda folder: describe(folder, format_version=FORMAT_VERSION + 1), r"tokenizer\.json: format version 2"),
    (lambda folder: describe(folder, settings={"lower_case": True}), r"byte_fallback.* is missing"),
    *((write_description(text), r"tokenizer\.json") for text in ("", "{", "[1]", "{}", '{"format_version": 1}')),
    (write_description('{"format_version": 1, "sha256": {}}'), r"tokenizer\.json: sha256 or settings is missing"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGE)
def test_a_damaged_folder_is_refused_and_the_file_named(copy, damage, message):
    damage(copy)
    with pytest.raises(UserError, match=message):
        Tokenizer.load(copy)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stemming": True}, "unknown text setting stemming"),
        ({"lower_case": "yes"}, "lower_case = 'yes'"),
        ({"language": "tlh"}, "language = 'tlh'"),
        ({"special_tokens": ["<mask>"]}, "special_tokens holds '<mask>'"),
        ({"special_tokens": "<url>"}, "special_tokens = '<url>'"),
        ({"character_coverage": 1.5}, "character_coverage = 1.5"),
    ],
)
def test_settings_that_are_not_possible(copy, changes, message):
    settings = json.loads((copy / "tokenizer.json").read_text())["settings"]
    describe(copy, settings={**settings, **changes})
    with pytest.raises(UserError, match=rf"tokenizer\.json: .*{message}"):
        Tokenizer.load(copy)


# A SentencePiece model of the user's own


def own_model(folder, **options):
    text = folder / "text.txt"
    text.write_text("\n".join(["The house of the old king is red.", "A cat sat on the mat; it was good."] * 20))
    options = {"model_type": "unigram", "vocab_size": 40, "hard_vocab_limit": False, **options}
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(folder / "own"), minloglevel=2, **options
    )
    return folder / "own.model"


PLAIN = TextSettings(lower_case=False, normalise_punctuation=False, moses_tokenise=False)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"model_type": "bpe", "vocab_size": 60, "hard_vocab_limit": True},
        {
            "unk_id": 2,
            "pad_id": 0,
            "eos_id": 1,
            "bos_id": -1,
            "unk_piece": "[UNK]",
            "control_symbols": "<cls>",
        },  # as T5
    ],
)
def test_a_model_of_ones_own(tmp_path, options):
    model = sentencepiece.SentencePieceProcessor(str(own_model(tmp_path, **options)))
    tokenizer = Tokenizer.from_model(tmp_path / "own.model", tmp_path / "own", PLAIN)
    text = "The cat <url> sat on the red house."
    pieces = [*model.encode("The cat", out_type=str), "<url>", *model.encode("sat on the red house.", out_type=str)]
    assert symbols(tokenizer, tokenizer.encode(text)) == pieces
    assert tokenizer.decode([0, *tokenizer.encode(text), 2]) == text
    assert tokenizer.encode("猫").count(tokenizer.dictionary.unk()) == 1
    ids, lengths = tokenizer.encode_words(text.split())
    assert ids.tolist() == tokenizer.encode(text) and len(lengths) == 8
    names = tokenizer.dictionary.symbols
    assert len(names) == len(set(names)) and names[-1] == "<mask>" and "[UNK]" not in names and "<cls>" not in names
    Tokenizer.load(tmp_path / "own").save(tmp_path / "copy")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split_by_whitespace": False, "model_type": "bpe", "vocab_size": 80}, "own.model: its piece .* over a space"),
        ({"add_dummy_prefix": False}, "own.model: a word has other pieces where a text begins"),
        ({"user_defined_symbols": "<mask>"}, "'<mask>' would be twice"),
    ],
)
def test_a_model_of_ones_own_that_cannot_be_used(tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        Tokenizer.from_model(own_model(tmp_path, **options), tmp_path / "own", PLAIN)
    assert not (tmp_path / "own").exists()


def test_a_file_that_is_no_model(tmp_path):
    (tmp_path / "own.model").write_text("no model")
    for name, message in (("own.model", "not a sentencepiece model"), ("missing", "cannot be read")):
        with pytest.raises(UserError, match=f"{name}: {message}"):
            Tokenizer.from_model(tmp_path / name, tmp_path / "own", PLAIN)
