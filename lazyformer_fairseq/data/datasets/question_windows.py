"""Windows of questions and contexts in batches, and what a model's logits of them say."""

from typing import Optional

import numpy as np
import torch

from lazyformer_fairseq.data.datasets.labelled_texts import LabelledTextsDataset
from lazyformer_fairseq.data.squad.answers import FoundAnswer, SpanCollector
from lazyformer_fairseq.data.squad.official import SquadFile
from lazyformer_fairseq.data.squad.windows import Windows


class QuestionWindowsDataset(LabelledTextsDataset):
    """Inputs of a file's questions; the target of each is where the answer starts and ends in it, (2,).

    Args:
        file: the questions.
        windows: made of it.
        split: its name; batches carry it.
        longest_answer: tokens.
        pad, shuffle, seed, types_after: as of LabelledTextsDataset.
        marks_questions: batches have `global_positions` in `net_input`, True at tokens of the question and ``<s>``.
    """

    def __init__(
        self,
        file: SquadFile,
        windows: Windows,
        split: str,
        longest_answer: int,
        pad: int,
        shuffle: bool,
        seed: int = 1,
        types_after: Optional[int] = None,
        marks_questions: bool = False,
    ):
        super().__init__(windows.inputs, windows.targets, pad, shuffle, seed, types_after)
        self.file = file
        self.windows = windows
        self.split = split
        self.longest_answer = longest_answer
        self.marks_questions = marks_questions

    def collater(self, samples: list[dict]) -> dict:
        """As of LabelledTextsDataset, `target` (B, 2), and the `split`."""
        batch = super().collater(samples)
        if not batch:
            return batch
        batch["split"] = self.split
        if self.marks_questions:
            places = torch.from_numpy(self.windows.place[batch["id"].numpy()])
            # The separator before the context is not marked.
            positions = torch.arange(batch["net_input"]["src_tokens"].size(1))
            batch["net_input"]["global_positions"] = positions < places[:, None]
        return batch

    def collector(self, n_best: int) -> SpanCollector:
        """Takes logits of the windows, and gives the `n_best` answers to each question."""
        return SpanCollector(self.windows, self.file.contexts, self.longest_answer, n_best)

    def best_answers(self, index: np.ndarray, logits_BT2: np.ndarray) -> list[Optional[FoundAnswer]]:
        """The best answer of each of the windows `index` (B,); None where a window has none.

        Args:
            logits_BT2: of starts and ends; inputs may be padded on the right.
        """
        found = self.collector(n_best=1).spans(index, logits_BT2[..., 0], logits_BT2[..., 1])
        return [answers[0] if answers else None for answers in found]
