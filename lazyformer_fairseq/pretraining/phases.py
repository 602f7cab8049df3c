"""The command ``lazyformer pretrain-phases``: PAR BERT's two phases, each a ``lazyformer pretrain`` of its own.

OUT/phases.json             the settings, the same at every start
OUT/phase1, OUT/phase2      what `lazyformer pretrain` writes; finished.json in it once all updates are made
"""

import sys
from datetime import datetime
from pathlib import Path
from typing import Optional

import click

from lazyformer_fairseq.arguments import options_by_name, refuse_missing_folders, words_of
from lazyformer_fairseq.child_process import run_to_its_end
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.patterns.architectures import ARCHITECTURES
from lazyformer_fairseq.pretraining.commands import GIVEN, SETTINGS
from lazyformer_fairseq.pretraining.launch import refuse_unknown_arch
from lazyformer_fairseq.pretraining.recipes import PHASES, RECIPES
from lazyformer_fairseq.storage.json_files import write_json
from lazyformer_fairseq.storage.run_lock import keep_settings

LAST, FINISHED = "checkpoint_last.pt", "finished.json"
OWN = {
    "recipe": "each phase has its own",
    "save_dir": "give it once, for both phases: a folder for each is made in it",
    "finetune_from_model": "phase 2 starts from phase 1; give it in --phase1 to start phase 1 from a model",
}
# What may change when a pre-training is resumed: it changes how it runs, not what is trained.
FREE = (
    *("gpus", "nodes", "node_rank", "master", "max_restarts", "fp16", "bf16", "fp32", "fit", "no_fit", "dry_run"),
    *("sequences_per_gpu", "batch_size", "max_sentences", "batch_size_valid", "num_workers", "ddp_backend"),
    *("attention_backend", "lazy_backend", "compile", "verify"),
    *("log_interval", "log_format", "tensorboard_logdir", "wandb_project"),
    *("save_interval_updates", "keep_interval_updates", "keep_updates_list", "validate_interval_updates"),
)
TINY = {
    "phase1": "--tokens-per-sample 32 --sequences-per-update 64 --max-update 300 --lr 1e-2",
    "phase2": "--tokens-per-sample 128 --sequences-per-update 32 --max-update 66 --lr 6.7e-3",
}
TINY_BOTH = (
    "--encoder-embed-dim 48 --encoder-ffn-embed-dim 192 --encoder-attention-heads 2 --max-positions 128 --dropout 0 "
    "--attention-dropout 0 --batch-size 64 --num-workers 0 --save-interval-updates 50 --max-valid-steps 10"
)


@click.command("pretrain-phases", context_settings=SETTINGS)
@click.argument("arch")
@click.argument("data")
@GIVEN
@click.option("--save-dir", type=click.Path(path_type=Path, file_okay=False),
              help="Folder OUT of both phases.  [default: checkpoints/ARCH_phases]")  # fmt: skip
@click.option("--phase1", default="", metavar="'OPTIONS'", show_default=False,
              help="For phase 1 alone, as '--max-update 100 --lr 1e-3'.")  # fmt: skip
@click.option("--phase2", default="", metavar="'OPTIONS'", show_default=False, help="For phase 2 alone.")
@click.option("--tiny", is_flag=True, help="Both phases in miniature: some 95 seconds on one core.")
def pretrain_phases(
    arch: str, data: str, given: tuple[str, ...], save_dir: Optional[Path], phase1: str, phase2: str, tiny: bool
) -> None:
    """Pre-train ARCH (par_bert_base, bert_base, ...) on DATA in PAR BERT's two phases, on the GPUs there are.

    \b
    OUT/phase1: 7,038 updates of 65,536 sequences of 128 tokens, peak rate 6e-3, 28.43% warm-up
    OUT/phase2: 1,563 updates of 32,768 sequences of 512 tokens, peak rate 4e-3, 12.8% warm-up

    Both: LAMB, weight decay 0.01 but for biases and LayerNorms, clip 1.0, decay to zero by the square root of what is
    left. Phase 2 starts from phase 1's weights, with a fresh optimizer and schedule, and packs the text anew. Options
    of `lazyformer pretrain` and of fairseq-train may follow, for both phases, and win: --gpus 4, --seed 2.

    Stop it at any time; rerun to resume. A phase that is finished is not repeated. The model is OUT/phase2. See
    docs/par_bert.md.
    """
    refuse_unknown_arch(arch, ARCHITECTURES)
    out = save_dir or Path(f"checkpoints/{arch}_phases")
    words = {phase: _words(phase, own, given, tiny) for phase, own in (("phase1", phase1), ("phase2", phase2))}
    is_dry = "--dry-run" in given
    if not is_dry:
        refuse_missing_folders(data)
        settings = {"arch": arch, "data": data, **_kept(words)}
        keep_settings(out / "phases.json", settings, "a pre-training", begun=(out / "phase1").exists())
    words["phase2"] += ["--finetune-from-model", str(out / "phase1" / LAST)]
    for phase in PHASES:
        _run(phase, arch, data, out / phase, words[phase], is_dry)
    if not is_dry:
        click.echo(_what_next(out / PHASES[-1] / LAST))


def _what_next(model: Path) -> str:
    return f"""both phases are finished; the model is {model}. To fine-tune it:
  lazyformer finetune {model} GLUE_DATA RESULTS
  lazyformer finetune-squad {model} SQUAD_DATA RESULTS"""


def _words(phase: str, options: str, given: tuple[str, ...], tiny: bool) -> list[str]:
    """Options of `lazyformer pretrain`; of several with the same name the last counts."""
    own = words_of(options, f"--{phase}")
    refused = {*options_by_name(given), *options_by_name(own)} & set(OWN)
    if phase == PHASES[0] and "finetune_from_model" not in options_by_name(given):
        refused -= {"finetune_from_model"}
    if refused:
        name = min(refused)
        raise UserError(f"--{name.replace('_', '-')}: {OWN[name]}")
    return [*(f"{TINY_BOTH} {TINY[phase]}".split() if tiny else []), *given, *own]


def _kept(words: dict[str, list[str]]) -> dict[str, str]:
    """Of all phases' options those that decide what is trained, by phase and name."""
    return {
        f"{phase} --{name.replace('_', '-')}": value
        for phase in words
        for name, value in options_by_name(words[phase]).items()
        if name not in FREE
    }


def _run(phase: str, arch: str, data: str, folder: Path, words: list[str], is_dry: bool) -> None:
    """Runs a phase to its end, unless it is finished. Exits as the training does where it is stopped, or fails."""
    if not is_dry and _is_finished(phase, folder, words):
        click.echo(f"{phase}: finished already", err=True)
        return
    click.echo(f"{phase}: {folder}", err=True)
    command = [sys.executable, "-m", "lazyformer_fairseq.cli", "pretrain", arch, data]
    ended = run_to_its_end([*command, "--recipe", phase, "--save-dir", str(folder), *words])
    if ended.code:
        how = "stopped" if ended.was_stopped else f"ended with exit code {ended.code}"
        click.echo(f"{phase}: {how}; rerun to resume", err=True)
        sys.exit(ended.code if ended.code > 0 else 128 - ended.code)
    if not is_dry and not _is_finished(phase, folder, words):  # --stop-time-hours, say
        raise UserError(f"{phase} ended before its last update; rerun to resume")


def _is_finished(phase: str, folder: Path, words: list[str]) -> bool:
    """Whether all updates are made; then a record says so. Started once more, fairseq would make another one."""
    record, last = folder / FINISHED, folder / LAST
    if record.exists() or not last.exists():
        return record.exists()
    from lazyformer_fairseq.fairseq_plugin.reliability.checkpoint_loading import look_into  # imports torch

    try:
        made = look_into(last).updates
    except UserError:  # damaged: the training finds another one
        return False
    if made < int(options_by_name(words).get("max_update", RECIPES[phase].updates)):
        return False
    write_json(record, {"updates": made, "seen": datetime.now().isoformat(timespec="seconds")})
    return True
