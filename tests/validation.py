"""A criterion's part in validation: batches in, and what fairseq logs of them."""

from fairseq.data import FairseqDataset
from fairseq.logging import metrics


def batches(data: FairseqDataset, size: int) -> list[dict]:
    order = data.ordered_indices()
    return [data.collater([data[i] for i in order[start : start + size]]) for start in range(0, len(data), size)]


def logged(criterion, logs: list[dict], workers: int = 0) -> dict[str, float]:
    """What is logged of a split, where so many workers (all, by default) reduce a log each at a time."""
    with metrics.aggregate(new_root=True) as split:
        for start in range(0, len(logs), workers or len(logs)):
            with metrics.aggregate():
                criterion.reduce_metrics(logs[start : start + (workers or len(logs))])
    return split.get_smoothed_values()
