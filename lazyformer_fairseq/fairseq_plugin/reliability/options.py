"""Options of a safe run, shared by all tasks, and which of fairseq's own cannot be met."""

import functools
import importlib.util
import logging
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.util import get_temp_dir
from typing import Any, Optional

import torch
from fairseq.dataclass import FairseqDataclass
from omegaconf import DictConfig, ListConfig

from lazyformer_fairseq.errors import UserError

logger = logging.getLogger(__name__)

CRITERIONS = {
    "full_sentences_masked_lm": "masked_lm_accuracy",
    "glue": "glue",
    "squad": "squad",
    "stream_language_modeling": "causal_lm",
}
OURS = "'lazyformer_fairseq[logging]', or in a checkout pip install '.[logging]'"
LOGS_NEED = {
    "tensorboard_logdir": (("tensorboard", "tensorboardX"), OURS),
    "wandb_project": (("wandb",), OURS),
}


def option(default: Any, help: str) -> Any:
    """A field of a config: what fairseq makes an option of the command line."""
    return field(default=default, metadata={"help": help})


# Options of models that had another name in 0.1.0. On command lines, in YAML and in checkpoints the old ones still
# serve; what is written has the new ones.
OLD_NAMES = {"lazy_backend": "attention_backend"}


def with_new_names(options: Mapping[str, Any]) -> dict[str, Any]:
    """A model's options without those of :data:`OLD_NAMES`, which give their values where the new ones are "auto"."""
    renamed = {name: value for name, value in options.items() if name not in OLD_NAMES}
    for old, new in OLD_NAMES.items():
        if (value := options.get(old)) and str(renamed.get(new, "")) in ("", "auto"):
            renamed[new] = value
    return renamed


def backend_of(model: Any) -> str:
    """The ``--attention-backend`` of a model's settings; empty for a model that has no such option."""
    names = ("attention_backend", *OLD_NAMES)
    return str(with_new_names({name: getattr(model, name, None) or "" for name in names})["attention_backend"])


@dataclass
class ReliabilityConfig(FairseqDataclass):
    keep_updates_list: Optional[str] = option(
        None, "updates saved for good as checkpoint_update_N.pt, as 100000,200000"
    )
    max_skipped_updates: int = option(10, "updates skipped in a row, for NaN, Inf or a loss spike, before a rollback")
    max_rollbacks: int = option(3, "to the last good checkpoint, of the whole run, before it stops with a report")
    loss_spike: float = option(0.0, "skip a loss of more than this many times the recent median; 0: never")
    sequences_per_update: Optional[int] = option(None, "over all GPUs, --batch-size at once; works out --update-freq")


LONGEST_SOCKET = 107  # bytes of the name of a Unix socket on Linux (man 7 unix)
SOCKET = len("/listener-12345678")  # that multiprocessing adds to its folder's name

SIZES = ("embed_dim", "ffn_embed_dim", "attention_heads")
# The least value of an option, by name.
LEAST = {
    **dict.fromkeys(("batch_size", "batch_size_valid", "max_tokens", "max_tokens_valid", "update_freq"), 1),
    **dict.fromkeys(("log_interval", "save_interval", "validate_interval"), 1),
    **dict.fromkeys(("tokens_per_sample", "tgt_len", "valid_tgt_len", "max_positions"), 1),
    **{f"{side}_{size}": 1 for side in ("encoder", "decoder") for size in SIZES},
    **dict.fromkeys(("num_workers", "mem_len", "relative_position_buckets"), 0),
    "clamp_len": -1,
}
DROPOUTS = ("dropout", "attention_dropout", "activation_dropout", "pooler_dropout")


def refuse_impossible(*options: Any) -> None:
    """Raises a UserError for a value of fairseq's options or ours, in one object or several, that cannot be met.

    fairseq itself exits with code 0 where a run requests asynchronous writing and cannot have it.
    """
    for some in options:
        if getattr(some, "write_checkpoints_asynchronously", False):
            raise UserError(
                "--write-checkpoints-asynchronously: fairseq may then write no checkpoint_last.pt, and a kill leave "
                "half a file; leave the option out"
            )
        listed_updates(getattr(some, "keep_updates_list", None))
        for name, least in LEAST.items():
            given = getattr(some, name, None)
            for value in given if isinstance(given, (list, ListConfig)) else [given]:
                if _is_below(value, least):
                    raise UserError(f"--{name.replace('_', '-')} {value}: must be {least} or more")
        for name in DROPOUTS:
            if not 0 <= (value := getattr(some, name, None) or 0) < 1:
                raise UserError(f"--{name.replace('_', '-')} {value}: must be from 0 to below 1")


def _is_below(value: Any, least: int) -> bool:
    """False for what is not given or no number; fairseq parses some of its numbers as text."""
    try:
        return float(value) < least
    except (TypeError, ValueError):
        return False


def refuse_unfit(cfg: DictConfig) -> None:
    """Raises a UserError for what is missing of a run's settings, or where a package is that one of them needs."""
    task = cfg.task._name
    if task in CRITERIONS and getattr(cfg.criterion, "_name", None) in (None, "cross_entropy"):
        raise UserError(
            f"--criterion: give {CRITERIONS[task]}; fairseq's default, cross_entropy, cannot train --task {task}"
        )
    if cfg.dataset.batch_size is None and cfg.dataset.max_tokens is None:
        raise UserError("--batch-size: give the sequences that a process takes at once, or --max-tokens")
    refuse_long_temporary_folder(cfg.dataset.num_workers)
    for name, (packages, what) in LOGS_NEED.items():
        if cfg.common.get(name) and not any(map(importlib.util.find_spec, packages)):
            raise UserError(
                f"--{name.replace('_', '-')} {cfg.common[name]}: nothing would be written, as {' or '.join(packages)} "
                f"is not installed here: pip install {what}"
            )


def refuse_long_temporary_folder(workers: int) -> None:
    """Raises a UserError where data workers could not hand over a batch: the run would wait for it for ever.

    torch's workers open a socket in multiprocessing's folder, fail where its name is too long, and do not say so.
    """
    if workers == 0 or torch.multiprocessing.get_sharing_strategy() != "file_descriptor":
        return
    surplus = len(os.fsencode(get_temp_dir())) + SOCKET - LONGEST_SOCKET
    if surplus > 0:
        folder = tempfile.gettempdir()
        length = len(os.fsencode(folder))
        raise UserError(
            f"--num-workers {workers}: data workers need sockets in the folder of temporary files, whose name is too "
            f"long for that: {folder} has {length} characters, {length - surplus} may be; set TMPDIR to a shorter one, "
            "as in export TMPDIR=/tmp"
        )


def listed_updates(text: Optional[str]) -> frozenset[int]:
    """The updates of ``--keep-updates-list``. Raises a UserError where they are not whole numbers above 0."""
    parts = [part.strip() for part in text.split(",")] if text is not None else []
    for part in parts:
        if not (part.isascii() and part.isdigit() and int(part) > 0):
            raise UserError(f"--keep-updates-list {text}: {part!r} is no update; give whole numbers as 100000,200000")
    return frozenset(int(part) for part in parts)


def settle_update_size(cfg: DictConfig) -> None:
    """For ``--sequences-per-update``: an update has this size on any number of processes.

    Works out ``update_freq``, and lowers ``batch_size`` to a divisor of a process's share; without it does nothing.

    Raises:
        UserError: such an update cannot be had, or another option decides its size too.
    """
    per_update, world = cfg.task.get("sequences_per_update"), cfg.distributed_training.distributed_world_size
    if per_update is None:
        return
    if per_update < 1 or per_update % world:
        raise UserError(
            f"--sequences-per-update {per_update}: an update does not divide among {world} processes; give a multiple"
        )
    if cfg.dataset.max_tokens is not None:
        raise UserError(f"--max-tokens {cfg.dataset.max_tokens}: give --batch-size, with --sequences-per-update")
    share, most = per_update // world, cfg.dataset.batch_size
    if not most or most < 1:
        raise UserError(f"--batch-size {most}: give the sequences that a process takes at once, at least 1")
    batch = next(size for size in range(min(most, share), 0, -1) if share % size == 0)
    update_freq = share // batch
    if list(cfg.optimization.update_freq) not in ([1], [update_freq]):
        given = ",".join(map(str, cfg.optimization.update_freq))
        raise UserError(
            f"--update-freq {given}: --sequences-per-update {per_update} works it out; leave one of them out"
        )
    cfg.dataset.batch_size, cfg.optimization.update_freq = batch, [update_freq]
    _say(f"an update is {per_update} sequences: {world} processes x {batch} sequences x update-freq {update_freq}")


@functools.cache
def _say(words: str) -> None:
    """Once: under hydra the settings are read twice."""
    logger.info(words)
