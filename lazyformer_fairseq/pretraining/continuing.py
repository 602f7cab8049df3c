"""The command ``lazyformer continue``."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

import click

from lazyformer_fairseq.arguments import ExistingPath, refuse_missing_folders
from lazyformer_fairseq.pretraining.commands import GIVEN, POSITIVE, SETTINGS
from lazyformer_fairseq.pretraining.start import Launch, launch_options

WEIGHTS, RECORD = "model.safetensors", "warm_start.json"


@click.command("continue", context_settings=SETTINGS)
@click.argument("warm", type=ExistingPath(holds=WEIGHTS))
@click.argument("data")
@GIVEN
@click.option("--distill", metavar="ORIGINAL", type=ExistingPath(), help="A teacher: a checkpoint, or its folder.")
@click.option(
    "--sequences-per-gpu",
    "--batch-size",
    "--max-sentences",
    "per_gpu",
    type=POSITIVE,
    help="At most so many in one forward pass.  [default: as many as fit the GPUs' memory, see --fit; 16 with "
    "ORIGINAL, whose memory is not counted; 4 on a CPU]",
)
@click.option("--sequences-per-update", "per_update", type=POSITIVE, help="A multiple of nodes x gpus.  [default: 256]")
@launch_options
def continue_pretraining(
    warm: Path,
    data: str,
    given: tuple[str, ...],
    distill: Optional[Path],
    per_gpu: Optional[int],
    per_update: Optional[int],
    **launch: Any,
) -> None:
    """Go on with masked LM from WARM, a folder that `lazyformer import` or `lazyformer export` wrote, on DATA.

    DATA is a folder of binarised data, or several as a:b:c, made with WARM's tokenizer. The setting: 100,000 updates of
    256 sequences (a tenth of `lazyformer pretrain`'s), else the same: Adam, peak rate 1e-4, 1% warm-up, linear decay to
    zero. Options of fairseq-train may follow and win: --max-update 1000, --save-dir DIR, --lr 5e-5.

    With --distill, the model learns from ORIGINAL too: from its words (--distill-words-weight, --distill-temperature)
    and its last attention (--distill-attention-weight).

    Checkpoints hold the new model alone. Run again, it resumes from the last one, bit by bit. See docs/warm_start.md.
    """
    run = Launch(**launch)
    run.refuse_uneven(per_update or 256, "sequences")
    if not run.dry_run:
        refuse_missing_folders(data)
    model = _options_of_model(warm)
    if per_gpu is None:
        job = _job(data, [*model, *given], per_update)
        per_gpu = 16 if run.found and distill else run.batch(job, 16 if run.found else 4)
    options = f"""
        --task full_sentences_masked_lm --criterion continued_masked_lm
        --optimizer fused_adam --adam-eps 1e-6 --weight-decay 0.01 --clip-norm 1.0
        --lr-scheduler linear_warmup --lr 1e-4 --warmup-ratio 0.01 --max-update 100000
        --sequences-per-update {per_update or 256} --batch-size {per_gpu} --required-batch-size-multiple 1
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


def _job(data: str, options: list[str], per_update: Optional[int]) -> Callable[[], Any]:
    """What makes a plan's job of a launch, and imports torch for it."""

    def make() -> Any:
        from lazyformer_fairseq.measure.planning.launched import job_of_launch

        return job_of_launch("bert_base", None, data, options, per_update)  # whose options all stand in `options`

    return make
