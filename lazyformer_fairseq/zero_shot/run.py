"""The steps of ``lazyformer evaluate``: read the pairs, score them with each model, and write the report."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from torch import nn

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation.costs.machine import PRECISIONS, device_named
from lazyformer_fairseq.storage.atomic import remove_leftovers
from lazyformer_fairseq.zero_shot import results
from lazyformer_fairseq.zero_shot.models import count_model, load_model, name_of
from lazyformer_fairseq.zero_shot.pairs import read_paradigms
from lazyformer_fairseq.zero_shot.report import write_report
from lazyformer_fairseq.zero_shot.scoring import LanguageModel
from lazyformer_fairseq.zero_shot.settings import EvaluationSettings


def run(models: Sequence[str], data: Path, settings: EvaluationSettings) -> str:
    """Evaluate models, and return the text of the report for the terminal.

    Raises:
        UserError: a model or the pairs cannot be read, or two models have the same name.
    """
    paradigms = read_paradigms(data, settings.pairs or 0)
    folder = settings.output or Path("results") / settings.benchmark
    folder.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder)
    device = device_named(settings.device)

    def prepare(model: nn.Module) -> nn.Module:
        return model.to(device, PRECISIONS[settings.precision]).eval()

    loaders: dict[str, Callable[[], LanguageModel]] = {}
    for text in models:
        name = name_of(text)
        if name in loaders:
            raise UserError(f"{text}: another model is also called {name}; use NAME=MODEL")
        loaders[name] = partial(load_model, text, prepare)
    if settings.ngram is not None:
        loaders[f"{settings.order}-gram"] = partial(count_model, settings.ngram, settings.order)

    answers = []
    for name, load in loaders.items():
        model = load()
        identity = results.identity_of(model, settings, paradigms)
        make = partial(results.answer, model, name, identity, paradigms, settings)
        answers.append(results.load_or_compute(folder / f"{name}.json", identity, make))
    shown = write_report(answers, paradigms, settings.benchmark, folder)
    return f"{shown}\nwritten to {folder}"
