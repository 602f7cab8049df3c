"""Iterates over the segments of streams, from any place in an epoch."""

import logging
from typing import Any

from fairseq.data.iterators import EpochBatchIterator

from lazyformer_fairseq.data.datasets.token_streams import TokenStreams

logger = logging.getLogger(__name__)


class SegmentIterator(EpochBatchIterator):
    """The segments of streams, in order; every item is a whole batch of this worker.

    A run that resumes with other streams (batch size, workers, segment length) continues after the same share of the
    epoch: the new streams start elsewhere in the text, so that some of it comes twice and some not at all.
    """

    def __init__(self, streams: TokenStreams, **settings: Any):
        batches = [[segment] for segment in range(len(streams))]
        super().__init__(
            streams,
            collate_fn=streams.collater,
            batch_sampler=batches,
            disable_shuffling=True,
            persistent_workers=False,  # each epoch has an iterator of its own; workers would stay behind
            **settings,
        )

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "segments": len(self)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        position, segments = state["iterations_in_epoch"], state.get("segments", len(self))
        if position and segments != len(self):
            now = position * len(self) // segments
            logger.warning(
                "the checkpoint is from segment %d of %d and the streams have %d now (another batch size, number of "
                "processes or --tgt-len): continuing at segment %d, some of the text comes twice and some not at all",
                *(position, segments, len(self), now),
            )
            state = {**state, "iterations_in_epoch": now}
        super().load_state_dict(state)
