"""Every file of configs/language_modeling through fairseq-hydra-train, against the table of models and the launcher."""

import re

import pytest
import torch
from helpers import ROOT, mostly_slow
from in_process import assert_recipe
from omegaconf import OmegaConf
from test_hydra_configs import handed_over, hydra_main  # noqa: F401  fixtures

from lazyformer_fairseq.evaluation.planning.job import job_of_yaml
from lazyformer_fairseq.language_modeling.commands import read_lengths
from lazyformer_fairseq.patterns.architectures import CAUSAL_ARCHITECTURES

NAMES = sorted(path.stem for path in (ROOT / "configs" / "language_modeling").glob("*.yaml") if path.stem != "paper")
SETTINGS = {"base": (192, 256), "large": (384, 128), "24b": (512, 96)}  # tokens of a segment, rows of an update
# Of other papers, with the tokens of the memory.
OF_OTHERS = {
    "adaptive_span_small": (512, 96, 7680),
    "all_attention_small": (512, 96, 7680),
    "igpt_l": (1024, 128, 0),
    "igpt_m": (1024, 128, 0),
    "igpt_s": (1024, 128, 0),
    "longformer_small": (2048, 32, 0),
    "mingru_base": (192, 256, 192),
    "sparse_transformer_base": (12_288, 4, 0),
}

TINY = (
    "common.cpu=true common.fp16=false distributed_training.distributed_world_size=1 dataset.num_workers=0 "
    "dataset.batch_size=2 task.tgt_len=8 optimization.max_update=1 model.decoder_embed_dim=32 model.mem_len=8 "
    "model.decoder_ffn_embed_dim=32 model.decoder_attention_heads=2 model.adaptive_softmax_cutoff=''"
).split()


def test_there_is_one_for_each_setting_of_the_paper():
    models = ("transformer_xl", "par_transformer", "sandwich_transformer")
    settings = (*SETTINGS, "base_140k")  # Table 7's longer training
    assert sorted([*(f"{model}_{setting}" for model in models for setting in settings), *OF_OTHERS]) == NAMES
    page = " ".join((ROOT / "docs" / "language_models.md").read_text().split())
    lacking = {name for name in CAUSAL_ARCHITECTURES if not name.endswith("_tiny")} - set(NAMES)
    of_table_1 = {name for name in lacking if re.fullmatch(r"par_transformer_base_\ds(_sf+)?", name)}
    assert (
        lacking - of_table_1 == {"lazy_par_transformer_base"}
        and "except for lazy PAR and the patterns of the paper's Table 1" in page
    )


@pytest.mark.parametrize(
    ("name", "lengths"), [("base", (64, 640, 400)), ("large", (128, 1600, 1000)), ("24b", (80, 2100, 820))]
)
def test_the_papers_evaluations_are_files_too(name, lengths):
    assert tuple(read_lengths(name).values()) == (*lengths, True)


@pytest.mark.parametrize("name", mostly_slow(NAMES, "par_transformer_base", "longformer_small"))
def test_it_is_the_papers_setting(handed_over, name):  # noqa: F811
    cfg = handed_over(f"language_modeling/{name}", "task.data=somewhere")
    arch = CAUSAL_ARCHITECTURES[name.removesuffix("_140k")]
    row = arch.options()
    assert {option: cfg.model[option] for option in row} == row
    tgt_len, rows, mem_len = OF_OTHERS.get(name) or (*SETTINGS[name.removesuffix("_140k").rpartition("_")[2]], None)
    mem_len = tgt_len if mem_len is None else mem_len
    world_size = cfg.distributed_training.distributed_world_size
    assert world_size * cfg.dataset.batch_size * cfg.optimization.update_freq[0] == rows
    assert (cfg.task.tgt_len, cfg.model.mem_len, cfg.task.data) == (tgt_len, mem_len, "somewhere")
    assert rows * tgt_len == 49_152 or name in OF_OTHERS
    assert (cfg.task._name, cfg.criterion._name) == ("stream_language_modeling", "causal_lm")
    assert_recipe(cfg, arch.recipe)
    assert cfg.optimization.max_update == (140_000 if name.endswith("_140k") else arch.updates)
    assert cfg.checkpoint.save_dir == f"checkpoints/{name}"
    job = job_of_yaml(ROOT / "configs" / "language_modeling" / f"{name}.yaml")  # a plan reads the same
    assert (job.max_update, job.time) == (cfg.optimization.max_update, cfg.task.tgt_len)
    assert (job.per_update, job.memory_length) == (cfg.task.sequences_per_update, cfg.model.mem_len)


@pytest.mark.parametrize(
    "name", mostly_slow(["par_transformer_base", "par_transformer_large", "par_transformer_base_140k"])
)
def test_transformer_xls_adam_is_an_option(handed_over, name):  # noqa: F811
    cfg = handed_over(f"language_modeling/{name}", "task.data=somewhere", "recipe=transformer_xl")
    assert_recipe(cfg, "transformer_xl")


@pytest.mark.parametrize("name", mostly_slow(NAMES, "par_transformer_24b"))
def test_it_trains(hydra_main, lm_data, tmp_path, name):  # noqa: F811
    to = (f"task.data='{lm_data}'", f"checkpoint.save_dir={tmp_path}")
    memory = ["model.mem_len=0"] if name.startswith("igpt") else []
    hydra_main(f"language_modeling/{name}", *TINY, *memory, *to, "dataset.disable_validation=true")
    state = torch.load(tmp_path / "checkpoint_last.pt")
    assert state["optimizer_history"][-1]["num_updates"] == 1
    cfg = OmegaConf.create(state["cfg"])
    assert cfg.model.sublayer_pattern == CAUSAL_ARCHITECTURES[name.removesuffix("_140k")].sublayer_pattern
