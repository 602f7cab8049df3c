"""A search from a trained encoder in its folder. Every file there is complete or absent; a rerun measures the rest.

What it found becomes a page, tables for programs, and pictures.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Optional

import torch
from torch import nn

from lazyformer_fairseq.arguments import checkpoint_at
from lazyformer_fairseq.data.text.interface import TextTokenizer
from lazyformer_fairseq.data.text.tokenizer import load_tokenizer
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation import checkpoints, hub
from lazyformer_fairseq.evaluation.costs.machine import describe_machine, describe_versions
from lazyformer_fairseq.evaluation.export import write_model
from lazyformer_fairseq.experiments.search import latency
from lazyformer_fairseq.experiments.search.compress.budgets import (
    TICKS,
    Budgets,
    Losses,
    Measured,
    in_ticks,
    measure_on_other_text,
)
from lazyformer_fairseq.experiments.search.compress.choices import ByPlace, Choices, read_candidates, summed
from lazyformer_fairseq.experiments.search.run import search_in
from lazyformer_fairseq.experiments.search.settings import CompressSettings
from lazyformer_fairseq.experiments.search.space import compact
from lazyformer_fairseq.modules.networks.encoder import Encoder
from lazyformer_fairseq.report.figures import COLOURS, picture
from lazyformer_fairseq.report.numbers import spread, with_spread
from lazyformer_fairseq.report.page import Block, write_page
from lazyformer_fairseq.report.tables import markdown_table, write_csv
from lazyformer_fairseq.storage.atomic import atomic_folder
from lazyformer_fairseq.training.warm_start.losses import PASSED_OVER, Scorer, read_text
from lazyformer_fairseq.training.warm_start.start import Trained, write_record

SCORES = "scores.json"


@dataclass(frozen=True)
class Original:
    """What a search starts from.

    Attributes:
        latency_tokens: of a sequence, for latency.
    """

    trained: Trained
    tokenizer: TextTokenizer
    latency_tokens: int
    latency_memory = 0

    @property
    def dictionary(self) -> Any:
        return self.trained.dictionary

    @property
    def device(self) -> str:
        return "cuda" if torch.cuda.is_available() else "cpu"

    def build_model(self, pattern: str) -> tuple[nn.Module, Encoder]:
        """The encoder in another pattern, with fresh weights, and its stack."""
        model = hub.model_of(replace(self.trained.cfg, sublayer_pattern=pattern), self.dictionary).to(self.device)
        return model, model.encoder.sentence_encoder


def load_original(path: Path) -> Original:
    """The masked-LM encoder of a checkpoint, or of a folder of checkpoints, and its tokenizer.

    Raises:
        UserError: it is damaged or unsafe, a causal model, or none of this package's.
    """
    checkpoint = checkpoint_at(path)
    try:
        state = checkpoints.load(checkpoint)
    except UserError as error:
        if (checkpoint.parent / checkpoints.CONFIG_FILE).is_file():
            raise UserError(
                f"{error}\nA BERT of the Hub becomes a checkpoint of this package first: lazyformer import"
            ) from None
        raise
    if hub.is_causal(state):
        raise UserError(
            f"{checkpoint}: is a causal language model; search compress takes masked-LM encoders, for only their "
            "weights can start another pattern (docs/huggingface.md)"
        )
    tokenizer = load_tokenizer(checkpoint.parent / "tokenizer")
    model = hub.build(state, tokenizer.dictionary, checkpoint)
    return Original(Trained(model.cfg, model.state_dict(), tokenizer.dictionary), tokenizer, model.cfg.max_positions)


def run_compress(settings: CompressSettings, original: Original, path: Path) -> dict[str, Any]:
    """Searches in the folder `path`, goes on with a search that was stopped there, or returns a finished one's result.

    Returns:
        What result.json holds.

    Raises:
        UserError: the folder holds a search of other settings, or other things; the text is too short or of another
            dictionary; or no pattern is as fast as a budget says.
    """
    # The text to search with, and twice as much, of which some is in the first.
    what = (Path(settings.text), original.tokenizer, original.trained.cfg.max_positions)
    tokens, passed_over = settings.tokens, min(PASSED_OVER, settings.tokens)
    text, more = (read_text(*what, times * tokens, passed_over) for times in (1, 2))
    choices = Choices.of(original.trained.plan, read_candidates(settings.candidates))

    def search() -> dict[str, Any]:
        prices = settings.prices
        if prices is None:
            prices = latency.prices_of(original, choices.pattern(choices.own), choices.sublayers, path)
        scorer = Scorer(original.trained, text, settings.seed)
        limits = [int(share * TICKS) for share in settings.budgets]
        budgets = Budgets(choices, Losses(path / SCORES, scorer, choices), in_ticks(prices, choices), limits)
        budgets.refuse_too_small(settings.budgets)
        budgets.score()
        budgets.find(settings.top)
        budgets.find_again(settings.top)
        found = {share: budgets.best(limit) for share, limit in zip(settings.budgets, limits, strict=True)}
        scorer_of_more = Scorer(original.trained, more, settings.seed)
        on_other_text = measure_on_other_text(found.values(), choices, scorer_of_more, text)
        result = _result(settings, budgets, prices, original, found, on_other_text)
        for row in result["budgets"]:
            _write_start(scorer, choices, row, original, path)
        return result

    return search_in(path, settings, SCORES, search, write_report)


def _result(
    settings: CompressSettings,
    budgets: Budgets,
    prices: latency.Prices,
    original: Original,
    found: Mapping[float, ByPlace],
    on_other_text: Mapping[ByPlace, Measured],
) -> dict[str, Any]:
    choices, losses = budgets.choices, budgets.losses.original
    scored = {scoring.by_place for scoring in budgets.scorings}  # else measured as a sum that promises much
    patterns = [choices.pattern(each) for each in (choices.own, *found.values())]
    seconds = latency.measure_models(original, patterns)

    def row(by_place: ByPlace) -> dict[str, Any]:
        described = _describe(budgets, prices, by_place)
        timing = seconds[described["pattern"]]
        return described | {
            "on_other_text": on_other_text[by_place]._asdict() if by_place in on_other_text else None,
            "measured_ms": spread([1000 * sample for sample in timing.samples]),
            "measured_share": timing.median / seconds[choices.pattern(choices.own)].median,
        }

    return {
        "unit": "bits a masked token",
        "original": row(choices.own) | {"bits": losses.bits},
        "masked_tokens": int(losses.words.sum()),
        "blocks": len(losses.words),
        "budgets": [{"budget": share, "found": row(found[share])} for share in settings.budgets],
        "changes": _changes(budgets),
        "measured": [
            _describe(budgets, prices, each) | {"by": SCORED if each in scored else SUMMED} for each in budgets.searched
        ],
        "text": settings.text,
        "latency_tokens": settings.latency_tokens,
        "prices": dict(prices),
        "machine": describe_machine(original.device),
        "versions": describe_versions(),
    }


def _describe(budgets: Budgets, prices: latency.Prices, by_place: ByPlace) -> dict[str, Any]:
    pattern = budgets.choices.pattern(by_place)
    own = latency.latency_of(prices, budgets.choices.pattern(budgets.choices.own))
    predicted = latency.latency_of(prices, pattern)
    return {
        "pattern": pattern,
        "by_place": list(by_place),
        "predicted_ms": predicted,
        "predicted_share": predicted / own,
        "sum": summed(budgets.choices, budgets.scores, by_place),
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
    loaded = hub.as_hub(start.new.cfg, start.new.weights, original.tokenizer, folder)
    with atomic_folder(folder) as unfinished:
        write_model(loaded, unfinished)
        write_record(unfinished, start.record)


SCORED, SUMMED = "scored", "summed"  # what a pattern was measured for
LINEAR = 0.05  # bits: from here on axes and colours go by ratios


def write_report(result: Mapping[str, Any], path: Path) -> None:
    """Writes ``report.md``, ``changes.csv``, ``patterns.csv`` and ``losses.png`` into a folder."""
    write_csv(result["changes"], path / "changes.csv")
    write_csv([each | {"by_place": " ".join(each["by_place"])} for each in result["measured"]], path / "patterns.csv")
    _draw_losses(result, path / "losses.png")
    write_page(_page(result, path), path, "report")


def _page(result: Mapping[str, Any], path: Path) -> list[Block]:
    original = result["original"]
    return [
        "# Patterns from a trained model",
        f"`{compact(original['pattern'])}`: {original['bits']:.3f} bits a masked token, on {result['masked_tokens']:,} "
        f"of them in {result['blocks']} blocks of held-out text; {_milliseconds(original)} ms at batch 1 and "
        f"{result['latency_tokens']} tokens. Nothing is trained here: losses are those of the first moment.",
        budgets_table(result),
        "On other text: on as much that had no part in the choice.",
        f"The search measured {len(result['measured'])} patterns. Where several sublayers change, the sum of scores "
        f"{_correlated([row for row in result['measured'] if row['by'] == SUMMED], 'sum', 'above')}. Predicted latency "
        f"{_correlated(_shown(result), 'predicted_ms', 'measured_ms')}.",
        "## Go on with one",
        _continue_lines(result, path),
        "## What each change costs alone",
        _changes_table(result),
    ]


def budgets_table(result: Mapping[str, Any]) -> str:
    """A row for each budget: the pattern found, its latency and loss."""
    return markdown_table([_row(each) for each in result["budgets"]], left=("pattern",))


def _row(each: Mapping[str, Any]) -> dict[str, str]:
    found = each["found"]
    return {
        "budget": f"{each['budget']:.0%}",
        "pattern": f"`{compact(found['pattern'])}`",
        "latency, predicted": f"{found['predicted_share']:.0%}",
        "measured": f"{found['measured_share']:.0%}",
        "ms (quartiles)": _milliseconds(found),
        "sum of scores": "" if found["sum"] is None else f"{found['sum']:+.3f}",
        "bits above the original": _above(found),
        "on other text": _above(found["on_other_text"]),
    }


def _above(row: Optional[Mapping[str, Any]]) -> str:
    return "" if row is None else f"{row['above']:+.3f} ± {row['error']:.3f}"


def _milliseconds(row: Mapping[str, Any]) -> str:
    return with_spread(row["measured_ms"], 2)


def _shown(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Patterns whose latency was measured, each once."""
    rows = [result["original"], *(row["found"] for row in result["budgets"])]
    return list({row["pattern"]: row | {"measured_ms": row["measured_ms"]["median"]} for row in rows}.values())


def _correlated(rows: Iterable[Mapping[str, Any]], one: str, other: str) -> str:
    pairs = [(row[one], row[other]) for row in rows if row[one] is not None]
    found = latency.rank_correlations([before for before, _ in pairs], [after for _, after in pairs])
    if found is None:
        return "has too few values for a rank correlation with what was measured"
    return f"has a rank correlation of {found['spearman']:.2f} with what was measured"


def _continue_lines(result: Mapping[str, Any], path: Path) -> str:
    """Commands that go on with pre-training, one for each budget."""
    data = result["text"] if Path(result["text"]).is_dir() else "DATA"
    folders = [path / "models" / f"{row['budget']:g}" for row in result["budgets"]]
    lines = [f"lazyformer pretrain {folder} {data} --save-dir {path / 'trained' / folder.name}" for folder in folders]
    return "\n".join(["```bash", *lines, "```"])


def _changes_table(result: Mapping[str, Any]) -> str:
    """Bits above the original by place and change; what needs other changes too is in ``changes.csv``."""
    alone = [each for each in result["changes"] if each["is_alone"]]
    names = list(dict.fromkeys(each["becomes"] for each in alone))
    scores = {(each["place"], each["becomes"]): f"{each['score']:+.3f}" for each in alone}
    headers = {name: "nothing" if name == "-" else f"`{name}`" for name in names}
    rows = [
        {"place": str(place), "was": f"`{was}`"} | {headers[name]: scores.get((place, name), "") for name in names}
        for place, was in enumerate(result["original"]["by_place"])
    ]
    return markdown_table(rows, left=("was",))


def _draw_losses(result: Mapping[str, Any], path: Path) -> None:
    """Bits above the original against predicted latency: what the search found, and all that it measured."""
    with picture(path, panel=(7, 4.5)) as ((axis,),):
        for by, colour, label in (
            (SCORED, COLOURS[5], "measured for scores"),
            (SUMMED, COLOURS[0], "measured as promising"),
        ):
            rows = [row for row in result["measured"] if row["by"] == by]
            axis.scatter(_percent(rows), [row["above"] for row in rows], s=8, color=colour, label=label, linewidths=0)
        rows = sorted((row["found"] for row in result["budgets"]), key=lambda row: row["predicted_ms"])
        above, error = ([row[name] for row in rows] for name in ("above", "error"))
        axis.errorbar(_percent(rows), above, yerr=error, color=COLOURS[1], marker="o", label="found")
        axis.scatter([100], [0], marker="*", s=130, color="black", label="original", zorder=3)
        axis.set_yscale("symlog", linthresh=LINEAR)
        axis.set(
            xlabel="predicted latency, % of the original's", ylabel="loss before any update, bits above the original"
        )
        axis.legend(fontsize=8)


def _percent(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    return [100 * row["predicted_share"] for row in rows]
