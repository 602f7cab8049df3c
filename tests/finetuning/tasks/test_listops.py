"""ListOps: expressions, their values, the folder."""

import hashlib
import random
import statistics
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from in_process import invoke, refusal

from lazyformer_fairseq.data.prepared_folder import PreparedDiagnostic, load_prepared
from lazyformer_fairseq.data.text.tokenizer import load_tokenizer
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.finetuning.made import Draws
from lazyformer_fairseq.finetuning.tasks import listops

SMALL = listops.ListOpsSettings(
    {"train": 60, "valid": 8, "test": 12}, min_length=6, max_length=40, max_depth=4, max_arguments=5, seed=3
)


def text_of(symbols) -> str:
    return " ".join(listops.SYMBOLS[symbol] for symbol in symbols)


@settings(max_examples=25)
@given(
    depth=st.integers(2, 6),
    arguments=st.integers(2, 10),
    shortest=st.integers(1, 60),
    room=st.integers(0, 80),
    operators=st.sets(st.sampled_from(listops.OPERATORS), min_size=1),
    seed=st.integers(0, 2**40),
)
def test_expressions_are_as_the_settings_say(depth, arguments, shortest, room, operators, seed):
    longest = max(4, shortest + room)
    try:
        chosen = listops.ListOpsSettings(
            min_length=shortest, max_length=longest, max_depth=depth, max_arguments=arguments,
            operators=tuple(operators), seed=seed,
        )  # fmt: skip
    except UserError:
        assert shortest > (arguments ** (depth - 1) * (arguments + 1) - 2) / (arguments - 1)  # the full tree's tokens
        return
    drawn = list(listops.draw_expressions(Draws(seed), chosen))
    for symbols, value in drawn[:: max(1, len(drawn) // 40)]:
        text = text_of(symbols)
        assert evaluate(text) == value
        assert shortest <= len(symbols) <= longest
        assert depth_of(text) <= depth
        assert max(arguments_of(text)) <= arguments
        assert set(text.split()) <= {*operators, *map(str, range(10)), "]"}


def reference_tree(chance: random.Random, depth: int, chosen: listops.ListOpsSettings) -> str:
    """As Long Range Arena describes its generator, one node at a time."""
    if depth == chosen.max_depth or chance.random() > 0.25:
        return str(chance.randrange(10))
    inner = (reference_tree(chance, depth + 1, chosen) for _ in range(chance.randint(2, chosen.max_arguments)))
    return f"{chance.choice(chosen.operators)} {' '.join(inner)} ]"


def test_lengths_values_and_operators_are_distributed_as_a_plain_generator_has_them():
    chosen = replace(SMALL, min_length=4, max_length=30, max_depth=3)
    chance, trees = random.Random(1), []
    while len(trees) < 4000:
        tree = reference_tree(chance, 1, chosen)
        if 4 <= len(tree.split()) <= 30:
            trees.append(tree)
    ours = [text_of(symbols) for symbols, _ in listops.draw_expressions(Draws(1), chosen)]
    for measure, bins in (
        (lambda tree: len(tree.split()), 31),
        (evaluate, 10),
        (lambda tree: listops.OPERATORS.index(tree.split()[0]), 4),
        (depth_of, 4),
    ):
        shares = [np.bincount([measure(tree) for tree in some], minlength=bins) / len(some) for some in (trees, ours)]
        assert np.abs(shares[0] - shares[1]).max() < 0.03  # of 4,000, three standard deviations of a share of a half
    long = list(listops.draw_expressions(Draws(7), listops.ListOpsSettings(max_length=600)))[:60]
    assert all(evaluate(text_of(symbols)) == value for symbols, value in long)
    assert max(depth_of(text_of(symbols)) for symbols, _ in long) == 10


def test_draws_are_uniform_and_the_first_never_change():
    """numpy promises as much of raw bits alone."""
    assert Draws(1).below(10, 12).tolist() == [5, 9, 1, 9, 3, 4, 8, 4, 5, 0, 7, 5]
    symbols, value = next(listops.distinct_expressions(SMALL))
    assert (text_of(symbols), value) == ("SM 2 MED MAX 6 2 1 8 8 ] 7 MIN 2 2 6 0 8 ] ] ]", 9)
    counts = np.bincount(Draws(5).below(7, 70_000), minlength=7)
    assert np.abs(counts - 10_000).max() < 400  # four standard deviations
    assert sorted(Draws(5).permutation(50)) == list(range(50))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """By the command, which prints its report."""
    folder = tmp_path_factory.mktemp("listops") / "data"
    rows = "--train 60 --valid 8 --test 12 --min-length 6 --max-length 40 --max-depth 4 --max-arguments 5 --seed 3"
    printed = invoke("diagnostics", "listops", folder, *rows.split())
    assert "first operator" in printed and (folder / "report.md").read_text().strip() in printed
    return load_prepared(folder)


def test_the_folder_holds_what_the_manifest_says(prepared):
    assert isinstance(prepared, PreparedDiagnostic)
    tokenizer = load_tokenizer(prepared.tokenizer_folder)
    texts = []
    for split, rows in SMALL.rows.items():
        examples = prepared.read(split, None, tokenizer.special.eos)
        assert len(examples.inputs) == rows
        for ids, target in zip(examples.inputs, examples.targets, strict=True):
            assert (ids[0], ids[-1]) == (tokenizer.special.bos, tokenizer.special.eos)
            text = tokenizer.decode(ids)
            assert evaluate(text) == target
            assert list(tokenizer.build_input(text)) == list(ids)
            texts.append(text)
        counts = prepared.manifest["splits"][split]
        assert list(counts["labels"].values()) == np.bincount(examples.targets, minlength=10).tolist()
        assert counts["longest"] == max(map(len, examples.inputs))
    assert len(set(texts)) == len(texts)  # none in two splits


def test_the_same_seed_gives_the_same_bytes(prepared, tmp_path):
    listops.prepare_listops(SMALL, tmp_path / "again")
    listops.prepare_listops(replace(SMALL, seed=4), tmp_path / "other")
    files = sorted(path.relative_to(prepared.folder) for path in prepared.folder.rglob("*") if path.is_file())
    assert len(files) > 10
    for file in files:
        assert (tmp_path / "again" / file).read_bytes() == (prepared.folder / file).read_bytes(), file
    assert (tmp_path / "other" / "train.bin").read_bytes() != (prepared.folder / "train.bin").read_bytes()
    assert hashlib.sha256((prepared.folder / "train.bin").read_bytes()).hexdigest()[:16] == "a3bafd2433d31996"


def test_rules_that_need_no_model(prepared):
    tokenizer = load_tokenizer(prepared.tokenizer_folder)
    values = {"MAX 2 MIN 4 7 ] 3 ]": 3, "SM 7 8 ]": 5, "MED MAX 1 2 ] MAX 3 4 ] ]": 6, "MED 1 4 ]": 2}
    for text, value in values.items():
        assert listops.outermost_alone(np.array(tokenizer.build_input(text)), otherwise=6) == value
    targets = prepared.read("test", None, 2).targets
    usual = np.bincount(prepared.read("train", None, 2).targets).argmax()
    assert prepared.manifest["rules"]["constant: the most frequent class"] == round(np.mean(targets == usual), 4)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("--min-length 50 --max-length 60 --max-depth 2", "no expression has more than 12 tokens"),
        ("--min-length 30 --max-length 20", "shortest expression has 4"),
        ("--max-depth 1", "give 2 or more of both"),
        ("--operators MAX,MEAN", "'MEAN' is none of"),
        ("--min-length 4 --max-length 4 --max-depth 2 --max-arguments 2 --operators MIN", "only 100 different"),
    ],
)
def test_impossible_settings_are_refused(options, reason, tmp_path):
    assert reason in refusal("diagnostics", "listops", tmp_path / "out", *options.split())
    assert not list(tmp_path.iterdir())


# --- expressions as text, evaluated by recursive descent with none of our code

APPLY = {
    "MAX": max,
    "MIN": min,
    "MED": lambda values: int(statistics.median(values)),
    "SM": lambda values: sum(values) % 10,
}


def evaluate(text: str) -> int:
    """The value of ``MAX 2 MIN 4 7 ] 0 ]``."""
    value, rest, _ = _read(text.split())
    assert not rest, f"{rest} is left over"
    return value


def depth_of(text: str) -> int:
    """Levels: 2 for an operator on digits alone."""
    return _read(text.split())[2]


def arguments_of(text: str) -> set[int]:
    """The numbers of arguments that operators have."""
    found, open_ones = set(), []
    for word in text.split():
        if word == "]":
            found.add(open_ones.pop())
        if word in APPLY:
            open_ones.append(-1)
        if word != "]" and open_ones:
            open_ones[-1] += 1
            if word in APPLY and len(open_ones) > 1:
                open_ones[-2] += 1
    assert not open_ones
    return found


def _read(words: list[str]) -> tuple[int, list[str], int]:
    """The value of the first expression, the words after it, and its levels."""
    word, *rest = words
    if word not in APPLY:
        return int(word), rest, 1
    values, depths = [], []
    while rest[0] != "]":
        value, rest, depth = _read(rest)
        values.append(value)
        depths.append(depth)
    assert len(values) > 1
    return APPLY[word](values), rest[1:], 1 + max(depths)
