"""Options of a safe run, shared by all tasks."""

from dataclasses import dataclass, field
from typing import Optional

from fairseq.dataclass import FairseqDataclass


@dataclass
class ReliabilityConfig(FairseqDataclass):
    keep_updates_list: Optional[str] = field(
        default=None, metadata={"help": "updates saved as checkpoint_update_N.pt and never removed, as 100000,200000"}
    )
    max_skipped_updates: int = field(
        default=10, metadata={"help": "updates skipped in a row, for NaN, Inf or a loss spike, before a rollback"}
    )
    max_rollbacks: int = field(
        default=3,
        metadata={"help": "rollbacks to the last good checkpoint, of the whole run, before it stops with a report"},
    )
    loss_spike: float = field(
        default=0.0,
        metadata={"help": "skip an update whose loss is more than this many times the recent median; 0 for never"},
    )
    sequences_per_update: Optional[int] = field(
        default=None,
        metadata={
            "help": "size of an update over all GPUs, with --batch-size the most that one takes at once; "
            "works out --update-freq"
        },
    )
