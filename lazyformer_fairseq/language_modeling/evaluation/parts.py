"""Divides a text among the streams of an evaluation; see :mod:`evaluate`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Parts:
    """Which segment each stream reads at each step, and which of these count.

    All streams start at once, without memory, `lead` segments before their parts. The first one starts at the text's
    start, so its lead counts; the parts of the others follow each other from there.

    Attributes:
        lead: segments that a stream reads to warm up.
        first: the segment that each stream starts with.
        lengths: segments of each part, all equal or the first ones longer by one.
        last: segment of the text.
    """

    lead: int
    first: list[int]
    lengths: list[int]
    last: int

    @classmethod
    def of(cls, segments: int, streams: int, lead: int) -> "Parts":
        """Divides all but the first stream's lead; a short text takes fewer streams."""
        lead = min(lead, segments)
        streams = max(1, min(streams, segments - lead))
        each, more = divmod(segments - lead, streams)
        lengths = [each + (stream < more) for stream in range(streams)]
        return cls(lead, [sum(lengths[:stream]) for stream in range(streams)], lengths, segments - 1)

    @property
    def steps(self) -> int:
        return self.lead + self.lengths[0]

    def segments(self, step: int) -> list[int]:
        """The segment of each stream; one that has finished reads on, for nothing."""
        return [min(first + step, self.last) for first in self.first]

    def counted(self, step: int) -> list[int]:
        """The streams whose segment counts."""
        if step < self.lead:
            return [0]
        return [stream for stream, length in enumerate(self.lengths) if step < self.lead + length]
