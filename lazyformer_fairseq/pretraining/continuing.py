"""The command ``lazyformer continue``."""

from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import click

from lazyformer_fairseq.arguments import ExistingPath, refuse_missing_folders
from lazyformer_fairseq.options import Command, option, takes
from lazyformer_fairseq.pretraining.commands import GIVEN, PER_GPU, SETTINGS, job_of
from lazyformer_fairseq.pretraining.launch import Launch

WEIGHTS, RECORD = "model.safetensors", "warm_start.json"


@dataclass(frozen=True)
class Continuing(Launch):
    """Options of ``lazyformer continue``."""

    per_gpu: Optional[int] = option(
        None, "At most so many in one forward pass.", *PER_GPU,
        low=1, shown="as many as fit the GPUs' memory, see --fit; 16 with ORIGINAL, whose memory is not counted; "
        "4 on a CPU",
    )  # fmt: skip
    sequences_per_update: int = option(256, "A multiple of nodes x gpus.", low=1)


@click.command("continue", cls=Command, context_settings=SETTINGS)
@click.argument("warm", type=ExistingPath(holds=WEIGHTS))
@click.argument("data")
@GIVEN
@click.option("--distill", metavar="ORIGINAL", type=ExistingPath(), help="A teacher: a checkpoint, or its folder.")
@takes(Continuing, "run")
def continue_pretraining(
    warm: Path, data: str, given: tuple[str, ...], distill: Optional[Path], run: Continuing
) -> None:
    """Go on with masked LM from WARM, a folder that `lazyformer import` or `lazyformer export` wrote, on DATA.

    DATA is a folder of binarised data, or several as a:b:c, made with WARM's tokenizer. The setting: 100,000 updates of
    256 sequences (a tenth of `lazyformer pretrain`'s), else the same: Adam, peak rate 1e-4, 1% warm-up, linear decay to
    zero. Options of fairseq-train may follow and win: --max-update 1000, --save-dir DIR, --lr 5e-5.

    With --distill, the model learns from ORIGINAL too: from its words (--distill-words-weight, --distill-temperature)
    and its last attention (--distill-attention-weight).

    Checkpoints hold the new model alone. Run again, it resumes from the last one, bit by bit. See docs/warm_start.md.
    """
    run.refuse_uneven(run.sequences_per_update, "sequences")
    if not run.dry_run:
        refuse_missing_folders(data)
    model = _options_of_model(warm)
    per_gpu = run.per_gpu
    if per_gpu is None:  # bert_base: all its options stand in `model`
        job = job_of("bert_base", None, data, [*model, *given], run.sequences_per_update)
        per_gpu = 16 if run.found and distill else run.batch(job, 16 if run.found else 4)
    options = f"""
        --task full_sentences_masked_lm --criterion continued_masked_lm
        --optimizer fused_adam --adam-eps 1e-6 --weight-decay 0.01 --clip-norm 1.0
        --lr-scheduler linear_warmup --lr 1e-4 --warmup-ratio 0.01 --max-update 100000
        --sequences-per-update {run.sequences_per_update} --batch-size {per_gpu} --required-batch-size-multiple 1
        --no-epoch-checkpoints --save-interval-updates 5000 --keep-interval-updates 3
        --num-workers 2 --log-format simple --log-interval 100 --seed 1""".split()
    options += ["--adam-betas", "(0.9, 0.999)", "--save-dir", f"checkpoints/{warm.absolute().name}"]
    options += ["--finetune-from-model", str(warm / WEIGHTS), *model]
    if (warm / RECORD).is_file():
        options += ["--warm-start", str(warm / RECORD)]
    if distill is not None:
        options += ["--distill", str(distill)]
    run.train(data, options, given)


def _options_of_model(warm: Path) -> list[str]:
    """The options of fairseq-train that build the model of a folder. Raises a UserError where it has none."""
    from lazyformer_fairseq.fairseq_plugin.models.safetensors_files import CONFIG_FILE, read_config

    options = read_config(warm / CONFIG_FILE)
    words = ["--arch", "lazyformer", "--tokens-per-sample", str(options["max_positions"])]
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            words += [option] if value else []
        else:
            words += [option, str(value)]
    return words
