"""From probabilities to a pattern string."""

from collections.abc import Sequence

from lazyformer_fairseq.search.supernet.choices import IDENTITY


def most_probable(probabilities: Sequence[Sequence[float]], candidates: Sequence[str]) -> list[str]:
    """The most probable candidate of each layer (PAR Transformer, section 2.1), the lowest layer first.

    An ``l`` without an ``s`` chosen below would have nothing to read: such a layer takes its next most probable one.
    """
    chosen: list[str] = []
    for row in probabilities:
        possible = [
            (probability, -number, name)
            for number, (name, probability) in enumerate(zip(candidates, row, strict=True))
            if name != "l" or "s" in chosen
        ]
        chosen.append(max(possible)[2])
    return chosen


def letters(chosen: Sequence[str]) -> str:
    """One letter a sublayer; identity layers drop out."""
    return "".join(name for name in chosen if name != IDENTITY)


def by_layer(chosen: Sequence[str]) -> str:
    """One character a layer, ``-`` for identity."""
    return "".join("-" if name == IDENTITY else name for name in chosen)


def compact(pattern: str) -> str:
    """Letters as a short pattern with repeats of plain groups: ``sfffsfffff`` is ``(sfff)x2 ff``.

    Of equally short ones that whose groups start with ``s``, as the paper writes them.
    """
    best: list[tuple[int, int, str]] = [(0, 0, "")]  # of the first n letters: length, odd groups, text
    for end in range(1, len(pattern) + 1):
        length, odd, text = best[end - 1]
        plain = text + pattern[end - 1] if not text or text[-1].isalpha() else f"{text} {pattern[end - 1]}"
        ways = [(length + 1, odd, plain)]
        for size in range(1, end // 2 + 1):
            group, times = pattern[end - size : end], 1
            while pattern[max(end - size * (times + 1), 0) : end - size * times] == group:
                times += 1
                length, odd, text = best[end - size * times]
                # A repeat counts as one character: x10 is no longer than x9.
                ways.append((length + size + 4, odd + (group[0] != "s"), f"{text} ({group})x{times}".lstrip()))
        best.append(min(ways))
    return best[-1][2]
