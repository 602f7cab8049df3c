"""PAR BERT's two phases, and Longformer's five, each a ``lazyformer pretrain`` of its own that goes on with weights.

OUT/phases.json             the settings, the same at every start
OUT/phase1, OUT/phase2 ...  what `lazyformer pretrain` writes; finished.json in it once all updates are made
"""

import signal
import sys
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

import click

from lazyformer_fairseq.arguments import as_words, options_by_name, refuse_missing_folders, words_of
from lazyformer_fairseq.child_process import STOPPED, run_to_its_end
from lazyformer_fairseq.errors import UserError, whole_number
from lazyformer_fairseq.fairseq_plugin.launcher.recipes import RECIPES, with_warmup_of
from lazyformer_fairseq.patterns.architectures import CAUSAL_ARCHITECTURES
from lazyformer_fairseq.storage.json_files import write_json
from lazyformer_fairseq.storage.run_lock import keep_settings
from lazyformer_fairseq.training.stop_signals import EXIT_CODE

LAST = "checkpoint_last.pt"
FINISHED = "finished.json"
OWN = {
    "recipe": "each phase has its own",
    "save_dir": "give it once, for all phases: a folder for each is made in it",
    "finetune_from_model": "phase 2 starts from phase 1; give it in --phase1 to start phase 1 from a model",
}
# What may change when a pre-training is resumed: it changes how it runs, not what is trained.
FREE = (
    *("gpus", "nodes", "node_rank", "master", "max_restarts", "precision", "fit", "no_fit", "dry_run", "save_dir"),
    *("sequences_per_gpu", "batch_size", "max_sentences", "batch_size_valid", "num_workers", "ddp_backend"),
    *("attention_backend", "compile", "verify"),
    *("log_interval", "log_seconds", "log_format", "tensorboard_logdir", "wandb_project"),
    *("save_interval_updates", "keep_interval_updates", "keep_updates_list", "validate_interval_updates"),
)


def pretrain_in_phases(
    arch: str,
    data: str,
    given: list[str],
    phases: Mapping[str, Mapping[str, str]],
    own: Mapping[str, str],
    is_dry: bool,
) -> None:
    """Runs all phases, each as a process, to their ends. A phase that is finished is not repeated.

    Args:
        given: options of ``lazyformer pretrain`` and of fairseq-train, for all phases.
        phases: by name, options of each, its `recipe` among them; they come before those that are given.
        own: by name, more of a user's for one phase, which win.

    Raises:
        UserError: an option that cannot be given, or other settings than before in the same folder.
        SystemExit: a phase was stopped, or failed: with its exit code.
    """
    out = Path(options_by_name(given).get("save_dir", f"checkpoints/{arch}_phases"))
    words = {}
    before = None
    for phase, options in phases.items():
        of_phase = {name: value for name, value in options.items() if name != "recipe"}
        schedule = options_by_name([*given, *words_of(own.get(phase, ""), f"--{phase}")]).get("lr_scheduler")
        if schedule is not None:
            of_phase = with_warmup_of(schedule, of_phase)
        words[phase] = _words(phase, own.get(phase, ""), [*given, *as_words(of_phase)], is_first=not words)
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
    for phase, options in phases.items():
        if before is not None:
            words[phase] += ["--finetune-from-model", str(out / before / LAST)]
            if not is_dry and not (out / phase / LAST).exists():
                _refuse_without_weights(before, out / before)
        _run(phase, options["recipe"], arch, data, out / phase, words[phase], is_dry)
        before = phase
    if not is_dry:
        model = out / before / LAST
        click.echo(f"all phases are finished; the model is {model}")
        if arch in CAUSAL_ARCHITECTURES:
            click.echo(f"To evaluate it:\n  lazyformer lm evaluate {model} {data}")
            return
        click.echo(f"To fine-tune it:\n  lazyformer finetune {model} --data GLUE_DATA --output RESULTS")
        click.echo(f"  lazyformer finetune {model} --task squad --data SQUAD_DATA --output RESULTS")


def _words(phase: str, options: str, given: list[str], is_first: bool) -> list[str]:
    """Options of `lazyformer pretrain`; of several with the same name the last counts."""
    own = words_of(options, f"--{phase}")
    if is_first:
        refused = OWN.keys() - {"finetune_from_model"}
    else:
        refused = OWN
    for name in (*options_by_name(own), *options_by_name(given)):
        if name in refused and (name in options_by_name(own) or name != "save_dir"):
            raise UserError(f"--{name.replace('_', '-')}: {OWN[name]}")
    return [*given, *own]


def _run(phase: str, recipe: str, arch: str, data: str, folder: Path, words: list[str], is_dry: bool) -> None:
    """Runs a phase to its end, unless it is finished. Exits as the training does where it is stopped, or fails."""
    if not is_dry and _is_finished(phase, folder, words):
        click.echo(f"{phase}: finished already", err=True)
        return
    click.echo(f"{phase}: {folder}", err=True)
    command = [sys.executable, "-m", "lazyformer_fairseq.cli", "pretrain", arch, data]
    ended = run_to_its_end([*command, *words, "--recipe", recipe, "--save-dir", str(folder)])
    if ended.code or ended.signals:
        if ended.signals:
            how = "stopped"
        else:
            how = f"ended with exit code {ended.code}"
        click.echo(f"{phase}: {how}; rerun to resume", err=True)
        late = STOPPED if signal.SIGINT in ended.signals else EXIT_CODE  # the last update was under way, and was made
        sys.exit(128 - ended.code if ended.code < 0 else ended.code or late)
    if not is_dry and not _is_finished(phase, folder, words):
        raise UserError(
            f"{phase} ended before its last update; rerun to resume, without the option that ended it if there is one "
            "(--stop-time-hours, --max-epoch, --patience)"
        )


def _refuse_without_weights(phase: str, folder: Path) -> None:
    """Raises a UserError where the checkpoint of a finished phase, from which the next one starts, cannot be read."""
    from lazyformer_fairseq.fairseq_plugin.reliability.checkpoints import look_into  # imports torch

    try:
        look_into(folder / LAST)
    except UserError as error:
        remedy = f"put it back, or remove {folder / FINISHED}: then {phase} makes its last updates again"
        raise UserError(f"{error}; {phase} is finished, and the next one starts from it: {remedy}") from None


def _is_finished(phase: str, folder: Path, words: list[str]) -> bool:
    """Return whether all updates are made; then a record says so, and the phase need not be started to find out."""
    record = folder / FINISHED
    last = folder / LAST
    if record.exists() or not last.exists():
        return record.exists()
    from lazyformer_fairseq.fairseq_plugin.reliability.checkpoints import look_into  # imports torch

    try:
        made = look_into(last).updates
    except UserError:  # damaged: the training finds another one
        return False
    updates = options_by_name(words).get("max_update") or str(RECIPES[phase].updates)
    if whole_number(updates) is None:
        raise UserError(f"--max-update {updates}: must be a whole number")
    if made < int(updates):
        return False
    write_json(record, {"updates": made, "seen": datetime.now().isoformat(timespec="seconds")})
    return True
