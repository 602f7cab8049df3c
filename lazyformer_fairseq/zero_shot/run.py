"""The steps of ``lazyformer evaluate``: read the pairs, let each model answer, and report."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation.costs.machine import device_named
from lazyformer_fairseq.storage.atomic import remove_leftovers
from lazyformer_fairseq.zero_shot import results
from lazyformer_fairseq.zero_shot.models import CountScorer, ScorerSettings, load_scorer, name_of
from lazyformer_fairseq.zero_shot.pairs import read_paradigms
from lazyformer_fairseq.zero_shot.report import write_report
from lazyformer_fairseq.zero_shot.settings import EvaluationSettings


def run(models: Sequence[str], data: Path, settings: EvaluationSettings) -> str:
    """Evaluate models; return what a screen shows of the report.

    Raises:
        UserError: a model or the pairs cannot be read, or two models have the same name.
    """
    paradigms = read_paradigms(data, settings.pairs or 0)
    folder = settings.output or Path("results") / settings.benchmark
    folder.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder)

    device = device_named(settings.device)
    how = ScorerSettings(settings.mask_rest_of_word, device, settings.precision)
    loaders = {}
    for model in models:
        name = name_of(model)
        if name in loaders:
            raise UserError(f"{model}: another model is called {name} too; give NAME=MODEL")
        loaders[name] = partial(load_scorer, model, how)
    if settings.ngram is not None:
        loaders[f"{settings.order}-gram"] = partial(CountScorer, settings.ngram, settings.order)

    answers = []
    for name, load in loaders.items():
        scorer = load()
        identity = results.identity_of(scorer.weights(), scorer.method, settings.precision, paradigms)
        make = partial(results.answer, scorer, name, identity, paradigms, device, settings.max_tokens)
        answers.append(results.kept_or_made(folder / f"{name}.json", identity, make))
    shown = write_report(answers, paradigms, settings.benchmark, folder)
    return f"{shown}\nwritten to {folder}"
