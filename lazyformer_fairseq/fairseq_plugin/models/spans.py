"""What a head says of a dataset, and a model's answers to questions on texts."""

from collections.abc import Iterator
from typing import Optional

import numpy as np
import torch
from fairseq.models import BaseFairseqModel
from fairseq.utils import apply_to_sample
from tqdm import tqdm

from lazyformer_fairseq.data.datasets.labelled_texts import LabelledTextsDataset
from lazyformer_fairseq.data.datasets.question_windows import USUAL_ANSWERS, FoundAnswer, QuestionWindowsDataset


def find_answers(
    model: BaseFairseqModel,
    head: str,
    dataset: QuestionWindowsDataset,
    n_best: int = USUAL_ANSWERS,
    max_tokens: int = 4096,
    name: Optional[str] = None,
) -> list[list[FoundAnswer]]:
    """For each question of a dataset the `n_best` answers, the best first, as the context has them.

    Args:
        model: in evaluation mode, on any device.
        head: the name of its head for spans.
        max_tokens: of a batch, padding included; one window at least.
        name: of the progress bar; None for no bar.
    """
    collector = dataset.collector(n_best)
    for index, logits_BT2 in logits_of(model, head, dataset, max_tokens, name, "windows"):
        collector.add(index, logits_BT2[..., 0], logits_BT2[..., 1])
    return collector.answers()


@torch.no_grad()
def logits_of(
    model: BaseFairseqModel, head: str, dataset: LabelledTextsDataset, max_tokens: int, name: Optional[str], unit: str
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Of batches of like lengths, the numbers of the examples (B,) and a head's logits, float32.

    Args:
        max_tokens: of a batch, padding included; one example at least.
        name: of the progress bar, which counts `unit`; None for no bar.
    """
    device = next(model.parameters()).device
    batches = dataset.batch_by_size(dataset.ordered_indices(), max_tokens=max(max_tokens, int(dataset.sizes.max())))
    bar = tqdm(total=len(dataset), desc=name, unit=f" {unit}", delay=2, disable=None if name else True, leave=False)
    with bar as progress:
        for batch in batches:
            sample = dataset.collater([dataset[index] for index in batch])
            inputs = apply_to_sample(lambda tensor: tensor.to(device), sample["net_input"])
            yield sample["id"].numpy(), model(**inputs, classification_head_name=head)[0].float().cpu().numpy()
            progress.update(len(batch))
