"""Options ``--checkpoint-words`` and ``--word-budget`` of fairseq runs, counted as in our own training loop."""

from typing import Any, Optional

from lazyformer_fairseq.data.shards import read_word_counts
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.options import read_count
from lazyformer_fairseq.training.words_read import WordCounter, refuse_too_many_words


def read_words(settings: Any, name: str) -> tuple[int, ...]:
    """Parse an option that lists numbers of words, such as ``1M,2M,5M``.

    Args:
        settings: fairseq's settings, with the option as an attribute.
        name: the name of the option, with underscores.

    Returns:
        The numbers of words; empty if the option is not given.

    Raises:
        UserError: a part of the value is not a number.
    """
    text: Optional[str] = getattr(settings, name, None)
    if text is None:
        return ()
    try:
        return tuple(map(read_count, text.split(",")))
    except UserError as error:
        raise UserError(f"--{name.replace('_', '-')} {error}") from None


def read_budget(settings: Any) -> Optional[int]:
    """Return the value of ``--word-budget``, or None if it is not given; raise a UserError if it has several."""
    budgets = read_words(settings, "word_budget")
    if len(budgets) > 1:
        raise UserError(f"--word-budget {settings.word_budget}: give one number, such as 100M")
    return next(iter(budgets), None)


def word_counter(cfg: Any) -> WordCounter:
    """Return the counter of the words that a run with these settings reads.

    Raises:
        UserError: an option needs the count, but the data has no counts of words, or ``--use-bmuf`` is given.
    """
    marks = read_words(cfg.task, "checkpoint_words")
    if not marks and read_budget(cfg.task) is None:
        return WordCounter()
    if cfg.optimization.use_bmuf:
        raise UserError(
            "--use-bmuf: words cannot be counted, because processes do not share updates; leave the option out"
        )
    return WordCounter(0, marks, read_word_counts(cfg.task.data).per_token)


def refuse_beyond_budget(cfg: Any, updates: int, counter: WordCounter) -> None:
    """Raise a UserError if a run would read more words than ``--word-budget`` allows.

    Args:
        cfg: fairseq's settings.
        updates: the number of updates that the run has made.
        counter: the counter of the words that the run, or the model that it starts from, has read.
    """
    budget = read_budget(cfg.task)
    if budget is None:
        return
    limits = cfg.optimization
    lengths: dict[str, float] = {}  # the number of words that the run has read when a limit ends it, by limit
    if limits.max_update:
        batch = (cfg.dataset.batch_size or 0) * cfg.task.tokens_per_sample
        if cfg.dataset.max_tokens:
            batch = min(batch or cfg.dataset.max_tokens, cfg.dataset.max_tokens)
        per_update = batch * max(limits.update_freq) * cfg.distributed_training.distributed_world_size
        left = max(0, limits.max_update - updates)
        lengths[f"{limits.max_update:,} updates"] = counter.words + left * per_update * counter.words_per_token
    if limits.max_epoch:
        before = 0.0
        if not updates:
            before = counter.words
        lengths[f"{limits.max_epoch} epochs"] = before + limits.max_epoch * read_word_counts(cfg.task.data).per_epoch
    if not lengths:
        raise UserError(f"--word-budget {budget:,}: the run has no limit; give --max-update or --max-epoch")
    length = min(lengths, key=lambda each: lengths[each])
    refuse_too_many_words(budget, lengths[length], "the run", length, "a smaller --max-update or --max-epoch,")
