"""From probabilities to a pattern string."""

from collections.abc import Sequence

from lazyformer_fairseq.patterns.grammar import read_sublayer, split_sublayers


def most_probable(probabilities: Sequence[Sequence[float]], candidates: Sequence[str]) -> list[str]:
    """The most probable candidate of each layer (PAR Transformer, section 2.1), the lowest layer first.

    A layer skips candidates that have nothing below to read, and takes its next most probable one.
    """
    kinds = {name: read_sublayer(name).kind for name in candidates}
    chosen: list[str] = []
    handed_on: set[str] = set()
    for row in probabilities:
        possible = [
            (probability, -number, name)
            for number, (name, probability) in enumerate(zip(candidates, row, strict=True))
            if kinds[name].reads is None or kinds[name].reads in handed_on
        ]
        chosen.append(max(possible)[2])
        handed_on.update(kinds[chosen[-1]].hands_on)
    return chosen


def letters(chosen: Sequence[str]) -> str:
    """The pattern written out, without identity layers."""
    return "".join(name for name in chosen if not read_sublayer(name).kind.is_identity)


def by_layer(chosen: Sequence[str]) -> str:
    """The same with a ``-`` for each identity layer, so that the n-th sublayer is the n-th layer."""
    return "".join(read_sublayer(name).text for name in chosen)


def compact(pattern: str) -> str:
    """A written-out pattern, with repeats of plain groups: ``sfffsfffff`` is ``(sfff)x2 ff``.

    Among equally short ones it prefers groups that start with a sublayer that hands something on, as in the paper.
    """
    parts = split_sublayers(pattern)
    best: list[tuple[int, int, str]] = [(0, 0, "")]  # of the first n sublayers: length, odd groups, text
    for end in range(1, len(parts) + 1):
        length, odd, text = best[end - 1]
        joins = not text or text[-1].isalpha() or text[-1] in "]-"
        ways = [(length + 1, odd, text + parts[end - 1] if joins else f"{text} {parts[end - 1]}")]
        for size in range(1, end // 2 + 1):
            group, times = parts[end - size : end], 1
            while parts[max(end - size * (times + 1), 0) : end - size * times] == group:
                times += 1
                length, odd, text = best[end - size * times]
                starts_oddly = not read_sublayer(group[0]).kind.hands_on
                # A repeat counts as one character: x10 is no longer than x9.
                repeat = f"{text} ({''.join(group)})x{times}".lstrip()
                ways.append((length + size + 4, odd + starts_oddly, repeat))
        best.append(min(ways))
    return best[-1][2]
