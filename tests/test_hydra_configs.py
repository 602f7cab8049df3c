"""Every file of configs/ through fairseq-hydra-train: what it hands to the trainer, and that it trains."""

import logging
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from fairseq_cli import hydra_train
from helpers import ROOT, assert_equal_state, load_script, mostly_slow, train_here, updates_of
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from lazyformer_fairseq.data.glue import find_task
from lazyformer_fairseq.fairseq_plugin.models.config import MaskedLMConfig
from lazyformer_fairseq.patterns.architectures import ARCHITECTURES

PRETRAINING = sorted(name for name in ARCHITECTURES if not name.endswith("_tiny"))
FINETUNING = sorted(path.stem for path in (ROOT / "configs" / "finetuning").glob("*.yaml") if path.stem != "table5")
TINY = (
    "common.cpu=true common.fp16=false distributed_training.distributed_world_size=1 dataset.num_workers=0 "
    "dataset.batch_size=4 model.encoder_embed_dim=32 model.encoder_attention_heads=2 model.encoder_ffn_embed_dim=64"
).split()


def arguments(config: str, *overrides: object) -> list[str]:
    """Of fairseq-hydra-train for ``pretraining/NAME`` or ``finetuning/NAME``."""
    folder, name = config.split("/")
    return ["--config-dir", f"configs/{folder}", "--config-name", name, *map(str, overrides)]


@pytest.fixture
def hydra_main(monkeypatch) -> Callable[..., None]:
    """``hydra_main("pretraining/bert_base", "task.data=...", ...)``: fairseq-hydra-train in this process."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(logging.root, "handlers", list(logging.root.handlers))  # hydra's logging would replace them
    monkeypatch.setattr(logging.getLogger("hydra"), "level", logging.WARNING)  # else it composes thrice, to report
    # For which it composes once more.
    monkeypatch.setattr("hydra._internal.hydra.Hydra.get_mode", lambda *_, **__: RunMode.RUN)

    def run(config: str, *overrides: object) -> None:
        quiet = ("hydra/job_logging=none", "hydra/hydra_logging=none", "hydra.output_subdir=null")
        train_here(*arguments(config, *overrides, *quiet), command=hydra_train.cli_main)

    return run


@pytest.fixture
def handed_over(hydra_main, tmp_path) -> Callable[..., DictConfig]:
    """``handed_over(config, ...)``: the settings with which fairseq-hydra-train would start to train."""

    def run(config: str, *overrides: object) -> DictConfig:
        run_options = "lazyformer_fairseq.fairseq_plugin.reliability.options"
        # Neither is wanted in the config's --save-dir.
        no_folder = mock.patch.multiple(run_options, lock_for_process=mock.DEFAULT, log_to=mock.DEFAULT)
        with mock.patch("fairseq.distributed.utils.call_main") as call_main, no_folder:
            hydra_main(config, f"hydra.run.dir={tmp_path}", *overrides)
        return call_main.call_args.args[0]

    return run


def assert_table_5(cfg: DictConfig) -> None:
    """What pre-training and fine-tuning share, of the options that TINY leaves alone."""
    assert cfg.optimizer._name == "fused_adam"
    assert cfg.optimizer.adam_betas.replace(" ", "") == "(0.9,0.999)"
    assert (cfg.optimizer.adam_eps, cfg.optimizer.weight_decay, cfg.optimization.clip_norm) == (1e-6, 0.01, 1.0)
    assert (cfg.lr_scheduler._name, cfg.lr_scheduler.lr) == ("linear_warmup", cfg.optimization.lr)
    assert (cfg.common.seed, cfg.task.seed) == (1, 1)


def test_pretraining_is_table_5_of_a_pattern_with_parentheses(handed_over):
    masks = ("task.mask_prob=0.3:0.15", "task.whole_word_masks=true")
    cfg = handed_over("pretraining/bert_base", "task.data=somewhere", "model.sublayer_pattern='(sff)x2 (f)x2'", *masks)
    assert_table_5(cfg)
    assert (cfg.task.mask_prob, cfg.task.whole_word_masks, cfg.task.max_update) == ("0.3:0.15", True, 10**6)
    assert (cfg.model.dropout, cfg.model.encoder_normalize_before) == (0.1, False)
    assert cfg.model.sublayer_pattern == "(sff)x2 (f)x2"
    assert (cfg.task.data, cfg.task.tokens_per_sample, cfg.model.max_positions) == ("somewhere", 512, 512)
    assert (cfg.optimization.max_update, cfg.lr_scheduler.max_update, cfg.optimization.max_epoch) == (10**6, 10**6, 0)
    world_size = cfg.distributed_training.distributed_world_size
    assert world_size == max(1, torch.cuda.device_count())
    assert world_size * cfg.dataset.batch_size * cfg.optimization.update_freq[0] == 256
    assert (cfg.dataset.max_tokens, cfg.common.fp16, cfg.common.bf16) == (None, True, False)
    assert cfg.checkpoint.save_dir == cfg.task.save_dir == "checkpoints/bert_base"


def test_muon_and_a_branch_of_a_constant_run_are_settings_too(handed_over):
    muon = ("optimizer._name=muon", "++optimizer.adam_lr=1e-4", "++optimizer.muon_scale=original")
    branch = ("lr_scheduler._name=wsd", "++lr_scheduler.decay=linear", "++lr_scheduler.decay_from=a.pt")
    cfg = handed_over("pretraining/bert_base", "task.data=somewhere", *muon, *branch)
    assert (cfg.optimizer._name, cfg.optimizer.adam_lr, str(cfg.optimizer.muon_scale)) == ("muon", 1e-4, "original")
    assert (cfg.lr_scheduler._name, str(cfg.lr_scheduler.decay)) == ("wsd", "linear")
    assert (cfg.lr_scheduler.max_update, cfg.checkpoint.continue_once) == (10**6, "a.pt")


def test_finetuning_is_table_5(handed_over):
    cfg = handed_over("finetuning/cola", "task.data=somewhere", "checkpoint.finetune_from_model=model.pt")
    assert_table_5(cfg)
    assert (cfg.model.dropout, cfg.model.encoder_normalize_before) == (0.1, False)
    assert (cfg.task.data, cfg.task.tokens_per_sample, cfg.task.finetune_from_model) == ("somewhere", 512, "model.pt")
    assert cfg.model.max_positions == 512
    options = ARCHITECTURES["lazyformer_m2x6_s"].options()
    assert {key: cfg.model[key] for key in options} == options
    assert (cfg.optimization.max_epoch, cfg.lr_scheduler.max_epoch, cfg.optimization.max_update) == (10, 10, 0)
    assert cfg.distributed_training.distributed_world_size * cfg.dataset.batch_size == 32
    assert cfg.optimization.update_freq == [1]
    assert cfg.checkpoint.save_dir == cfg.task.save_dir == "checkpoints/CoLA"


def assert_pretraining_of(name: str, cfg: DictConfig) -> None:
    assert_table_5(cfg)
    row = {"max_positions": 512, "dropout": 0.1, "encoder_normalize_before": False} | ARCHITECTURES[name].options()
    for option in row.keys() - {option.removeprefix("model.").partition("=")[0] for option in TINY}:
        assert cfg.model[option] == row[option]
    assert (cfg.task.mask_prob, cfg.task.leave_unmasked_prob, cfg.task.random_token_prob) == (0.15, 0.1, 0.1)
    assert (cfg.optimization.lr, cfg.lr_scheduler.warmup_ratio) == ([1e-4], 0.01)
    assert 500_000 % cfg.checkpoint.save_interval_updates == 0 and cfg.checkpoint.keep_interval_updates == -1


def test_files_of_encoders_are_those_that_the_table_gives():
    writer = load_script("write_configs")
    assert writer.names() == PRETRAINING
    for name in PRETRAINING:
        path = writer.FOLDER / f"{name}.yaml"
        comments = writer.comments_of(path, "")
        assert path.read_text() == writer.config_of(name, comments), "python scripts/write_configs.py writes it"


@pytest.mark.parametrize("name", mostly_slow(PRETRAINING, "bert_base"))
def test_every_pretraining_config_trains(hydra_main, data_folder, tmp_path, name):
    to = (f"task.data={data_folder}", f"checkpoint.save_dir={tmp_path}", "task.tokens_per_sample=32")
    hydra_main(f"pretraining/{name}", *TINY, *to, "optimization.max_update=1", "dataset.disable_validation=true")
    state = torch.load(tmp_path / "checkpoint_last.pt")
    assert updates_of(state) == 1
    assert_pretraining_of(name, OmegaConf.create(state["cfg"]))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, data_folder, warm_python) -> Path:
    """A pre-trained lazyformer_m2x6_s of TINY's width, by fairseq-hydra-train in a process of its own, as users run it.

    There, unlike here, hydra has composed the settings before it has ever heard of the plugin.
    """
    folder = tmp_path_factory.mktemp("pre-trained")
    to = (f"task.data={data_folder}", f"checkpoint.save_dir={folder}", "task.tokens_per_sample=32")
    pattern = """model.sublayer_pattern='(sflf)x2 M2x4'"""
    sizes = (*TINY, "optimization.max_update=2", "task.sequences_per_update=8", "task.mask_prob=0.3:0.15")
    run = in_a_process_of_its_own(warm_python, "pretraining/lazyformer_m2x6_s", *sizes, *to, pattern)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    return folder / "checkpoint_last.pt"


def in_a_process_of_its_own(programs: Path, config: str, *overrides: object) -> subprocess.CompletedProcess:
    command = [programs / "python", "-m", "fairseq_cli.hydra_train", *arguments(config, *overrides)]
    environment = {name: value for name, value in os.environ.items() if name != "HYDRA_FULL_ERROR"}
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)


@pytest.mark.parametrize("name", mostly_slow(FINETUNING, "cola"))
def test_every_finetuning_config_trains(hydra_main, glue, checkpoint, tmp_path, name):
    task = find_task(name)
    to = (f"task.data={glue / task.folder}", f"checkpoint.save_dir={tmp_path}", "task.tokens_per_sample=64")
    start = (f"checkpoint.finetune_from_model={checkpoint}", "optimization.max_update=1")
    hydra_main(f"finetuning/{name}", *TINY, *to, *start)
    state = torch.load(tmp_path / "checkpoint_best.pt")
    assert updates_of(state) == 1
    assert state["model"][f"classification_heads.{task.head_name}.out_proj.weight"].size(0) == task.num_classes
    cfg = OmegaConf.create(state["cfg"])
    assert_table_5(cfg)
    assert cfg.lr_scheduler.warmup_ratio == 0.06  # tests/data/test_official_files.py holds what tasks differ in


def test_yaml_and_arch_give_the_same_weights(checkpoint, data_folder, tmp_path, fairseq_train):
    options = (
        "--arch lazyformer_m2x6_s --encoder-embed-dim 32 --encoder-ffn-embed-dim 64 --encoder-attention-heads 2 "
        "--criterion masked_lm_accuracy --batch-size 4 --lr 1e-4 --warmup-ratio 0.01 --max-update 2 --update-freq 2 "
        "--adam-betas '(0.9, 0.999)' --adam-eps 1e-6 --weight-decay 0.01 --clip-norm 1.0 --seed 1 --mask-prob 0.3:0.15"
    )
    by_arch = fairseq_train(data_folder, options, tmp_path)
    by_yaml = torch.load(checkpoint)
    assert_equal_state(by_arch["model"], by_yaml["model"])
    model_options = set(MaskedLMConfig.__dataclass_fields__) - {"_name", "sublayer_pattern"}
    for key in model_options:
        assert by_arch["cfg"]["model"][key] == by_yaml["cfg"]["model"][key], key


@pytest.mark.slow
def test_a_user_error_is_printed_plainly(data_folder, tmp_path, warm_python):
    to = (f"task.data={data_folder}", f"checkpoint.save_dir={tmp_path}")
    pattern = "model.sublayer_pattern='(sf)x2 qf'"
    run = in_a_process_of_its_own(warm_python, "pretraining/bert_base", *TINY, *to, pattern)
    assert run.returncode == 1
    assert "Traceback" not in run.stderr + run.stdout
    assert "error: sublayer pattern '(sf)x2 qf', character 8: unknown letter 'q'" in run.stderr


@pytest.mark.parametrize("config", ["pretraining/bert_base", "finetuning/cola"])
def test_data_must_be_given(hydra_main, tmp_path, config):
    with pytest.raises(ValueError, match="DATA.* no such folder|DATA is not a folder"):
        hydra_main(config, *TINY, f"checkpoint.save_dir={tmp_path}")
