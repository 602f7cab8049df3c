"""Every command and table of the README: run in miniature, in its order, or compared with what it describes."""

import os
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from helpers import ROOT, count_parameters, toy_texts
from language_model_data import write_toy_wikitext

from lazyformer_fairseq.models.causal_lm_config import CausalLMConfig
from lazyformer_fairseq.models.config import LazyFormerConfig
from lazyformer_fairseq.optim.fused_adam import FusedAdamConfig
from lazyformer_fairseq.optim.linear_warmup import LinearWarmupConfig
from lazyformer_fairseq.patterns.architectures import ARCHITECTURES
from lazyformer_fairseq.tasks.full_sentences_masked_lm import FullSentencesMaskedLMConfig
from lazyformer_fairseq.tasks.glue import GlueConfig
from lazyformer_fairseq.tasks.stream_language_modeling import StreamLanguageModelingConfig

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(bash|python)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)

# What makes a command of the README small enough for a test: options that come last win.
TINY = (
    "--encoder-embed-dim 32 --encoder-ffn-embed-dim 32 --encoder-attention-heads 2 --sublayer-pattern M2 "
    "--max-positions 64 --num-workers 0"
)
ADDED_OPTIONS = {
    "lazyformer corpus": "--vocab-size 160 --valid-share 0.1",
    "scripts/pretrain.sh": f"{TINY} --max-update 2 --tokens-per-sample 32 --sequences-per-update 4",
    "lazyformer glue report": "",
    "lazyformer glue predict": "",
    "lazyformer glue run": "--tasks CoLA --lrs 1e-3 --seeds 1 --epochs 1 --gpus none",
    "scripts/prepare_wikitext103.sh": "--from my_wikitext --unofficial",
    "scripts/train_language_model.sh": (
        "--decoder-embed-dim 32 --decoder-ffn-embed-dim 32 --decoder-attention-heads 2 --adaptive-softmax-cutoff '' "
        "--sublayer-pattern sff --mem-len 8 --tgt-len 8 --rows-per-update 4 --max-update 2 --num-workers 0"
    ),
    "lazyformer lm evaluate": "",
    "lazyformer lm compare": (
        "--embed-dim 8 --ffn-embed-dim 8 --heads 2 --adaptive-softmax-cutoff '' --updates 1 --seeds 1 --tgt-len 8 "
        "--mem-len 8 --batch-size 4 --device cpu"
    ),
    "lazyformer search": (
        "--decoder-embed-dim 8 --decoder-ffn-embed-dim 8 --decoder-attention-heads 2 --adaptive-softmax-cutoff '' "
        "--tgt-len 8 --mem-len 8 --batch-size 16 --sublayers 2 --constant-updates 1 --max-updates 30 --device cpu"
    ),
    "lazyformer bench": (
        "--arch lazyformer_m2x6_s_tiny --baseline-arch bert_tiny --lengths 8 --tokens 8 --rounds 2 --what encoder"
    ),
    "fairseq-train data": f"{TINY} --max-update 2 --tokens-per-sample 32 --batch-size 4 --cpu",
    "fairseq-train glue_data/CoLA": f"{TINY} --max-update 2 --cpu",
    "fairseq-hydra-train --config-dir configs/pretraining": "task.tokens_per_sample=32 dataset.batch_size=4",
    "fairseq-hydra-train --config-dir configs/finetuning": "task.tokens_per_sample=64",
}
HYDRA_TINY = (
    "common.cpu=true common.fp16=false distributed_training.distributed_world_size=1 optimization.max_update=2 "
    "dataset.num_workers=0 model.encoder_embed_dim=32 model.encoder_ffn_embed_dim=32 model.encoder_attention_heads=2 "
    "model.sublayer_pattern=M2 model.max_positions=64"
)


def commands_of(block: str) -> list[str]:
    return [line for line in block.replace("\\\n", " ").splitlines() if line.strip()]


def in_miniature(command: str) -> str:
    for start, options in ADDED_OPTIONS.items():
        if command.startswith(start):
            return f"{command} {options} {HYDRA_TINY if 'hydra' in start else ''}"
    raise AssertionError(f"no test knows the README's command: {command}")


@pytest.fixture
def users_folder(tmp_path) -> Path:
    """Where a user stands: the checkout, texts of theirs and a GLUE task."""
    for name in ("lazyformer_fairseq", "configs", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)
    write_toy_wikitext(tmp_path / "my_wikitext")
    (tmp_path / "my_texts").mkdir()
    text = "\n\n".join(toy_texts(150))
    (tmp_path / "my_texts" / "toy.txt").write_text(text)
    task = tmp_path / "glue_data" / "CoLA"
    task.mkdir(parents=True)
    for split in ("train", "dev"):
        (task / f"{split}.tsv").write_text("".join(f"toy\t{n % 2}\t\tAnna sees Ben {n}.\n" for n in range(40)))
    (task / "test.tsv").write_text("index\tsentence\n" + "".join(f"{n}\tAnna sees Ben {n}.\n" for n in range(10)))
    return tmp_path


def test_every_command_runs(users_folder):
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(users_folder),
    }
    ran = []
    for language, block in BLOCKS:
        if block.startswith(("make ", "source ")):  # the Makefile's targets are checked by test_setup.py
            block = "\n".join(line for line in block.splitlines() if not line.startswith(("make ", "source ")))
        commands = [[sys.executable, "-c", block]] if language == "python" else [
            ["bash", "-c", in_miniature(command)] for command in commands_of(block)
        ]  # fmt: skip
        for command in commands:
            run = subprocess.run(command, cwd=users_folder, env=environment, capture_output=True, text=True)
            assert run.returncode == 0, f"{shlex.join(command)}\n{run.stdout[-3000:]}\n{run.stderr[-3000:]}"
            assert "Traceback" not in run.stderr
            ran.append((command, run))
    assert len(ran) == 16
    answers = ran[4][1].stdout.splitlines()
    assert len([line for line in answers if re.match(r"\d+%  ", line)]) == 3


def test_the_table_of_architectures_is_the_one_in_the_code():
    section = README.split("## Architectures")[1].split("##")[0]
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in section.splitlines() if "`" in line]
    rows = {cells[0]: cells[1:] for cells in rows if cells[0] in ARCHITECTURES}
    assert rows.keys() == {name for name in ARCHITECTURES if not name.endswith("_tiny")}
    for name, (pattern, sizes, parameters, source) in rows.items():
        row = ARCHITECTURES[name]
        assert pattern == row.sublayer_pattern
        assert sizes == f"{row.encoder_ffn_embed_dim}, {row.encoder_embed_dim}, {row.encoder_attention_heads}"
        assert parameters == f"{count_parameters(name) / 1e6:.1f}M"
        assert source == row.source


def test_files_and_folders_that_the_readme_names_are_there():
    named = re.findall(r"(?<![\w/.])(?:scripts|configs|docs|tests)/[\w./-]+\w", README)
    assert named
    for path in named:
        assert (ROOT / path).exists(), path
    layout = README.split("## How the code is laid out")[1].split("```")[1]
    for path in re.findall(r"^  ([\w./]+) ", layout, re.MULTILINE):
        assert (ROOT / "lazyformer_fairseq" / path).exists(), path


def test_the_table_of_options_names_options_and_their_defaults():
    section = README.split("## Options beside fairseq's own")[1].split("##")[0]
    named = {name.strip("-").replace("-", "_") for name in re.findall(r"`(--[\w-]+)`", section)} - {"arch"}
    tasks = (FullSentencesMaskedLMConfig, GlueConfig, StreamLanguageModelingConfig)
    configs = (*tasks, LazyFormerConfig, CausalLMConfig, FusedAdamConfig, LinearWarmupConfig)
    defaults = {field.name: field.default for config in configs for field in fields(config)}
    assert named - {"max_update", "max_epoch", "help"} <= defaults.keys()
    for name in ("mask_prob", "leave_unmasked_prob", "relative_position_max_distance", "warmup_ratio", "tgt_len"):
        row = next(line for line in section.splitlines() if f"`--{name.replace('_', '-')}`" in line)
        assert str(defaults[name]) in row
