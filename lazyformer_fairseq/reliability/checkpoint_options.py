"""Options of checkpoints that cannot be met are refused before anything is trained."""

import functools
from collections.abc import Callable
from typing import Any, Optional

from lazyformer_fairseq.errors import UserError


def refusing(parse_args_and_arch: Callable) -> Callable:
    """fairseq's parser of the command line. fairseq ends a run that wants asynchronous writing with exit code 0."""

    @functools.wraps(parse_args_and_arch)
    def parse(*args, **kwargs):
        parsed = parse_args_and_arch(*args, **kwargs)
        namespace = parsed[0] if isinstance(parsed, tuple) else parsed
        refuse_impossible(checkpoint=namespace, task=namespace)
        return parsed

    return parse


def refuse_impossible(checkpoint: Any, task: Any) -> None:
    """Raises a UserError for a value of fairseq's checkpoint options, or ours among the task's, that cannot be met."""
    if getattr(checkpoint, "write_checkpoints_asynchronously", False):
        raise UserError(
            "--write-checkpoints-asynchronously: fairseq may then write no checkpoint_last.pt, and a kill leave half "
            "a file; leave the option out"
        )
    listed_updates(getattr(task, "keep_updates_list", None))


def listed_updates(text: Optional[str]) -> frozenset[int]:
    """The updates of ``--keep-updates-list``. Raises a UserError where they are no whole numbers above 0."""
    parts = [part.strip() for part in text.split(",")] if text is not None else []
    for part in parts:
        if not (part.isascii() and part.isdigit() and int(part) > 0):
            raise UserError(f"--keep-updates-list {text}: {part!r} is no update; give whole numbers as 100000,200000")
    return frozenset(int(part) for part in parts)
