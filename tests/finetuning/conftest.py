"""Toy tasks, prepared, and a checkpoint to start from."""

from pathlib import Path

import pytest
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq_cli.train import main as train
from helpers import write_toy_glue
from squad_grids import write_articles

from lazyformer_fairseq.data.prepared_folder import PreparedTask
from lazyformer_fairseq.finetuning.tasks.glue import Preparation, prepare_tasks

TOY_TASKS = ("CoLA", "RTE", "MNLI", "STS-B")


@pytest.fixture(scope="session")
def toy_glue(tmp_path_factory) -> Path:
    return write_toy_glue(tmp_path_factory.mktemp("toy_glue"), train=64, valid=20)


@pytest.fixture(scope="session")
def toy_squad(tmp_path_factory) -> Path:
    return write_articles(tmp_path_factory.mktemp("toy_squad"))


@pytest.fixture(scope="session")
def prepared(toy_glue, data_folder, tmp_path_factory) -> dict[str, PreparedTask]:
    """Task -> its prepared data; all lie in one folder ``tasks``."""
    wanted = Preparation(
        data=toy_glue, tokenizer=data_folder / "tokenizer", output=tmp_path_factory.mktemp("prepared"), max_length=64,
        tasks=TOY_TASKS,
    )  # fmt: skip
    return dict(zip(TOY_TASKS, prepare_tasks(wanted), strict=True))


@pytest.fixture(scope="session")
def start_checkpoint(data_folder, tmp_path_factory) -> Path:
    """A tiny model after one update of pre-training."""
    folder = tmp_path_factory.mktemp("start") / "model"
    command = [
        *(str(data_folder), "--task", "full_sentences_masked_lm", "--tokens-per-sample", "64"),
        *("--criterion", "masked_lm_accuracy", "--arch", "lazyformer_m2x6_s_tiny", "--sublayer-pattern", "M2"),
        *("--max-positions", "64", "--optimizer", "fused_adam", "--lr-scheduler", "linear_warmup", "--lr", "1e-3"),
        *("--batch-size", "4", "--max-update", "1", "--disable-validation", "--cpu", "--num-workers", "0"),
        *("--no-epoch-checkpoints", "--save-dir", str(folder)),
    ]
    cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(options.get_training_parser(), command))
    train(cfg)
    return folder / "checkpoint_last.pt"
