"""Losses of seeded trainings, as they were on 2026-11-23: a refactoring leaves them where they are.

`fixtures/golden_losses.json` has the loss of each of three updates by what was trained. Another processor rounds
differently, so that the third digit may move; what is compared bit by bit is compared within one run elsewhere.
"""

import json
import logging
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT, train_here, write_toy_glue
from toy_squad import write_toy_squad

from lazyformer_fairseq.patterns.architectures import ARCHITECTURES, CAUSAL_ARCHITECTURES

EXPECTED = json.loads((Path(__file__).parent / "fixtures" / "golden_losses.json").read_text())
ADAM = "--optimizer fused_adam --lr-scheduler linear_warmup --lr 1e-3"
MASKED_LM = "--task full_sentences_masked_lm --tokens-per-sample 32 --criterion masked_lm_accuracy"
TINY = "--arch lazyformer_m2x6_s_tiny --max-positions 64 --encoder-embed-dim 16 --encoder-ffn-embed-dim 32"
M2X2 = f"{MASKED_LM} {TINY} --sublayer-pattern M2x2"
CAUSAL = (
    "--task stream_language_modeling --tgt-len 12 --mem-len 16 --criterion causal_lm --adaptive-softmax-cutoff 10,20"
)
SMALL_CAUSAL = f"{CAUSAL} --arch par_transformer_tiny --decoder-embed-dim 16 --decoder-ffn-embed-dim 32"
DROPOUT = "--attention-dropout 0.5 --dropout 0.5 --lr 1e-2"  # without it no loss is within what is allowed
OPTIMIZERS = {
    "nvlamb": "--optimizer nvlamb --lr-scheduler polynomial_warmup --lr 1e-3 --warmup-ratio 0.3",
    "adam": "--optimizer adam --lr-scheduler fixed --lr 1e-3",
    "nvlamb_nobias": "--optimizer nvlamb --no-bias-correction --lr-scheduler linear_warmup --lr 1e-3",
    "fused_wd": f"{ADAM} --lr 1e-2 --weight-decay 50 --clip-norm 0.01 --adam-eps 1e-3",
}
TASKS = {
    "next_sentence": f"--task full_sentences_masked_lm --tokens-per-sample 64 --next-sentence --token-types 2 {TINY} "
    "--sublayer-pattern M2x2 --criterion masked_lm_accuracy",
    "bf16": f"{M2X2} --bf16",
    "fp16": f"{M2X2} --fp16",
    "update_freq": f"{M2X2} --update-freq 2",
    "bf16_freq12": f"{M2X2} --bf16 --update-freq 12",
    "sequences_per_update": f"{M2X2} --sequences-per-update 8",
    "stock_masked_lm": f"--task masked_lm --tokens-per-sample 32 --sample-break-mode complete {TINY} "
    "--sublayer-pattern M2x2 --criterion masked_lm",
}


def command_of(name: str) -> tuple[str, str]:
    """The folder of data, and the options of fairseq-train, for a key of the fixture."""
    group, _, what = name.partition("/")
    masked_lm = MASKED_LM.replace("full_sentences_masked_lm", "masked_permuted_lm") if "mpnet" in what else MASKED_LM
    of_glue = f"--task {group} --criterion {group} {TINY} --sublayer-pattern M2x2"
    return {
        "arch": ("corpus/shard0", f"{masked_lm} --arch {what} --max-positions 64 {ADAM}"),
        "causal": ("lm/data", f"{CAUSAL} --arch {what} {ADAM}{' --mem-len 0' * what.startswith('igpt')}"),
        "pattern": ("corpus/shard0", f"{MASKED_LM} {TINY} --sublayer-pattern '{what}' {ADAM}"),
        "pattern_dropout": ("corpus/shard0", f"{MASKED_LM} {TINY} --sublayer-pattern '{what}' {ADAM} {DROPOUT}"),
        "causal_pattern": ("lm/data", f"{SMALL_CAUSAL} --sublayer-pattern '{what}' {ADAM}"),
        "optim": ("corpus/shard0", f"{M2X2} {OPTIMIZERS.get(what)}"),
        "task": ("corpus/shard0", f"{TASKS.get(what)} {ADAM}"),
        "glue": (f"glue_out/tasks/{what}", f"{of_glue} {ADAM}"),
        "squad": ("squad_out/data", f"{of_glue} --max-positions 128 {ADAM}"),
    }[group]


@pytest.fixture(scope="module")
def data(tmp_path_factory, data_folder, lm_data) -> Path:
    folder = tmp_path_factory.mktemp("golden")
    (folder / "corpus").symlink_to(data_folder)
    (folder / "lm").symlink_to(lm_data.parent)
    write_toy_glue(folder / "glue")
    write_toy_squad(folder / "squad")
    tokenizer = f"--tokenizer {data_folder / 'tokenizer'}"
    for task, length in (("glue", 32), ("squad", 96)):
        words = f"finetune --task {task} --data {task} {tokenizer} --output {task}_out --max-length {length}"
        command = [sys.executable, "-m", "lazyformer_fairseq.cli", *words.split()]
        subprocess.run(command, cwd=folder, env={"PYTHONPATH": str(ROOT)}, check=True, capture_output=True)
    return folder


def losses_of(data: Path, options: str, folder: Path) -> list[float]:
    """Trains in this process; the loss of each update, as the log has it."""
    log = folder / "log.json"
    words = (
        f"{data} --user-dir {ROOT / 'lazyformer_fairseq'} --cpu --batch-size 4 --num-workers 0 --seed 1 "
        f"--max-update 3 --no-save --save-dir {folder} --log-format json --log-interval 1 --log-file {log} {options}"
    )
    before = list(logging.getLogger().handlers)
    train_here(*shlex.split(words))
    for handler in set(logging.getLogger().handlers) - set(before):
        logging.getLogger().removeHandler(handler)
        handler.close()
    rows = [json.loads(line[line.index("{") :]) for line in log.read_text().splitlines() if '"loss"' in line]
    return [float(row["loss"]) for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPECTED)
def test_a_seeded_training_loses_what_it_lost(data, tmp_path, name):
    folder, options = command_of(name)
    assert losses_of(data / folder, options, tmp_path) == pytest.approx(EXPECTED[name], abs=0.005)


def test_every_arch_has_losses():
    tiny = {f"arch/{name}" for name in ARCHITECTURES if "tiny" in name}
    tiny |= {f"causal/{name}" for name in CAUSAL_ARCHITECTURES if "tiny" in name}
    assert tiny <= EXPECTED.keys()
