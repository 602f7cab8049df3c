"""A fine-tuning task in one file, as somebody would add it: does a text say its first word again?"""

from pathlib import Path

import numpy as np

from lazyformer_fairseq.data.glue import DIAGNOSTICS, TaskDescription, made_splits
from lazyformer_fairseq.data.prepared_folder import EncodedExamples
from lazyformer_fairseq.data.text.tokenizer import load_tokenizer
from lazyformer_fairseq.finetuning.made import CONSTANT, Draws, MadeBenchmark, constant_answer, write_prepared

WORDS = ("anna", "ben", "garden", "mirror", "river", "house")
DIAGNOSTICS["Repeats"] = TaskDescription("Repeats", made_splits(("text",)), ("accuracy",), ("no", "yes"))


def make_repeats(folder: Path, tokenizer_folder: Path, rows: int) -> None:
    """Writes a folder of `rows` texts of four words for each split."""
    tokenizer, draws, splits = load_tokenizer(tokenizer_folder), Draws(1), {}
    for split in ("train", "valid", "test"):
        words = draws.below(len(WORDS), 4 * rows).reshape(rows, 4)
        inputs = [np.array(tokenizer.build_input(" ".join(WORDS[word] for word in row)), np.int32) for row in words]
        splits[split] = EncodedExamples(inputs, (words[:, 1:] == words[:, :1]).any(1).astype(np.int64))
    rules = {CONSTANT: constant_answer(splits["train"].targets, splits["test"].targets)}
    folder.mkdir()
    write_prepared(folder, "Repeats", {"rows": rows}, tokenizer, splits, rules)


class Repeats(MadeBenchmark):
    name, key = "Repeats", "repeats"


BENCHMARK = Repeats()
