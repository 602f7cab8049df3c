"""The table of tasks, and the YAML files that are held to it."""

import pytest
from fairseq.dataclass.initialize import hydra_init
from helpers import ROOT
from hydra import compose, initialize_config_dir

from lazyformer_fairseq.data.glue.metrics import METRICS
from lazyformer_fairseq.data.glue.task_table import TASKS, find_task
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.patterns.architectures import ARCHITECTURES

FINE_TUNED = [task for task in TASKS.values() if "train" in task.splits]


def test_nine_tasks_and_the_diagnostic_set():
    assert [task.name for task in FINE_TUNED] == [
        *("CoLA", "SST-2", "MRPC", "STS-B", "QQP"),
        *("MNLI", "QNLI", "RTE", "WNLI"),
    ]
    assert set(TASKS) - {task.name for task in FINE_TUNED} == {"AX"}


@pytest.mark.parametrize("task", TASKS.values(), ids=lambda task: task.name)
def test_a_row_is_whole(task):
    assert set(task.metrics) <= set(METRICS)
    assert bool(task.labels) != task.is_regression
    assert task.num_classes == (1 if task.is_regression else len(set(task.labels)))
    assert len({len(split.texts) for split in task.splits.values()}) == 1
    assert all((split.label is None) == name.startswith("test") for name, split in task.splits.items())


def test_mnli_is_validated_on_both_dev_sets():
    splits = TASKS["MNLI"].splits
    assert [splits[name].file for name in ("valid", "valid1")] == ["dev_matched.tsv", "dev_mismatched.tsv"]
    assert TASKS["AX"].head_name == TASKS["MNLI"].head_name


def test_tasks_are_found_by_name_and_folder():
    assert find_task("sts-b").name == "STS-B"
    assert find_task("diagnostic").name == "AX"
    with pytest.raises(UserError, match=r"'STS' is no GLUE task.*CoLA.*STS-B"):
        find_task("STS")


def test_targets():
    assert [TASKS["RTE"].target(word) for word in ("entailment", "not_entailment")] == [0, 1]
    assert TASKS["STS-B"].target("3.800") == pytest.approx(3.8)
    for word in ("5.01", "-1", "nan", "", "four"):
        with pytest.raises(UserError, match="from 0 to 5"):
            TASKS["STS-B"].target(word)


@pytest.mark.filterwarnings(r"ignore:\s*'\S+' is validated against ConfigStore schema")
@pytest.mark.parametrize("task", FINE_TUNED, ids=lambda task: task.name)
def test_yaml_is_table_5_for_the_task(task):
    name = task.name.lower()
    hydra_init(name)
    with initialize_config_dir(str(ROOT / "configs" / "finetuning"), version_base="1.1"):
        cfg = compose(name)
    assert cfg.task._name == cfg.criterion._name == "glue"
    assert cfg.task.glue_task == task.name
    assert cfg.checkpoint.best_checkpoint_metric == task.selecting_metric
    assert cfg.checkpoint.maximize_best_checkpoint_metric
    assert cfg.dataset.valid_subset.split(",") == [split for split in task.splits if split.startswith("valid")]
    assert cfg.optimization.max_epoch == task.epochs == 10
    assert cfg.dataset.batch_size == 32
    assert cfg.optimization.lr == [2e-5]
    assert cfg.optimization.clip_norm == 1.0
    assert cfg.lr_scheduler == {"_name": "linear_warmup", "warmup_ratio": 0.06}
    assert cfg.optimizer == {
        "_name": "fused_adam",
        "adam_betas": "(0.9,0.999)",
        "adam_eps": 1e-6,
        "weight_decay": 0.01,
    }
    assert cfg.model.dropout == 0.1
    row = ARCHITECTURES["lazyformer_m2x6_s"].options()
    assert {option: cfg.model[option] for option in row} == row
