"""Reads and checks the results of a grid on SQuAD."""

from pathlib import Path

from lazyformer_fairseq.finetuning.report import read_results as grid_results
from lazyformer_fairseq.finetuning.report.results import Results, Run
from lazyformer_fairseq.finetuning.squad_family import SQUAD_FAMILY


def read_results(folder: Path) -> Results:
    """Raises what :func:`lazyformer_fairseq.finetuning.report.read_results.read_results` does."""
    return grid_results.read_results(folder, SQUAD_FAMILY)


def read_run(path: Path) -> Run:
    """Raises what :func:`lazyformer_fairseq.finetuning.report.read_results.read_run` does."""
    return grid_results.read_run(path, SQUAD_FAMILY)
