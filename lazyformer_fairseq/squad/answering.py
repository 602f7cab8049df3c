"""A model answers the questions of a data set."""

from collections.abc import Mapping, Sequence

import torch
from fairseq import utils
from tqdm import tqdm

from lazyformer_fairseq.data.datasets.question_windows import QuestionWindowsDataset
from lazyformer_fairseq.data.squad.answers import FoundAnswer

MAX_TOKENS = 8192


@torch.no_grad()
def answer_all(
    model: torch.nn.Module,
    head: str,
    dataset: QuestionWindowsDataset,
    n_best: int = 1,
    max_tokens: int = MAX_TOKENS,
) -> list[list[FoundAnswer]]:
    """The `n_best` answers to each question, the best first, in the order of the file.

    Args:
        model: in evaluation mode; its answers are computed where it is.
        head: its name in the model.
        max_tokens: of a batch, padding included.
    """
    device = next(model.parameters()).device
    collector = dataset.collector(n_best)
    batches = dataset.batch_by_size(dataset.ordered_indices(), max_tokens=max(max_tokens, int(dataset.sizes.max())))
    name = dataset.file.path.name
    with tqdm(total=len(dataset), desc=name, unit=" windows", delay=2, disable=None, leave=False) as progress:
        for batch in batches:
            sample = dataset.collater([dataset[index] for index in batch])
            inputs = utils.apply_to_sample(lambda tensor: tensor.to(device), sample["net_input"])
            logits = model(**inputs, classification_head_name=head)[0].float().cpu().numpy()
            collector.add(sample["id"].numpy(), logits[..., 0], logits[..., 1])
            progress.update(len(batch))
    return collector.answers()


def best_texts(dataset: QuestionWindowsDataset, answers: Sequence[Sequence[FoundAnswer]]) -> Mapping[str, str]:
    """The official format: each question's id with the text of its best answer; none is empty where one was found."""
    return {
        question.id: found[0].text if found else ""
        for question, found in zip(dataset.file.questions, answers, strict=True)
    }
