"""Pre-training in phases: two for PAR BERT and five for Longformer.

Each phase is a separate ``lazyformer pretrain`` run that starts from the previous phase's weights.

OUT/phases.json             the settings, which must stay the same whenever the command is rerun
OUT/phase1, OUT/phase2 ...  the output of `lazyformer pretrain`, plus finished.json once all updates are done
"""

import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import click

from lazyformer_fairseq.arguments import options_by_name, split_arguments, to_arguments
from lazyformer_fairseq.child_process import STOPPED, run_forwarding_signals
from lazyformer_fairseq.errors import UserError, whole_number
from lazyformer_fairseq.fairseq_plugin.launcher.recipes import PHASES, RECIPES, convert_warmup
from lazyformer_fairseq.patterns.architectures import CAUSAL_ARCHITECTURES
from lazyformer_fairseq.storage.json_files import write_json
from lazyformer_fairseq.storage.run_lock import keep_settings
from lazyformer_fairseq.training.stop_signals import EXIT_CODE

LAST = "checkpoint_last.pt"
FINISHED = "finished.json"
OWN = {
    "recipe": "each phase has its own; omit the option",
    "save_dir": "set this option once for all phases; each phase gets a subfolder",
    "finetune_from_model": "each phase starts from the previous one; to start phase 1 from a model, set this option in "
    "--phase1",
}
# Options that may change when a run is resumed, because they affect how it runs but not what is trained.
FREE = """
    gpus nodes node_rank master max_restarts precision fit no_fit dry_run save_dir
    sequences_per_gpu batch_size max_sentences batch_size_valid num_workers ddp_backend
    attention_backend compile verify
    log_interval log_seconds log_format tensorboard_logdir wandb_project report_to
    save_interval_updates keep_interval_updates keep_updates_list validate_interval_updates
    checkpoint_words word_budget
""".split()
# Settings that reveal which phase a checkpoint belongs to, by section of its configuration.
SHAPE = {"model": ("sublayer_pattern",), "task": ("tokens_per_sample", "tgt_len")}


@dataclass(frozen=True)
class Phase:
    """A phase of a recipe.

    Attributes:
        name: the name of the phase and of its folder.
        recipe: a recipe of ``lazyformer pretrain``.
        options: the phase's options, which override the user's options for all phases.
        own: the user's options for this phase only, as one string; they override all others.
    """

    name: str
    recipe: str
    options: Mapping[str, str]
    own: str


def pretrain_in_phases(arch: str, data: str, given: list[str], phases: Sequence[Phase], is_dry: bool) -> None:
    """Run all unfinished phases in sequence, each in a separate process.

    Args:
        arch: the model's name.
        data: folders of binarized data.
        given: options of ``lazyformer pretrain`` and fairseq-train for all phases.
        phases: the phases in order.
        is_dry: whether to only print the commands.

    Raises:
        UserError: an option is not allowed here, the folder was begun with different settings, or it contains a
            different phase's checkpoint.
        SystemExit: a phase was stopped or failed; the exit code is the phase's.
    """
    out = Path(options_by_name(given).get("save_dir", f"checkpoints/{arch}_phases"))
    words = {phase.name: _words_of_phase(phase, given, phase is phases[0]) for phase in phases}
    if not is_dry:
        settings = {"arch": arch, "data": data}
        for phase_name, phase_words in words.items():
            for name, value in options_by_name(phase_words).items():
                if name not in FREE:  # options in FREE do not affect what is trained
                    settings[f"{phase_name} --{name.replace('_', '-')}"] = value
        keep_settings(out / "phases.json", settings, "a pre-training run", begun=(out / "phase1").exists())

    before = None
    for phase in phases:
        its_words = words[phase.name]
        folder = out / phase.name
        if before is not None:
            its_words += ["--finetune-from-model", str(out / before / LAST)]
            if not is_dry and not (folder / LAST).exists():
                _refuse_without_weights(before, out / before)
        before = phase.name
        if not is_dry and _is_finished(phase, folder, its_words):
            click.echo(f"{phase.name}: already finished", err=True)
            continue
        click.echo(f"{phase.name}: {folder}", err=True)
        command = [sys.executable, "-m", "lazyformer_fairseq.cli", "pretrain", arch, data, *its_words]
        _run([*command, "--recipe", phase.recipe, "--save-dir", str(folder)], phase.name)
        if not is_dry and not _is_finished(phase, folder, its_words):
            raise UserError(
                f"{phase.name} ended before its last update; to resume, rerun the command without the option that "
                "ended the phase, if any (--stop-time-hours, --max-epoch, --patience)"
            )

    if not is_dry:
        model = out / before / LAST
        click.echo(f"all phases are finished; the model is {model}")
        if arch in CAUSAL_ARCHITECTURES:
            click.echo(f"To evaluate it:\n  lazyformer lm evaluate {model} {data}")
        else:
            click.echo(f"To fine-tune it:\n  lazyformer finetune {model} --data GLUE_DATA --output RESULTS")
            click.echo(f"  lazyformer finetune {model} --task squad --data SQUAD_DATA --output RESULTS")


def _words_of_phase(phase: Phase, given: list[str], is_first: bool) -> list[str]:
    """Return a phase's options for `lazyformer pretrain`; if an option occurs twice, the last one applies.

    Raises:
        UserError: the user has set an option that the phases set themselves.
    """
    own_words = split_arguments(phase.own, f"--{phase.name}")
    own_names = options_by_name(own_words)
    for name in (*own_names, *options_by_name(given)):
        is_for_one = name == "finetune_from_model" and is_first
        is_for_all = name == "save_dir" and name not in own_names
        if name in OWN and not is_for_one and not is_for_all:
            raise UserError(f"--{name.replace('_', '-')}: {OWN[name]}")
    options = phase.options
    schedule = options_by_name([*given, *own_words]).get("lr_scheduler")
    if schedule is not None:
        options = convert_warmup(schedule, options)
    return [*given, *to_arguments(options), *own_words]


def _run(command: list[str], phase: str) -> None:
    """Run a phase, and exit with its exit code if it is stopped or fails."""
    ended = run_forwarding_signals(command)
    if not ended.code and not ended.signals:
        return
    how = "stopped" if ended.signals else f"ended with exit code {ended.code}"
    click.echo(f"{phase}: {how}; rerun to resume", err=True)
    if ended.code < 0:
        sys.exit(128 - ended.code)
    if ended.code:
        sys.exit(ended.code)
    sys.exit(STOPPED if signal.SIGINT in ended.signals else EXIT_CODE)  # the signal arrived during the last update


def _refuse_without_weights(phase: str, folder: Path) -> None:
    """Raise a UserError if a finished phase's checkpoint, which the next phase starts from, cannot be read."""
    from lazyformer_fairseq.storage.checkpoint_file import look_into  # imports torch

    try:
        look_into(folder / LAST)
    except UserError as error:
        remedy = f"restore it, or remove {folder / FINISHED} to let {phase} repeat its last updates"
        raise UserError(f"{error}; {phase} is finished, and the next phase starts from this file: {remedy}") from None


def _is_finished(phase: Phase, folder: Path, words: list[str]) -> bool:
    """Return whether a phase has completed all its updates.

    A finished phase is recorded in ``finished.json``, in case its checkpoint is lost.

    Raises:
        UserError: the folder's checkpoint was written by a different phase.
    """
    record = folder / FINISHED
    last = folder / LAST
    if not last.exists():
        return record.exists()
    from lazyformer_fairseq.storage.checkpoint_file import load, look_into  # imports torch

    try:
        made = look_into(last).updates
    except UserError:  # the checkpoint is damaged; the run will look for an older one
        return record.exists()

    wanted = options_by_name(words)
    if phase.recipe in PHASES:
        recipe = RECIPES[phase.recipe]
        wanted = {"tokens_per_sample": str(recipe.tokens), "max_update": str(recipe.updates)} | wanted
    found = load(last).get("cfg") or {}
    for section, names in SHAPE.items():
        for name in names:
            value = found.get(section, {}).get(name)
            if name in wanted and value is not None and str(value) != wanted[name]:
                raise UserError(
                    f"{last} is not a checkpoint of {phase.name}: its {name} is {value}, but {phase.name} has "
                    f"{wanted[name]}; restore the order of the phases' folders, or set a different --save-dir"
                )

    if whole_number(wanted["max_update"]) is None:
        raise UserError(f"--max-update {wanted['max_update']}: must be a whole number")
    if made < int(wanted["max_update"]):
        return False
    if not record.exists():
        write_json(record, {"updates": made, "seen": datetime.now().isoformat(timespec="seconds")})
    return True
