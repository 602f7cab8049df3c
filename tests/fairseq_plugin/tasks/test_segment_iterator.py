import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyformer_fairseq.data.datasets.token_streams import TokenStreams
from lazyformer_fairseq.fairseq_plugin.tasks.stream_language_modeling import SegmentIterator


def iterator(rows: int, tgt_len: int = 5) -> SegmentIterator:
    return SegmentIterator(TokenStreams(np.arange(4, 604), rows, tgt_len, eos=2, pad=1))


def segments(of: SegmentIterator, count: int) -> list[int]:
    batches = of.next_epoch_itr()
    return [next(batches)["segment"] for _ in range(count)]


def test_the_same_streams_go_on_at_the_next_segment():
    first = iterator(4)
    assert segments(first, 7) == list(range(7))
    second = iterator(4)
    second.load_state_dict(first.state_dict())
    assert segments(second, 3) == [7, 8, 9]


@pytest.mark.slow
@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 40), st.integers(1, 12), st.floats(0, 0.999))
def test_others_go_on_after_the_same_share_of_the_epoch(rows, tgt_len, rows_now, tgt_len_now, share):
    first, second = iterator(rows, tgt_len), iterator(rows_now, tgt_len_now)
    read = int(share * len(first))
    segments(first, read)
    state = first.state_dict()
    second.load_state_dict(state)
    assert segments(second, 1) == [read * len(second) // len(first)]
    assert second.epoch == 1
