"""Run a search that starts from a trained encoder and keeps its state in a folder.

Every file in the folder is either complete or absent, and a rerun measures only what is missing.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lazyformer_fairseq.arguments import checkpoint_at
from lazyformer_fairseq.data.text.interface import TextTokenizer
from lazyformer_fairseq.data.text.tokenizer import load_tokenizer
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation import checkpoints, loading
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
from lazyformer_fairseq.experiments.search.compress.candidates import Candidates, Positions, read_encoder_candidates
from lazyformer_fairseq.experiments.search.compress.report import write_report
from lazyformer_fairseq.experiments.search.compress.selection import summed
from lazyformer_fairseq.experiments.search.run import search_in
from lazyformer_fairseq.experiments.search.settings import CompressSettings
from lazyformer_fairseq.modules.networks.encoder import Encoder
from lazyformer_fairseq.storage.atomic import atomic_folder
from lazyformer_fairseq.training.warm_start.losses import Scorer, read_text
from lazyformer_fairseq.training.warm_start.start import Trained, write_record

SCORES = "scores.json"


@dataclass(frozen=True)
class Original:
    """The trained model that a search starts from.

    Attributes:
        trained: the model's weights and settings.
        tokenizer: the model's tokenizer.
        latency_tokens: the sequence length for latency measurements.
        latency_memory: always 0, because encoders have no memory.
    """

    trained: Trained
    tokenizer: TextTokenizer
    latency_tokens: int
    latency_memory = 0

    @property
    def dictionary(self) -> Any:
        """The model's dictionary."""
        return self.trained.dictionary

    @property
    def device(self) -> str:
        """The device to measure latency on: a GPU if available."""
        if torch.cuda.is_available():
            return "cuda"
        return "cpu"

    def build_model(self, pattern: str) -> tuple[nn.Module, Encoder]:
        """Build the encoder with a different pattern and new weights; return the model and its stack of sublayers."""
        cfg = replace(self.trained.cfg, sublayer_pattern=pattern)
        model = loading.model_of(cfg, self.dictionary).to(self.device)
        return model, model.encoder.sentence_encoder


def load_original(path: Path) -> Original:
    """Load a masked-LM encoder and its tokenizer from a checkpoint or a folder of checkpoints.

    Raises:
        UserError: the checkpoint is damaged or unsafe, or its model is causal or not from this package.
    """
    checkpoint = checkpoint_at(path)
    try:
        state = checkpoints.load(checkpoint)
    except UserError as error:
        if (checkpoint.parent / checkpoints.CONFIG_FILE).is_file():
            raise UserError(
                f"{error}\nFirst convert a BERT from the Hub to this package's checkpoint format with lazyformer import"
            ) from None
        raise
    if loading.is_causal(state):
        raise UserError(
            f"{checkpoint} is a causal language model; search compress supports only masked-LM encoders, because "
            "only their weights can initialize a different pattern (docs/huggingface.md)"
        )
    tokenizer = load_tokenizer(checkpoint.parent / "tokenizer")
    model = loading.build(state, tokenizer.dictionary, checkpoint)
    trained = Trained(model.cfg, model.state_dict(), tokenizer.dictionary)
    return Original(trained, tokenizer, model.cfg.max_positions)


def run_compress(settings: CompressSettings, original: Original, path: Path) -> dict[str, Any]:
    """Search in the folder `path`, resume a stopped search there, or return the result of a finished one.

    Args:
        settings: the search's settings.
        original: the model that the search starts from.
        path: the folder.

    Returns:
        The contents of result.json.

    Raises:
        UserError: the folder contains a search with different settings or something other than a search, the text is
            too short or has a different dictionary, or no pattern fits into a budget.
    """
    # The text for the search, and twice as much text that begins with the same blocks.
    longest = original.trained.cfg.max_positions
    text = read_text(Path(settings.text), original.tokenizer, longest, settings.tokens)
    more = read_text(Path(settings.text), original.tokenizer, longest, 2 * settings.tokens)
    candidates = Candidates.of(original.trained.plan, read_encoder_candidates(settings.candidates))

    def search() -> dict[str, Any]:
        pattern = candidates.pattern(candidates.original)
        prices = latency.prices_of(original, pattern, candidates.sublayers, path, settings.prices)
        scorer = Scorer(original.trained, text, settings.seed)
        limits = [int(share * TICKS) for share in settings.budgets]
        losses = Losses(path / SCORES, scorer, candidates)
        budgets = Budgets(candidates, losses, in_ticks(prices, candidates), limits)
        budgets.refuse_too_small(settings.budgets)
        budgets.score()
        budgets.find(settings.top)
        budgets.find_again(settings.top)
        found = {share: budgets.best(limit) for share, limit in zip(settings.budgets, limits, strict=True)}

        other_scorer = Scorer(original.trained, more, settings.seed)
        on_other_text = measure_on_other_text(found.values(), candidates, other_scorer, text)
        result = {
            **_patterns(budgets, prices, original, found, on_other_text),
            "text": settings.text,
            "latency_tokens": settings.latency_tokens,
            "prices": dict(prices),
            "machine": describe_machine(original.device),
            "versions": describe_versions(),
        }
        for row in result["budgets"]:
            _write_start(scorer, candidates, row, original, path)
        return result

    return search_in(path, asdict(settings), SCORES, search, write_report)


def _patterns(
    budgets: Budgets,
    prices: latency.Prices,
    original: Original,
    found: Mapping[float, Positions],
    on_other_text: Mapping[Positions, Measured],
) -> dict[str, Any]:
    """Return the result's entries about patterns: both the selected ones and all that were measured."""
    candidates = budgets.candidates
    losses = budgets.losses.original
    own = candidates.pattern(candidates.original)
    milliseconds = latency.measure_models(original, [own, *map(candidates.pattern, found.values())])

    def describe(by_place: Positions) -> dict[str, Any]:
        pattern = candidates.pattern(by_place)
        predicted = latency.latency_of(prices, pattern)
        return {
            "pattern": pattern,
            "by_place": list(by_place),
            "predicted_ms": predicted,
            "predicted_share": predicted / latency.latency_of(prices, own),
            "sum": summed(candidates, budgets.scores, by_place),
            **asdict(budgets.losses[by_place]),
        }

    def describe_timed(by_place: Positions) -> dict[str, Any]:
        measured = milliseconds[candidates.pattern(by_place)]
        other = None
        if by_place in on_other_text:
            other = asdict(on_other_text[by_place])
        return {
            **describe(by_place),
            "on_other_text": other,
            "measured_ms": measured,
            "measured_share": measured["median"] / milliseconds[own]["median"],
        }

    scored = {scoring.by_place for scoring in budgets.scorings}  # the other patterns were measured as combinations
    return {
        "unit": "bits per masked token",
        "original": {**describe_timed(candidates.original), "bits": losses.bits},
        "masked_tokens": int(losses.words.sum()),
        "blocks": len(losses.words),
        "budgets": [{"budget": share, "found": describe_timed(by_place)} for share, by_place in found.items()],
        "changes": _changes(budgets),
        "measured": [{**describe(each), "is_scored": each in scored} for each in budgets.searched],
    }


def _changes(budgets: Budgets) -> list[dict[str, Any]]:
    """Return each change's score, and the standard error of the pattern loss that the score was computed from."""
    rows = []
    original = budgets.candidates.original
    for scoring in budgets.scorings:
        if scoring.by_place == original:
            continue
        changed = [place for place, text in enumerate(scoring.by_place) if text != original[place]]
        rows.append(
            {
                "place": scoring.placed.place,
                "was": original[scoring.placed.place],
                "becomes": scoring.placed.text,
                "reads": scoring.placed.producer,
                "score": budgets.scores[scoring.placed],
                "error": budgets.losses[scoring.by_place].error,
                "is_alone": len(changed) == 1,
            }
        )
    return rows


def _write_start(
    scorer: Scorer,
    candidates: Candidates,
    row: Mapping[str, Any],
    original: Original,
    path: Path,
) -> None:
    """Write a budget's model, before any training, in the format of `lazyformer import`."""
    folder = path / "models" / f"{row['budget']:g}"
    if folder.exists():
        return
    by_place = tuple(row["found"]["by_place"])
    start = scorer.start({"sublayer_pattern": candidates.pattern(by_place)}, candidates.origins(by_place))
    start.record["source"] = path.absolute().name
    loaded = loading.trained_model(start.new.cfg, start.new.weights, original.tokenizer, folder)
    with atomic_folder(folder) as unfinished:
        write_model(loaded, unfinished)
        write_record(unfinished, start.record)
