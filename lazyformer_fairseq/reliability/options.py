"""Options of a safe run, shared by all tasks."""

from dataclasses import dataclass, field
from typing import Any, Optional

from fairseq.dataclass import FairseqDataclass


def option(default: Any, help: str) -> Any:
    """A field of a config: what fairseq makes an option of the command line."""
    return field(default=default, metadata={"help": help})


@dataclass
class ReliabilityConfig(FairseqDataclass):
    keep_updates_list: Optional[str] = option(
        None, "updates saved as checkpoint_update_N.pt and never removed, as 100000,200000"
    )
    max_skipped_updates: int = option(10, "updates skipped in a row, for NaN, Inf or a loss spike, before a rollback")
    max_rollbacks: int = option(
        3, "rollbacks to the last good checkpoint, of the whole run, before it stops with a report"
    )
    loss_spike: float = option(
        0.0, "skip an update whose loss is more than this many times the recent median; 0 for never"
    )
