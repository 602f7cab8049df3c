"""``lazyformer pretrain --recipe phases``: PAR BERT's two phases, each a ``lazyformer pretrain`` of its own.

OUT/phases.json             the settings, the same at every start
OUT/phase1, OUT/phase2      what `lazyformer pretrain` writes; finished.json in it once all updates are made
"""

import sys
from datetime import datetime
from pathlib import Path

import click

from lazyformer_fairseq.arguments import options_by_name, refuse_missing_folders, words_of
from lazyformer_fairseq.child_process import run_to_its_end
from lazyformer_fairseq.errors import UserError
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
    *("gpus", "nodes", "node_rank", "master", "max_restarts", "precision", "fit", "no_fit", "dry_run", "save_dir"),
    *("sequences_per_gpu", "batch_size", "max_sentences", "batch_size_valid", "num_workers", "ddp_backend"),
    *("attention_backend", "lazy_backend", "compile", "verify"),
    *("log_interval", "log_seconds", "log_format", "tensorboard_logdir", "wandb_project"),
    *("save_interval_updates", "keep_interval_updates", "keep_updates_list", "validate_interval_updates"),
)


def pretrain_in_phases(arch: str, data: str, given: list[str], phase1: str, phase2: str, is_dry: bool) -> None:
    """Runs both phases, each as a process, to their ends. A phase that is finished is not repeated.

    Args:
        given: options of ``lazyformer pretrain`` and of fairseq-train, for both phases.
        phase1, phase2: more of these, for one phase, which win.

    Raises:
        UserError: an option that cannot be given, or other settings than before in the same folder.
        SystemExit: a phase was stopped, or failed: with its exit code.
    """
    out = Path(options_by_name(given).get("save_dir", f"checkpoints/{arch}_phases"))
    words = {phase: _words(phase, own, given) for phase, own in zip(PHASES, (phase1, phase2), strict=True)}
    if not is_dry:
        refuse_missing_folders(data)
        kept = {  # of all phases' options those that decide what is trained
            f"{phase} --{name.replace('_', '-')}": value
            for phase in words
            for name, value in options_by_name(words[phase]).items()
            if name not in FREE
        }
        settings = {"arch": arch, "data": data, **kept}
        keep_settings(out / "phases.json", settings, "a pre-training", begun=(out / "phase1").exists())
    words["phase2"] += ["--finetune-from-model", str(out / "phase1" / LAST)]
    for phase in PHASES:
        _run(phase, arch, data, out / phase, words[phase], is_dry)
    if not is_dry:
        model = out / PHASES[-1] / LAST
        click.echo(f"both phases are finished; the model is {model}. To fine-tune it:")
        click.echo(f"  lazyformer finetune {model} GLUE_DATA RESULTS")
        click.echo(f"  lazyformer finetune --task squad {model} SQUAD_DATA RESULTS")


def _words(phase: str, options: str, given: list[str]) -> list[str]:
    """Options of `lazyformer pretrain`; of several with the same name the last counts."""
    own = words_of(options, f"--{phase}")
    refused = OWN if phase == "phase2" else OWN.keys() - {"finetune_from_model"}
    for name in (*options_by_name(own), *options_by_name(given)):
        if name in refused and (name in options_by_name(own) or name != "save_dir"):
            raise UserError(f"--{name.replace('_', '-')}: {OWN[name]}")
    return [*given, *own]


def _run(phase: str, arch: str, data: str, folder: Path, words: list[str], is_dry: bool) -> None:
    """Runs a phase to its end, unless it is finished. Exits as the training does where it is stopped, or fails."""
    if not is_dry and _is_finished(phase, folder, words):
        click.echo(f"{phase}: finished already", err=True)
        return
    click.echo(f"{phase}: {folder}", err=True)
    command = [sys.executable, "-m", "lazyformer_fairseq.cli", "pretrain", arch, data]
    ended = run_to_its_end([*command, *words, "--recipe", phase, "--save-dir", str(folder)])
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
    from lazyformer_fairseq.fairseq_plugin.reliability.checkpoints import look_into  # imports torch

    try:
        made = look_into(last).updates
    except UserError:  # damaged: the training finds another one
        return False
    if made < int(options_by_name(words).get("max_update", RECIPES[phase].updates)):
        return False
    write_json(record, {"updates": made, "seen": datetime.now().isoformat(timespec="seconds")})
    return True
