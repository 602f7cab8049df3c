"""What gradient descent found, judged: patterns drawn from each budget's probabilities, the most probable one first."""

from itertools import cycle

from lazyformer_fairseq.experiments.search.methods.task import Task
from lazyformer_fairseq.experiments.search.report.found_pattern import most_probable


def judge_patterns(task: Task) -> None:
    """The price on latency only pulls towards a budget: so what is drawn, or most probable, is moved into its band."""
    chance, space = task.chance(), task.space
    assert task.shares is not None
    for band, shares in zip(task.bands, task.shares, strict=True):
        first = tuple(most_probable(shares, space.candidates))
        if not space.is_valid(first):  # identity alone
            first = space.draw(chance, shares)
        task.judge(space.moved_into(first, band, chance))
    for band, shares in cycle(zip(task.bands, task.shares, strict=True)):
        if task.judge.is_spent:
            return
        task.judge(space.draw_within(band, chance, lambda shares=shares: space.draw(chance, shares)))
