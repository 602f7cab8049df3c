"""Refuses impossible checkpoint options before anything is trained: see :func:`refuse_impossible`."""

import functools
from collections.abc import Callable
from typing import Any, Optional

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.reliability.our_runs import names_task_of_ours


def refusing(parse_args_and_arch: Callable) -> Callable:
    """fairseq's parser of the command line, for a task of ours."""

    @functools.wraps(parse_args_and_arch)
    def parse(*args, **kwargs):
        parsed = parse_args_and_arch(*args, **kwargs)
        namespace = parsed[0] if isinstance(parsed, tuple) else parsed
        if names_task_of_ours(namespace):
            refuse_impossible(checkpoint=namespace, task=namespace)
        return parsed

    return parse


def refusing_of_hydra(add_defaults: Callable) -> Callable:
    """``add_defaults(cfg)``, which fairseq's training calls first, once it has imported the plugin; the same check."""

    @functools.wraps(add_defaults)
    def add(cfg):
        add_defaults(cfg)
        if names_task_of_ours(cfg):
            refuse_impossible(cfg.checkpoint, cfg.task)

    return add


def naming_the_folder(verify_checkpoint_directory: Callable) -> Callable:
    """fairseq's check that it may write to ``--save-dir``. Raises a UserError where it may not."""

    @functools.wraps(verify_checkpoint_directory)
    def verify(save_dir):
        try:
            verify_checkpoint_directory(save_dir)
        except OSError as error:
            raise UserError(f"--save-dir {save_dir}: cannot be written ({error.strerror}); give another") from error

    return verify


def refuse_impossible(checkpoint: Any, task: Any) -> None:
    """Raises a UserError for a value of fairseq's checkpoint options, or ours among the task's, that cannot be met.

    fairseq itself exits with code 0 where a run requests asynchronous writing and cannot have it.
    """
    if getattr(checkpoint, "write_checkpoints_asynchronously", False):
        raise UserError(
            "--write-checkpoints-asynchronously: fairseq may then write no checkpoint_last.pt, and a kill leave half "
            "a file; leave the option out"
        )
    listed_updates(getattr(task, "keep_updates_list", None))


def listed_updates(text: Optional[str]) -> frozenset[int]:
    """The updates of ``--keep-updates-list``. Raises a UserError where they are not whole numbers above 0."""
    parts = [part.strip() for part in text.split(",")] if text is not None else []
    for part in parts:
        if not (part.isascii() and part.isdigit() and int(part) > 0):
            raise UserError(f"--keep-updates-list {text}: {part!r} is no update; give whole numbers as 100000,200000")
    return frozenset(int(part) for part in parts)
