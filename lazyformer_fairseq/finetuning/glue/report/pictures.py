"""The pictures of GLUE's report."""

from pathlib import Path

from lazyformer_fairseq.finetuning.glue.report.paper_table import PAPER_TASKS, SCORES, Score
from lazyformer_fairseq.finetuning.glue.report.tables import own_row
from lazyformer_fairseq.finetuning.report.pictures import Panel, draw_seeds, draw_updates
from lazyformer_fairseq.finetuning.report.results import Results

BASELINE = "majority class or constant"


def draw(results: Results, output: Path) -> list[Path]:
    """Draws glue_seeds.png and, where there are checkpoints to draw it of, glue_updates.png. Returns what it drew."""
    others = (Score(task, task) for task in results.grid.tasks if task not in PAPER_TASKS)
    scores = [Panel(score.name, score.task, score.split, score.metric) for score in (*SCORES.values(), *others)]
    seeds, updates = output / "glue_seeds.png", output / "glue_updates.png"
    draw_seeds(results, scores, seeds, BASELINE)
    if draw_updates(results, scores, updates, BASELINE, lambda model: own_row(results, model).average):
        return [seeds, updates]
    updates.unlink(missing_ok=True)  # of an earlier report on another grid
    return [seeds]
