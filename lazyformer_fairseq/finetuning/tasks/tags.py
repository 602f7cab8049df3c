"""Custom tagging tasks, defined by a folder with train.conll and dev.conll, which have one tag per word."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np

from lazyformer_fairseq.data.labelled_files import CONLL, read_split, words_of
from lazyformer_fairseq.data.prepared_folder import PreparedCustomTask, sample_row_indices
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation.metrics import count_tags
from lazyformer_fairseq.finetuning.grid import Run
from lazyformer_fairseq.finetuning.settings import GridSettings
from lazyformer_fairseq.finetuning.tasks.custom import CustomTask
from lazyformer_fairseq.training.objectives.tags import TagsObjective


class TaggedWords(CustomTask):
    """A custom task that tags words, such as named entity recognition or part-of-speech tagging."""

    options = frozenset(("max_length", "max_train_rows", "glue_head", "metric", "dev_share"))
    baseline_name = "most frequent tag of each word"
    EXAMPLE_FILE = f"texts{CONLL}"

    def extra_settings(self, given: GridSettings, prepared: Mapping[str, PreparedCustomTask]) -> dict[str, Any]:
        """Return the head's dropout and the task's description.

        Raises:
            UserError: the requested head is not linear.
        """
        found = super().extra_settings(given, prepared)
        if given.glue_head and found["head"] != "linear":
            raise UserError(
                f"--glue-head {given.glue_head}: tagging requires a linear head; linear:0.1 sets the head's dropout"
            )
        return found

    def objective(self, run: Run) -> TagsObjective:
        """Return the tagging objective."""
        return TagsObjective(**self.arguments_of(run))

    def baseline(self, run: Run, split: str) -> dict[str, float]:
        """Return the metrics of a baseline that tags each word with the word's most frequent training tag.

        Words that do not occur in the training data get the tag that is most frequent overall.
        """
        tags_of: dict[str, Counter[int]] = defaultdict(Counter)
        examples = read_split(self.row, run.data.folder, "train").examples
        for index in sample_row_indices(len(examples), run.train_rows):
            example = examples[index]
            for word, tag in zip(words_of(example.texts[0]), example.target, strict=True):
                tags_of[word][tag] += 1
        usual = sum(tags_of.values(), Counter())
        rows = []
        for example in read_split(self.row, run.data.folder, split).examples:
            predicted = []
            for word in words_of(example.texts[0]):
                tag, _ = tags_of.get(word, usual).most_common(1)[0]
                predicted.append(self.row.labels[tag])
            target = [self.row.labels[tag] for tag in example.target]
            rows.append(count_tags(predicted, target))
        return {name: TagsObjective.metric(name, np.array(rows)) for name in self.row.metrics}
