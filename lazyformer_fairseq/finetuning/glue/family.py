"""GLUE's tasks, as grids of fine-tuning runs know them."""

from lazyformer_fairseq.data.glue.task_table import TASKS
from lazyformer_fairseq.finetuning.scored_task import TaskFamily

GLUE = TaskFamily("GLUE", TASKS, "lazyformer glue run")
