"""``--sequences-per-update``: an update has this size on any number of processes."""

import functools
import logging

from omegaconf import DictConfig

from lazyformer_fairseq.errors import UserError

logger = logging.getLogger(__name__)


def settle(cfg: DictConfig) -> None:
    """Works out ``update_freq``, and lowers ``batch_size`` to a divisor of a process's share; without it does nothing.

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
