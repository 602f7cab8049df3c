"""The ``--checkpoint-words`` and ``--word-budget`` options of fairseq runs, which count as our training loop does."""

from typing import Any, Optional

from lazyformer_fairseq.data.shards import read_word_counts
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.options import read_count
from lazyformer_fairseq.training.word_counter import WordCounter, refuse_too_many_words


def read_words(settings: Any, name: str) -> tuple[int, ...]:
    """Parse an option that lists word counts, such as ``1M,2M,5M``.

    Args:
        settings: fairseq's settings, with the option as an attribute.
        name: the name of the option, with underscores.

    Returns:
        The word counts; empty if the option is not set.

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
    """Return the value of ``--word-budget``, or None if it is not set; raise a UserError for several values."""
    budgets = read_words(settings, "word_budget")
    if len(budgets) > 1:
        raise UserError(f"--word-budget {settings.word_budget}: must be a single number, such as 100M")
    return next(iter(budgets), None)


def word_counter(cfg: Any) -> WordCounter:
    """Return the counter of words read by a run with these settings.

    Raises:
        UserError: an option needs the count, but the data has no word counts, or ``--use-bmuf`` is set.
    """
    marks = read_words(cfg.task, "checkpoint_words")
    if not marks and read_budget(cfg.task) is None:
        return WordCounter()
    if cfg.optimization.use_bmuf:
        raise UserError("--use-bmuf: words cannot be counted, because processes do not share updates; omit the option")
    return WordCounter(0, marks, read_word_counts(cfg.task.data).per_token)


def refuse_beyond_budget(cfg: Any, updates: int, counter: WordCounter) -> None:
    """Raise a UserError if a run would read more words than ``--word-budget`` allows.

    Args:
        cfg: fairseq's settings.
        updates: the run's number of completed updates.
        counter: the counter of words read by the run or by the model that it starts from.
    """
    budget = read_budget(cfg.task)
    if budget is None:
        return
    limits = cfg.optimization
    lengths: dict[str, float] = {}  # number of words read by the time a limit ends the run, by limit
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
        raise UserError(f"--word-budget {budget:,}: the run has no limit; set --max-update or --max-epoch")
    length = min(lengths, key=lambda each: lengths[each])
    refuse_too_many_words(budget, lengths[length], "the run", length, "a smaller --max-update or --max-epoch,")
