"""For each budget of latency the pattern with the least loss: few are chosen by sums of scores, and these measured."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Optional

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.search.from_checkpoint.choices import ByPlace, Choices
from lazyformer_fairseq.experiments.search.from_checkpoint.dynamic_programming import best_choices
from lazyformer_fairseq.experiments.search.from_checkpoint.losses import Losses
from lazyformer_fairseq.experiments.search.from_checkpoint.scores import (
    Scores,
    Scoring,
    list_scorings,
    scores_of,
    summed,
)
from lazyformer_fairseq.experiments.search.price import latency_of

CHANCES = 200  # tries at a random pattern that was not drawn before


@dataclass
class Budgets:
    """A search, from scores to patterns.

    Args:
        ticks: prices, see :func:`~lazyformer_fairseq.experiments.search.from_checkpoint.latency.in_ticks`.
        limits: of each budget, in ticks.
        reach: see :func:`~lazyformer_fairseq.experiments.search.from_checkpoint.scores.list_scorings`.

    Attributes:
        scores: of single changes; empty before :meth:`score`.
        searched, drawn: patterns measured by the search and by its control.
    """

    choices: Choices
    losses: Losses
    ticks: Mapping[str, int]
    limits: Sequence[int]
    reach: int
    scores: Scores = field(default_factory=dict)
    searched: dict[ByPlace, None] = field(default_factory=dict)
    drawn: dict[ByPlace, None] = field(default_factory=dict)

    @cached_property
    def scorings(self) -> list[Scoring]:
        return list_scorings(self.choices, self.reach)

    def latency(self, by_place: ByPlace) -> int:
        """In ticks, predicted."""
        return int(latency_of(self.ticks, self.choices.pattern(by_place)))

    def refuse_too_small(self, shares: Sequence[float]) -> None:
        """Raises a UserError where no pattern is so fast."""
        nothing = dict.fromkeys((scoring.made for scoring in self.scorings), 0.0)
        for share, found in zip(shares, best_choices(self.choices, nothing, self.ticks, self.limits), strict=True):
            if not found:
                raise UserError(
                    f"--budgets {share:g}: no choice of --candidates makes the model so fast; give a larger budget, or "
                    "identity among the candidates"
                )

    def score(self) -> None:
        """Measures every change."""
        self._measure([scoring.by_place for scoring in self.scorings], "scoring changes")
        above = {scoring.by_place: self.losses[scoring.by_place].above for scoring in self.scorings}
        self.scores = scores_of(self.choices, self.scorings, above)

    def find(self, top: int, rounds: int) -> None:
        """Measures the `top` patterns of each budget by their sums; further rounds score again around the best."""
        chosen = best_choices(self.choices, self.scores, self.ticks, self.limits, top)
        self._measure([each.by_place for found in chosen for each in found], "measuring sums")
        scores: list[dict] = [dict(self.scores) for _ in self.limits]
        for number in range(2, rounds + 1):
            bests = [self.best(limit) for limit in self.limits]
            undone = [self._undone(best) for best in bests]
            self._measure([each for changes in undone for each in changes.values()], f"round {number}: scoring again")
            chosen = []
            for limit, best, changes, own in zip(self.limits, bests, undone, scores, strict=True):
                self._score_again(own, best, changes)
                chosen += best_choices(self.choices, own, self.ticks, [limit], top)[0]
            self._measure([each.by_place for each in chosen], f"round {number}: measuring sums")

    def best(self, limit: int, control: bool = False) -> ByPlace:
        """The pattern with the least loss of all that were measured and stay within the limit.

        Args:
            control: among random ones.
        """
        fitting = [each for each in (self.drawn if control else self.searched) if self.latency(each) <= limit]
        return min(fitting, key=lambda each: self.losses[each].above)

    def sum_of(self, by_place: ByPlace) -> Optional[float]:
        """Of the scores of single changes; None where the pattern has a consumer beyond reach."""
        return summed(self.choices, self.scores, by_place)

    def control(self, count: int, seed: int) -> None:
        """Measures for each budget so many random patterns, fewer where there are fewer."""
        for number, limit in enumerate(self.limits):
            chance, own = random.Random(f"{seed} {number}"), {}
            for _ in range(CHANCES * count):
                if len(own) == count:
                    break
                by_place = random_pattern(self, limit, chance)
                if by_place is not None:
                    own[by_place] = None
            self.drawn |= own
        self.losses.measure(self.drawn, "measuring random patterns")

    def _measure(self, patterns: Sequence[ByPlace], description: str) -> None:
        self.searched |= dict.fromkeys(patterns)
        self.losses.measure(patterns, description)

    def _undone(self, by_place: ByPlace) -> dict[int, ByPlace]:
        """By place the pattern without its change there, where it has one and can stand without."""
        found = {}
        for place, own in enumerate(self.choices.own):
            without = (*by_place[:place], own, *by_place[place + 1 :])
            if by_place[place] != own and self.choices.is_possible(without):
                found[place] = without
        return found

    def _score_again(self, scores: dict, best: ByPlace, undone: Mapping[int, ByPlace]) -> None:
        """Gives each change of a pattern the score that it has there: what the loss falls if it alone is undone."""
        made = {each.place: each for each in self.choices.all_made(best)}
        for place, without in undone.items():
            scores[made[place]] = self.losses[best].above - self.losses[without].above


def random_pattern(budgets: Budgets, limit: int, chance: random.Random) -> Optional[ByPlace]:
    """Random changes at random places, each of which makes the model faster, until it stays within the limit."""
    choices, by_place = budgets.choices, budgets.choices.own
    moves = [(place, each.text) for place, options in enumerate(choices.options) for each in options[1:]]
    latency = budgets.latency(by_place)
    while latency > limit:
        for place, text in chance.sample(moves, len(moves)):
            changed = (*by_place[:place], text, *by_place[place + 1 :])
            if choices.is_possible(changed) and budgets.latency(changed) < latency:
                by_place, latency = changed, budgets.latency(changed)
                break
        else:
            return None
    return by_place
