"""``--checkpoint-words`` and ``--word-budget`` in fairseq's runs; the counting is that of our own loop."""

from typing import Any, Optional

from lazyformer_fairseq.data.shards import read_word_counts
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.options import read_count
from lazyformer_fairseq.training.words_read import WordCounter, refuse_too_many_words


def read_words(settings: Any, name: str) -> tuple[int, ...]:
    """Return the numbers of words that an option has in fairseq's settings; none where it is not given.

    Raises:
        UserError: a part of its value is no number.
    """
    text: Optional[str] = getattr(settings, name, None)
    if text is None:
        return ()
    try:
        return tuple(map(read_count, text.split(",")))
    except UserError as error:
        raise UserError(f"--{name.replace('_', '-')} {error}") from None


def read_budget(settings: Any) -> Optional[int]:
    """Return the value of ``--word-budget``; raise a UserError for several."""
    budgets = read_words(settings, "word_budget")
    if len(budgets) > 1:
        raise UserError(f"--word-budget {settings.word_budget}: give one number, such as 100M")
    return next(iter(budgets), None)


def word_counter(cfg: Any) -> WordCounter:
    """Return a counter for a run with these settings.

    Raises:
        UserError: words are to be counted, but the data does not say how many it has, or processes train apart.
    """
    marks = read_words(cfg.task, "checkpoint_words")
    if not marks and read_budget(cfg.task) is None:
        return WordCounter()
    if cfg.optimization.use_bmuf:
        raise UserError("--use-bmuf: processes do not share updates, so that words are not counted; leave it out")
    return WordCounter(0, marks, read_word_counts(cfg.task.data).per_token)


def refuse_beyond_budget(cfg: Any, updates: int, counter: WordCounter) -> None:
    """Raise a UserError for a run that would read more words than ``--word-budget``.

    Args:
        cfg: fairseq's settings.
        updates: the updates that the run has made.
        counter: the words that it, or the model that it starts from, has read.
    """
    budget = read_budget(cfg.task)
    if budget is None:
        return
    limits = cfg.optimization
    lengths: dict[str, float] = {}  # words by what ends the run
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
        raise UserError(f"--word-budget {budget:,}: the run has no end; give --max-update or --max-epoch")
    length = min(lengths, key=lambda each: lengths[each])
    refuse_too_many_words(budget, lengths[length], "the run", length, "a smaller --max-update or --max-epoch,")
