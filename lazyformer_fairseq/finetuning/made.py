"""What made tasks share: random numbers, rules that a model must beat, and the folder that is written.

The numbers are the same on every machine and with every version of numpy. numpy promises this of the raw bits of its
generators and of nothing that is made of them, so whole numbers are made of the bits here.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lazyformer_fairseq.data.glue import DIAGNOSTICS
from lazyformer_fairseq.data.prepared_folder import MANIFEST, EncodedExamples, PreparedDiagnostic, write_split
from lazyformer_fairseq.data.text.interface import DICTIONARY_FILE, TextTokenizer
from lazyformer_fairseq.data.text.tokenizer import tokenizer_hashes
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.finetuning.benchmark import Score, TextsBenchmark
from lazyformer_fairseq.finetuning.paper_numbers import LAZYFORMER, PROTOCOLS
from lazyformer_fairseq.finetuning.settings import GridSettings
from lazyformer_fairseq.report.tables import markdown_table
from lazyformer_fairseq.storage.json_files import write_json

HIGH_BITS = np.uint64(32)


class Draws:
    """A stream of random numbers.

    Args:
        seed: the stream depends on it alone.
    """

    def __init__(self, seed: int):
        self._bits = np.random.PCG64(seed)

    def below(self, limit: int, count: int) -> np.ndarray:
        """Whole numbers from 0 to `limit` - 1, each as likely but for one part in 2^32 / `limit`; int64 (count,)."""
        assert 0 < limit < 1 << 32
        return ((self._bits.random_raw(count) >> HIGH_BITS) * np.uint64(limit) >> HIGH_BITS).astype(np.int64)

    def permutation(self, count: int) -> np.ndarray:
        """The numbers from 0 to `count` - 1 in random order, int64 (count,)."""
        return np.argsort(self._bits.random_raw(count), kind="stable")


MOST_ROWS = 10_000  # that a linear model is fitted to
CONSTANT = "constant: the most frequent class"


def constant_answer(train: np.ndarray, test: np.ndarray) -> float:
    """Accuracy on test of the class that is most frequent in train."""
    return float(np.mean(test == np.bincount(train).argmax()))


def frequent_by_group(train: Sequence, train_targets: np.ndarray, test: Sequence, test_targets: np.ndarray) -> float:
    """Accuracy on test of the class that is most frequent in train among the examples of the same group.

    Args:
        train, test: the group of each example; that of a new group gets the most frequent class of all.
    """
    train, test = np.asarray(train), np.asarray(test)
    usual = np.bincount(train_targets).argmax()
    answers = {group: np.bincount(train_targets[train == group]).argmax() for group in np.unique(train).tolist()}
    return float(np.mean(test_targets == np.array([answers.get(group, usual) for group in test.tolist()])))


def bag_of_words(train: EncodedExamples, test: EncodedExamples, symbols: int) -> float:
    """Accuracy on test of logistic regression on the share of each symbol in an input, whatever its place."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import MaxAbsScaler

    if len(np.unique(train.targets[:MOST_ROWS])) < 2:
        return constant_answer(train.targets, test.targets)
    model = make_pipeline(MaxAbsScaler(), LogisticRegression(max_iter=200))
    model.fit(_shares(train.inputs[:MOST_ROWS], symbols), train.targets[:MOST_ROWS])
    return float(model.score(_shares(test.inputs, symbols), test.targets))


def _shares(inputs: Sequence[np.ndarray], symbols: int):
    """Sparse (examples, symbols)."""
    from scipy.sparse import csr_matrix

    rows = np.repeat(np.arange(len(inputs)), [len(ids) for ids in inputs])
    values = np.concatenate([np.full(len(ids), 1 / len(ids)) for ids in inputs])
    return csr_matrix((values, (rows, np.concatenate(inputs))), shape=(len(inputs), symbols))


def shared_words(train: EncodedExamples, test: EncodedExamples, symbols: int, eos: int) -> float:
    """Accuracy on test of calling a pair's halves of one document where they share enough rare words.

    That is the cosine of their counts, each weighted by how few halves have the word; the bound is the best on train.
    """
    inputs, targets = train.inputs[:MOST_ROWS], train.targets[:MOST_ROWS]
    having = sum(np.asarray((counts > 0).sum(0)).ravel() for counts in _halves(inputs, symbols, eos))
    weight = np.log((1 + 2 * len(inputs)) / (1 + having))
    known = _likeness(inputs, symbols, eos, weight)
    order = np.argsort(known)
    below_is_right = np.cumsum(np.append(0, targets[order] == 0))
    above_is_right = np.cumsum(np.append(0, targets[order][::-1] == 1))[::-1]
    best = int(np.argmax(below_is_right + above_is_right))
    bound = known[order[best]] if best < len(order) else np.inf
    return float(np.mean((_likeness(test.inputs, symbols, eos, weight) >= bound) == test.targets))


def _halves(inputs: Sequence[np.ndarray], symbols: int, eos: int) -> tuple:
    """Counts of the words of the first and of the second halves, sparse (examples, symbols) each."""
    parts = [(ids[1:], np.flatnonzero(ids == eos)) for ids in inputs]
    firsts = [ids[: ends[0] - 1] for ids, ends in parts]
    seconds = [ids[ends[-2] : ends[-1] - 1] for ids, ends in parts]
    return _shares(firsts, symbols), _shares(seconds, symbols)


def _likeness(inputs: Sequence[np.ndarray], symbols: int, eos: int, weight: np.ndarray) -> np.ndarray:
    """The cosine of the two halves' weighted counts, (examples,)."""
    first, second = (counts.multiply(weight).tocsr() for counts in _halves(inputs, symbols, eos))
    lengths = [np.sqrt(np.asarray(half.multiply(half).sum(1)).ravel()) for half in (first, second)]
    return np.asarray(first.multiply(second).sum(1)).ravel() / np.maximum(lengths[0] * lengths[1], 1e-12)


REPORT = "report.md"


def write_prepared(
    folder: Path,
    task: str,
    settings: Mapping[str, Any],
    tokenizer: TextTokenizer,
    splits: Mapping[str, EncodedExamples],
    rules: Mapping[str, float],
    **notes: Any,
) -> dict[str, Any]:
    """Writes a folder that is there already; returns its manifest.

    Args:
        task: its name in DIAGNOSTICS.
        settings: that decide the data.
        splits: encoded examples by split.
        rules: accuracy on the test split of what a model must beat, the constant first.
        notes: further facts on the data.
    """
    tokenizer.save(folder / "tokenizer")
    (folder / DICTIONARY_FILE).write_bytes((folder / "tokenizer" / DICTIONARY_FILE).read_bytes())
    manifest = {
        **{"format": PreparedDiagnostic.FORMAT, "format_version": PreparedDiagnostic.FORMAT_VERSION},
        **{"task": task, "settings": settings, "tokenizer": tokenizer_hashes(folder / "tokenizer")},
        "dictionary_size": len(tokenizer.dictionary),
        "splits": {name: _write(folder, name, task, examples, tokenizer) for name, examples in splits.items()},
        "rules": {name: round(accuracy, 4) for name, accuracy in rules.items()},
        **notes,
    }
    (folder / REPORT).write_text(f"{report_of(manifest)}\n", encoding="utf-8")
    write_json(folder / MANIFEST, manifest, durable=False)
    return manifest


def _write(folder: Path, split: str, task: str, examples: EncodedExamples, tokenizer: TextTokenizer) -> dict[str, Any]:
    """Writes a split; returns its entry in the manifest."""
    write_split(folder, split, examples, len(tokenizer.dictionary))
    sizes = np.array([len(ids) for ids in examples.inputs])
    counts = np.bincount(examples.targets, minlength=len(DIAGNOSTICS[task].labels))
    return {
        "rows": len(sizes),
        "bytes": (folder / f"{split}.bin").stat().st_size,
        "labels": dict(zip(DIAGNOSTICS[task].labels, counts.tolist(), strict=True)),
        **{"tokens": int(sizes.sum()), "shortest": int(sizes.min())},
        **{"median": int(np.median(sizes)), "longest": int(sizes.max())},
    }


def report_of(manifest: Mapping[str, Any]) -> str:
    """The report of the data, in Markdown: lengths, balance of classes, and what simple rules reach."""
    rows = [
        {
            "split": split,
            "examples": f"{counts['rows']:,}",
            "tokens of an input": f"{counts['shortest']:,} to {counts['longest']:,}, median {counts['median']:,}",
            **{name: f"{count / counts['rows']:.1%}" for name, count in counts["labels"].items()},
        }
        for split, counts in manifest["splits"].items()
    ]
    rules = [{"rule": name, "accuracy on test": f"{value:.1%}"} for name, value in manifest["rules"].items()]
    parts = [f"# {manifest['task']}", "All symbols of an input are counted, those at its ends too."]
    parts.append(markdown_table(rows, left=("tokens of an input",)))
    parts.append("What needs no model; one that does not beat the best of these has learnt nothing worth its time:")
    return "\n\n".join([*parts, markdown_table(rules)])


class MadeBenchmark(TextsBenchmark):
    """A task whose data are made, not official: a grid takes the folder that was made by --data.

    Models are those whose dictionary is the data's, as after self-pretraining on its inputs.
    """

    names_task = False

    def __init_subclass__(cls, **more: Any):
        super().__init_subclass__(**more)
        cls.tasks = {cls.name: DIAGNOSTICS[cls.name]}
        cls.protocols = {LAZYFORMER: PROTOCOLS[LAZYFORMER]._replace(tasks=(cls.name,))}
        cls.scores = (Score("accuracy", cls.name, "valid", "accuracy", "accuracy"),)

    def prepare(self, wanted: GridSettings, positions: Collection[int] = ()) -> str:
        raise UserError(f"--data: {self.name} is made by `lazyformer diagnostics {self.key}`; give its folder")

    def load(self, folder: Path, names: Sequence[str]) -> dict[str, PreparedDiagnostic]:
        prepared = PreparedDiagnostic.load(folder)
        if prepared.task.name != self.name:
            raise UserError(f"{folder}: holds {prepared.task.name}, not {self.name}")
        return {self.name: prepared}
