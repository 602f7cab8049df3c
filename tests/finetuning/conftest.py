"""Toy tasks, and what is prepared of them for the checkpoint that runs start from."""

from pathlib import Path

import pytest
from helpers import write_toy_glue
from in_process import config_of
from omegaconf import DictConfig
from toy_squad import START, write_articles

from lazyformer_fairseq.data.prepared_folder import PreparedTask
from lazyformer_fairseq.finetuning.tasks.glue import GridSettings, prepare_tasks

TOY_TASKS = ("CoLA", "RTE", "MNLI", "STS-B")


@pytest.fixture(scope="session")
def toy_glue(tmp_path_factory) -> Path:
    return write_toy_glue(tmp_path_factory.mktemp("toy_glue"), train=64, valid=20)


@pytest.fixture(scope="session")
def toy_squad(tmp_path_factory) -> Path:
    return write_articles(tmp_path_factory.mktemp("toy_squad"))


@pytest.fixture(scope="session")
def prepared(toy_glue, tmp_path_factory) -> dict[str, PreparedTask]:
    """Task -> its prepared data; all lie in one folder ``tasks``."""
    wanted = GridSettings(
        data=toy_glue, tokenizer=START.parent / "tokenizer", output=tmp_path_factory.mktemp("prepared"), max_length=64,
        tasks=TOY_TASKS,
    )  # fmt: skip
    return dict(zip(TOY_TASKS, prepare_tasks(wanted), strict=True))


@pytest.fixture
def glue_config(data_folder):
    """``glue_config(folder, options ...)``: fairseq's configuration for a command line of task ``glue``."""

    def build(folder: Path, *more: object) -> DictConfig:
        words = "--task glue --criterion glue --arch bert_tiny --max-epoch 1 --batch-size 16 --optimizer fused_adam"
        words = f"{words} --lr-scheduler linear_warmup --tokenizer-folder".split()
        return config_of(folder, *words, data_folder / "tokenizer", *more)

    return build
