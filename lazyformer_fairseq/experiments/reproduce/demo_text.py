"""``python -m lazyformer_fairseq.experiments.reproduce.demo_text FOLDER``: the demo's text and task.

The task is written as GLUE's CoLA.
"""

import sys
from pathlib import Path

from lazyformer_fairseq.corpus.stages import clean_documents
from lazyformer_fairseq.experiments.demo.acceptability import write_acceptability_task
from lazyformer_fairseq.experiments.demo.python_prose import write_prose
from lazyformer_fairseq.experiments.reproduce.settings import GLUE, TINY

PROSE = "prose.jsonl"


def write_demo_text(folder: Path) -> None:
    """Writes `folder`/prose.jsonl and `folder`/glue/CoLA; of what is there already nothing is written again.

    The sentences of the task stand in documents that the corpus holds out, by the same share and seed.
    """
    prose, task = write_prose(folder / PROSE), folder / GLUE / "CoLA"
    if not task.exists():
        share = float(TINY.corpus[TINY.corpus.index("--valid-share") + 1])
        write_acceptability_task(clean_documents([str(prose)]), task, share, seed=1)


if __name__ == "__main__":
    write_demo_text(Path(sys.argv[1]))
