"""A model's answers to questions on texts."""

from typing import Optional

import torch
from fairseq.models import BaseFairseqModel
from fairseq.utils import apply_to_sample
from tqdm import tqdm

from lazyformer_fairseq.data.datasets.question_windows import QuestionWindowsDataset
from lazyformer_fairseq.data.squad.answers import USUAL_ANSWERS, FoundAnswer


@torch.no_grad()
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
    device = next(model.parameters()).device
    collector = dataset.collector(n_best)
    batches = dataset.batch_by_size(dataset.ordered_indices(), max_tokens=max(max_tokens, int(dataset.sizes.max())))
    bar = tqdm(total=len(dataset), desc=name, unit=" windows", delay=2, disable=None if name else True, leave=False)
    with bar as progress:
        for batch in batches:
            sample = dataset.collater([dataset[index] for index in batch])
            inputs = apply_to_sample(lambda tensor: tensor.to(device), sample["net_input"])
            logits_BT2 = model(**inputs, classification_head_name=head)[0].float().cpu().numpy()
            collector.add(sample["id"].numpy(), logits_BT2[..., 0], logits_BT2[..., 1])
            progress.update(len(batch))
    return collector.answers()
