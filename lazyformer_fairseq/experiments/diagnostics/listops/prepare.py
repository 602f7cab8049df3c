"""ListOps as a folder to train on (``lazyformer tasks listops``).

An input is ``[CLS] MAX 2 9 MIN 4 7 ] 0 ] [SEP]``: Nangia and Bowman's parentheses around every pair of neighbours are
left out, as Long Range Arena's own input pipeline does before it makes ids. They say nothing that the operators' ends
do not say, and would triple the length.
"""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from tqdm import tqdm

from lazyformer_fairseq.data.glue.prepared_data import EncodedExamples
from lazyformer_fairseq.data.text.interface import TextTokenizer
from lazyformer_fairseq.data.text.library_tokenizer import adopt_tokenizer
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.diagnostics.draws import Draws
from lazyformer_fairseq.experiments.diagnostics.listops.expressions import DIGITS, END, SYMBOLS, draw_expressions
from lazyformer_fairseq.experiments.diagnostics.listops.settings import OPERATORS, ListOpsSettings
from lazyformer_fairseq.experiments.diagnostics.prepared import write_prepared
from lazyformer_fairseq.experiments.diagnostics.rules import CONSTANT, bag_of_words, constant_answer, frequent_by_group
from lazyformer_fairseq.storage.atomic import atomic_folder, refuse_filled_folder

SPECIAL = ("[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]")
FIRST_SYMBOL = len(SPECIAL)
VAIN_BATCHES = 30  # in a row without a new expression: there are no more, or hardly any


def prepare_listops(settings: ListOpsSettings, out: Path) -> dict[str, Any]:
    """Draws the examples and writes `out`, whole or not at all; returns the manifest.

    The data is the same for the same settings, on every machine.

    Raises:
        UserError: there are not as many different expressions; or `out` holds something.
    """
    refuse_filled_folder(out)
    with atomic_folder(out) as folder, TemporaryDirectory() as scratch:
        tokenizer = listops_tokenizer(Path(scratch))
        splits, drawn = {}, distinct_expressions(settings)
        with tqdm(total=sum(settings.rows.values()), desc="draw", unit=" expressions", disable=None) as progress:
            for split, rows in settings.rows.items():
                splits[split] = _encoded(drawn, rows, progress)
        return write_prepared(
            folder, "ListOps", settings.as_json(), tokenizer, splits, simple_rules(splits["train"], splits["test"])
        )


def listops_tokenizer(scratch: Path) -> TextTokenizer:
    """The tokenizer of the expressions as text, ``MAX 2 9 ]``: each word is one id."""
    source = scratch / "vocabulary"
    source.mkdir()
    (source / "vocab.txt").write_text("".join(f"{symbol}\n" for symbol in (*SPECIAL, *SYMBOLS)))
    return adopt_tokenizer(source, scratch / "tokenizer")


def distinct_expressions(settings: ListOpsSettings) -> Iterator[tuple[np.ndarray, int]]:
    """Symbols and value of one new expression after the other.

    Raises:
        UserError: no new one is found.
    """
    draws, seen, vain = Draws(settings.seed), set(), 0
    while vain < VAIN_BATCHES:
        vain += 1
        for symbols, value in draw_expressions(draws, settings):
            key = symbols.tobytes()
            if key not in seen:
                seen.add(key)
                vain = 0
                yield symbols, value
    raise UserError(
        f"found only {len(seen):,} different expressions of {settings.min_length} to {settings.max_length} tokens, "
        f"{sum(settings.rows.values()):,} are wanted; give more --max-depth, --max-arguments or --operators, a wider "
        "range of lengths, or fewer examples"
    )


def _encoded(drawn: Iterator[tuple[np.ndarray, int]], rows: int, progress: tqdm) -> EncodedExamples:
    bos, eos = SPECIAL.index("[CLS]"), SPECIAL.index("[SEP]")
    inputs, targets = [], []
    for _ in range(rows):
        symbols, value = next(drawn)
        inputs.append(np.concatenate([[bos], FIRST_SYMBOL + symbols.astype(np.int32), [eos]]).astype(np.int32))
        targets.append(value)
        progress.update()
    return EncodedExamples(inputs, np.array(targets, dtype=np.int64))


def simple_rules(train: EncodedExamples, test: EncodedExamples) -> dict[str, float]:
    """Accuracy on test of what needs no nested operation, by rule."""
    outer = [[int(ids[1]) for ids in examples.inputs] for examples in (train, test)]
    usual = np.bincount(train.targets).argmax()
    shallow = [outermost_alone(ids, usual) for ids in test.inputs]
    return {
        CONSTANT: constant_answer(train.targets, test.targets),
        "the most frequent class of the first operator": frequent_by_group(
            outer[0], train.targets, outer[1], test.targets
        ),
        "the first operator on those of its arguments that are digits": float(np.mean(test.targets == shallow)),
        "how often each symbol occurs (logistic regression)": bag_of_words(train, test, FIRST_SYMBOL + len(SYMBOLS)),
    }


def outermost_alone(ids: np.ndarray, otherwise: int) -> int:
    """The first operator's value on its own digits, as if nothing else stood there; `otherwise` where it has none."""
    symbols = ids[1:-1] - FIRST_SYMBOL
    opens, ends = (symbols >= DIGITS) & (symbols < END), symbols == END
    depth = np.cumsum(opens) - np.cumsum(ends)
    digits = symbols[(symbols < DIGITS) & (depth == 1)]
    if not len(digits):
        return int(otherwise)
    apply = {"MAX": np.max, "MIN": np.min, "MED": np.median, "SM": lambda values: values.sum() % DIGITS}
    return int(apply[OPERATORS[symbols[0] - DIGITS]](digits))
