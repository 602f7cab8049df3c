"""Where in a raw text the characters of its normalised words stand.

Moses' rules insert and delete spaces, and change few characters: quotes, dashes, ellipses. Both texts are written alike
(:func:`_units`), and then nearly always equal but for spaces. Where they differ, characters have changed places (a
quote and the comma behind it), have gone (control characters), or have come (a stop for the space in ``1 000``).
"""

from functools import lru_cache
from typing import Optional

Span = tuple[int, int]  # the first character, and one past the last

ALIKE = str.maketrans(
    {
        **dict.fromkeys('„“”«»"', "''"),
        **dict.fromkeys("´‘‚’`", "'"),
        **dict.fromkeys("–—", "-"),
        "…": "...",
        "ς": "σ",
        **dict.fromkeys(map(chr, range(0x20)), ""),
    }
)
LONGEST_CHANGE = 40  # units that change places, come or go at once
TELLING = 3  # units that must agree behind a change


def places_of(words: str, text: str) -> list[Span]:
    """For each character of normalised words, its span in the raw text; a space has what stands between its words.

    Args:
        words: what a normaliser made of `text`, without symbols such as ``<mask>``.
    """
    raw, raw_places = _units(text)
    normal, word_places = _units(words)
    matched = list(range(len(raw))) if raw == normal else _match(raw, normal)
    starts, ends = [len(text)] * len(words), [0] * len(words)
    for place, unit in zip(word_places, matched, strict=True):
        if unit is not None:
            starts[place] = min(starts[place], raw_places[unit])
            ends[place] = max(ends[place], raw_places[unit] + 1)
    return _filled(starts, ends, len(text))


def cover(spans: list[Span]) -> Optional[Span]:
    """From the first character to the last one of spans; None where there is none."""
    filled = [span for span in spans if span[0] < span[1]]
    return (min(filled)[0], max(last for _, last in filled)) if filled else None


def spans_of_parts(text: str, spans: list[Span], sizes: list[int]) -> list[Span]:
    """The spans of a text's parts.

    Args:
        text: its spaces count for no part.
        spans: of each character.
        sizes: of each part, in bytes of UTF-8; a part may end within a character, and then has the whole of it.
    """
    character_of_byte = [place for place, character in enumerate(text) for _ in character.encode()]
    found: list[Span] = []
    first = 0
    for size in sizes:
        characters = range(character_of_byte[first], character_of_byte[first + size - 1] + 1)
        first += size
        span = cover([spans[place] for place in characters if text[place] != " "])
        if span is None:
            follower = spans[min(characters[-1] + 1, len(spans) - 1)][0]
            span = (follower, follower)
        found.append(span)
    return found


def _units(text: str) -> tuple[str, list[int]]:
    """The text written as its normalised form would be, without spaces, and the place of each unit's character."""
    units = list(map(_written, text))
    written = "".join(units)
    return written, [place for place, unit in enumerate(units) for _ in unit]


@lru_cache(maxsize=1 << 14)  # characters of many scripts
def _written(character: str) -> str:
    """One character's units; none for a space."""
    return "" if character.isspace() else character.translate(ALIKE).lower().translate(ALIKE)


def _match(raw: str, normal: str) -> list[Optional[int]]:
    """For each unit of `normal` that of `raw` which it came from, or None."""
    matched: list[Optional[int]] = []
    at = 0
    while len(matched) < len(normal):
        here = len(matched)
        if raw[at : at + 1] == normal[here]:
            matched.append(at)
            at += 1
        elif length := _length_of_swap(raw, normal, at, here):
            free = list(range(at, at + length))
            for unit in normal[here : here + length]:
                found = next(place for place in free if raw[place] == unit)
                free.remove(found)
                matched.append(found)
            at += length
        else:
            gone, come = _change(raw, normal, at, here)
            same = min(gone, come)
            matched += [*range(at, at + same), *[None] * (come - same)]
            at += gone
    return matched


def _length_of_swap(raw: str, normal: str, at: int, here: int) -> int:
    """Of how many units the order alone has changed, quotes and the marks beside them; 0 for none."""
    for length in range(2, LONGEST_CHANGE):
        last = raw[at + length - 1 : at + length]
        if not last or last not in "',.":
            return 0
        if sorted(raw[at : at + length]) == sorted(normal[here : here + length]):
            return length
    return 0


def _change(raw: str, normal: str, at: int, here: int) -> tuple[int, int]:
    """The fewest units of raw that have gone and of normal that have come, so that both agree behind them."""
    for total in range(1, LONGEST_CHANGE):
        for gone in range(total + 1):
            come = total - gone
            first, second = at + gone, here + come
            if raw[first : first + TELLING] == normal[second : second + TELLING]:
                return gone, come
    return 1, 1


def _filled(starts: list[int], ends: list[int], length: int) -> list[Span]:
    """Spans; what came from nothing has what stands between its neighbours, such as the space in a number."""
    followers, follower = [length] * len(starts), length
    for place in range(len(starts) - 1, -1, -1):
        followers[place] = follower
        if starts[place] < ends[place]:
            follower = starts[place]
    spans: list[Span] = []
    end = 0
    for start, stop, follower in zip(starts, ends, followers, strict=True):
        found = (start, stop) if start < stop else (end, max(end, follower))
        spans.append(found)
        end = found[1] if start < stop else end
    return spans
