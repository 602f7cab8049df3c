"""Random search: fresh patterns, uniform among those between a budget and the one below it; budgets take turns."""

from itertools import cycle

from lazyformer_fairseq.experiments.search.methods.task import Task


def judge_patterns(task: Task) -> None:
    """As the bands are narrow, no draw is wasted on a pattern far below its budget: a control should be strong."""
    chance = task.chance()
    for band in cycle(task.bands):
        if task.judge.is_spent:
            return
        task.judge(task.space.draw_within(band, chance))
