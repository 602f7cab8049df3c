"""Frees what fairseq's meters keep of each update and would never release."""

import functools

from fairseq.logging import metrics


def forget_ended_contexts(reduce_and_log_stats):
    """For ``Trainer._reduce_and_log_stats``, which opens a context of meters under a new random name each time.

    fairseq counts contexts by name and keeps the names of those that have ended: some 200 bytes an update, and a
    dictionary that it copies in each validation.
    """

    @functools.wraps(reduce_and_log_stats)
    def wrapped(*args, **kwargs):
        output = reduce_and_log_stats(*args, **kwargs)
        counts = metrics._active_aggregators_cnt
        for name in [name for name, count in counts.items() if not count]:
            del counts[name]
        return output

    return wrapped
