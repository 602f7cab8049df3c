"""A whole search from a checkpoint in its folder. Every file there is complete or absent; a rerun measures the rest."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from lazyformer_fairseq.data.text.interface import TextTokenizer
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.search.from_checkpoint.budgets import Budgets
from lazyformer_fairseq.experiments.search.from_checkpoint.choices import ByPlace, Choices, read_candidates
from lazyformer_fairseq.experiments.search.from_checkpoint.latency import (
    TICKS,
    in_ticks,
    measure_models,
    measure_prices,
)
from lazyformer_fairseq.experiments.search.from_checkpoint.losses import Losses, Measured, measure_on_other_text
from lazyformer_fairseq.experiments.search.from_checkpoint.pictures import CONTROL, SCORED, SUMMED
from lazyformer_fairseq.experiments.search.from_checkpoint.report import write_report
from lazyformer_fairseq.experiments.search.from_checkpoint.settings import FromCheckpoint
from lazyformer_fairseq.experiments.search.price import Prices, latency_of
from lazyformer_fairseq.fairseq_plugin.models import hub
from lazyformer_fairseq.fairseq_plugin.models.export import write_model
from lazyformer_fairseq.fairseq_plugin.models.lazyformer import LazyFormerModel
from lazyformer_fairseq.measure.costs.machine import describe_machine, describe_versions
from lazyformer_fairseq.report.numbers import spread
from lazyformer_fairseq.storage.atomic import atomic_folder
from lazyformer_fairseq.storage.json_files import read_json, write_json
from lazyformer_fairseq.storage.run_lock import keep_settings, run_lock
from lazyformer_fairseq.warm_start.losses import PASSED_OVER, Batches, Scorer, read_text
from lazyformer_fairseq.warm_start.record import write_record
from lazyformer_fairseq.warm_start.start import Trained

SETTINGS, LATENCIES, SCORES, RESULT = "settings.json", "latencies.json", "scores.json", "result.json"


class Original(NamedTuple):
    """What a search starts from."""

    trained: Trained
    tokenizer: TextTokenizer


def run_from_checkpoint(settings: FromCheckpoint, original: Original, path: Path) -> dict[str, Any]:
    """Searches in the folder `path`, goes on with a search that was stopped there, or returns a finished one's result.

    Returns:
        What result.json holds.

    Raises:
        UserError: the folder holds a search of other settings, or other things; the text is too short or of another
            dictionary; or no pattern is as fast as a budget says.
    """
    text, more = _read_texts(settings, original)
    _refuse_other_things(path)
    choices = Choices.of(original.trained.plan, read_candidates(settings.candidates))
    with run_lock(path):
        begun = (path / SCORES).exists()
        keep_settings(path / SETTINGS, asdict(settings), "a search", begun, made_by_them=[path / LATENCIES])
        if (path / RESULT).exists():
            print(f"{path}: this search is finished.")
            return read_json(path / RESULT)
        prices = _prices(settings, original.trained, choices, path)
        scorer = Scorer(original.trained, text, settings.seed)
        limits = [int(share * TICKS) for share in settings.budgets]
        losses = Losses(path / SCORES, scorer, choices)
        budgets = Budgets(choices, losses, in_ticks(prices, choices), limits, settings.reach)
        budgets.refuse_too_small(settings.budgets)
        budgets.score()
        budgets.find(settings.top, settings.rounds)
        budgets.control(_control(settings, budgets), settings.seed)
        on_other_text = measure_on_other_text(
            _chosen(settings, budgets), choices, Scorer(original.trained, more, settings.seed), text
        )
        result = _result(settings, budgets, prices, original, on_other_text)
        for row in result["budgets"]:
            _write_start(scorer, choices, row, original, path)
        write_report(result, path)
        write_json(path / RESULT, result)  # last: it marks the folder as complete
        return result


def _read_texts(settings: FromCheckpoint, original: Original) -> tuple[Batches, Batches]:
    """The text to search with, and twice as much, of which some is in the first."""
    source, longest = Path(settings.text), original.trained.cfg.max_positions
    passed_over = min(PASSED_OVER, settings.tokens)
    return tuple(
        read_text(source, original.tokenizer, longest, times * settings.tokens, passed_over) for times in (1, 2)
    )


def _refuse_other_things(path: Path) -> None:
    is_other = path.exists() and not (path / SETTINGS).exists()
    if is_other and (not path.is_dir() or any(entry.name[0] != "." for entry in path.iterdir())):
        raise UserError(f"{path}: exists already and holds no search; choose another folder")


def _prices(settings: FromCheckpoint, trained: Trained, choices: Choices, path: Path) -> Prices:
    """As given; else as measured when the search began, because a search that goes on must pay the same."""
    if settings.prices is not None:
        return settings.prices
    if not (path / LATENCIES).exists():
        write_json(path / LATENCIES, measure_prices(trained, choices, settings.latency_tokens))
    return read_json(path / LATENCIES)


def _control(settings: FromCheckpoint, budgets: Budgets) -> int:
    """Random patterns of a budget: in all as many as the search has measured."""
    if settings.control is not None:
        return settings.control
    return -(-len(budgets.searched) // len(settings.budgets))


def _chosen(settings: FromCheckpoint, budgets: Budgets) -> list[ByPlace]:
    """The best patterns of all budgets, then the best random ones."""
    found = [budgets.best(limit) for limit in budgets.limits]
    return [*found, *_best_drawn(settings, budgets).values()]


def _best_drawn(settings: FromCheckpoint, budgets: Budgets) -> dict[float, ByPlace]:
    """By budget; where none was drawn there is none."""
    return {
        share: budgets.best(limit, control=True)
        for share, limit in zip(settings.budgets, budgets.limits, strict=True)
        if any(budgets.latency(each) <= limit for each in budgets.drawn)
    }


def _result(
    settings: FromCheckpoint,
    budgets: Budgets,
    prices: Prices,
    original: Original,
    on_other_text: Mapping[ByPlace, Measured],
) -> dict[str, Any]:
    chosen = {share: budgets.best(limit) for share, limit in zip(settings.budgets, budgets.limits, strict=True)}
    random = _best_drawn(settings, budgets)
    patterns = [budgets.choices.pattern(each) for each in (budgets.choices.own, *chosen.values(), *random.values())]
    seconds = measure_models(original.trained, patterns, settings.latency_tokens)
    own = budgets.choices.pattern(budgets.choices.own)

    def row(by_place: ByPlace) -> dict[str, Any]:
        found = _describe(budgets, prices, by_place)
        timing = seconds[found["pattern"]]
        return found | {
            "on_other_text": on_other_text[by_place]._asdict() if by_place in on_other_text else None,
            "measured_ms": spread([1000 * sample for sample in timing.samples]),
            "measured_share": timing.median / seconds[own].median,
        }

    return {
        "unit": "bits a masked token",
        "original": row(budgets.choices.own) | {"bits": budgets.losses.original.bits},
        "masked_tokens": int(budgets.losses.original.words.sum()),
        "blocks": len(budgets.losses.original.words),
        "evaluations": {"search": len(budgets.searched), "control": len(budgets.drawn)},
        "budgets": [
            {"budget": share, "found": row(chosen[share]), "control": row(random[share]) if share in random else None}
            for share in settings.budgets
        ],
        "changes": _changes(budgets),
        "measured": [
            *(_describe(budgets, prices, each) | {"by": _why(budgets, each)} for each in budgets.searched),
            *(_describe(budgets, prices, each) | {"by": CONTROL} for each in budgets.drawn),
        ],
        "text": settings.text,
        "latency_tokens": settings.latency_tokens,
        "prices": dict(prices),
        "machine": describe_machine(_device(original.trained)),
        "versions": describe_versions(),
    }


def _why(budgets: Budgets, by_place: ByPlace) -> str:
    """What the search measured a pattern for."""
    return SCORED if any(scoring.by_place == by_place for scoring in budgets.scorings) else SUMMED


def _device(trained: Trained) -> Any:
    return trained.build().dictionary_sha256.device


def _describe(budgets: Budgets, prices: Prices, by_place: ByPlace) -> dict[str, Any]:
    pattern = budgets.choices.pattern(by_place)
    own = latency_of(prices, budgets.choices.pattern(budgets.choices.own))
    predicted = latency_of(prices, pattern)
    return {
        "pattern": pattern,
        "by_place": list(by_place),
        "predicted_ms": predicted,
        "predicted_share": predicted / own,
        "sum": budgets.sum_of(by_place),
        **budgets.losses[by_place]._asdict(),
    }


def _changes(budgets: Budgets) -> list[dict[str, Any]]:
    """The scores, with the error of the pattern that each was measured by."""
    return [
        {
            "place": scoring.made.place,
            "was": budgets.choices.own[scoring.made.place],
            "becomes": scoring.made.text,
            "reads": scoring.made.producer,
            "score": budgets.scores[scoring.made],
            "error": budgets.losses[scoring.by_place].error,
            "is_alone": sum(one != own for one, own in zip(scoring.by_place, budgets.choices.own, strict=True)) == 1,
        }
        for scoring in budgets.scorings
        if scoring.by_place != budgets.choices.own
    ]


def _write_start(scorer: Scorer, choices: Choices, row: Mapping[str, Any], original: Original, path: Path) -> None:
    """Writes the model of a budget as `lazyformer import` does, before any update."""
    folder = path / "models" / f"{row['budget']:g}"
    if folder.exists():
        return
    by_place = tuple(row["found"]["by_place"])
    start = scorer.start({"sublayer_pattern": choices.pattern(by_place)}, choices.origins(by_place))
    start.record["source"] = path.absolute().name
    loaded = hub.as_hub(LazyFormerModel, start.new.cfg, start.new.weights, original.tokenizer, folder)
    with atomic_folder(folder) as unfinished:
        write_model(loaded, unfinished)
        write_record(unfinished, start.record)
