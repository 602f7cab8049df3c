"""The whole demo: text, two tiny models side by side, fine-tuning, table, picture. What is done already is reused."""

import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any, Optional

import torch
from tabulate import tabulate

from lazyformer_fairseq.corpus.build import build_corpus, remove_published_work
from lazyformer_fairseq.corpus.settings import CorpusSettings
from lazyformer_fairseq.corpus.stages import clean_documents
from lazyformer_fairseq.data.glue import find_task
from lazyformer_fairseq.data.labelled_files import read_split
from lazyformer_fairseq.data.masked_text import MaskedTextOptions
from lazyformer_fairseq.data.text.normalisation import TextSettings
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation.hub import LazyFormerHub, load
from lazyformer_fairseq.experiments.compare.report import has_shown_nothing
from lazyformer_fairseq.experiments.demo.settings import FEWEST, MODELS, SAME_FOR_BOTH, DemoSettings
from lazyformer_fairseq.experiments.folder import experiment, kept
from lazyformer_fairseq.experiments.prose import write_acceptability_task, write_prose
from lazyformer_fairseq.experiments.trainings import Job, Training, train_in_turn
from lazyformer_fairseq.modules.networks.options import MaskedLMOptions, options_of_arch
from lazyformer_fairseq.options import chosen
from lazyformer_fairseq.progress import Progress
from lazyformer_fairseq.report.figures import picture
from lazyformer_fairseq.report.numbers import spread, with_spread
from lazyformer_fairseq.report.tables import markdown_table
from lazyformer_fairseq.storage.atomic import write_text
from lazyformer_fairseq.storage.checked import Amount
from lazyformer_fairseq.storage.json_files import (
    read_checked_as,
    read_json,
    sha256_of,
    write_checked_json,
)
from lazyformer_fairseq.training.loop import CHECKPOINT
from lazyformer_fairseq.training.objectives.labelled_texts import LabelledTextsObjective
from lazyformer_fairseq.training.objectives.masked_lm import MaskedLMObjective
from lazyformer_fairseq.training.objectives.network import Network
from lazyformer_fairseq.training.optimization import OptimizationConfig

VALIDATIONS = 6  # points of a curve beside the first; it is also saved there
# Shares of the clock at which a stage must be over. Text and vocabulary come first and take what they take; the last
# share is for the report.
PRETRAINED_BY, FINETUNED_BY = 0.74, 0.86
ANSWERS, CLIP_NORM = 5, 1.0
WORD_TO_MASK = re.compile(r"\b[a-z]{2,}\b")

Results = Mapping[str, Mapping[str, Any]]  # by model


def run_demo(settings: DemoSettings, folder: Path) -> None:
    """Runs the demo in `folder`, or resumes where an earlier run stopped.

    Args:
        settings: what is trained, and for how long.
        folder: of the results.

    Raises:
        UserError: the folder holds a demo of other settings, or the text does not suffice.
    """
    torch.set_num_threads(1)  # a second one gains nothing at this size, and waits where another process runs
    with experiment(folder, settings, "a demo", "data"):
        data, task = folder / "data", folder / "acceptability"
        clock = Clock(settings.minutes, folder / "clock.json")
        try:
            tokens = prepare(settings, data, task)
            results = kept(folder / "pretraining.json", lambda: pretrain(settings, data, folder, clock))
            path = folder / "finetuning.json"
            for name, found in kept(path, lambda: finetune(settings, task, folder, clock)).items():
                results[name] |= found
        finally:
            clock.keep()
        _print_report(settings, data, task, folder, results, tokens)


@dataclass(frozen=True)
class Spent:
    """The file of a :class:`Clock`."""

    seconds: Amount


class Clock:
    """The wall time that a whole demo may take; one that is stopped and run again gets no more than another.

    Args:
        minutes: of the whole; None for no limit.
        path: of the JSON file that keeps the time; what passes after :meth:`keep` and before a kill is not counted.
    """

    def __init__(self, minutes: Optional[float], path: Path):
        self._limit = math.inf if minutes is None else 60 * minutes
        self._path = path
        before = read_checked_as(Spent, path).seconds if path.exists() else 0.0
        self._began = monotonic() - before

    @property
    def seconds(self) -> float:
        """That have passed."""
        return monotonic() - self._began

    def left(self, share: float) -> float:
        """Seconds until this share of the whole has passed; infinite without a limit, negative afterwards."""
        return share * self._limit - self.seconds

    def keep(self) -> None:
        write_checked_json(self._path, {"seconds": self.seconds})


def prepare(settings: DemoSettings, data: Path, task: Path) -> int:
    """Fills the two folders, unless they are there, from the user's text or Python's prose.

    Returns:
        Tokens of the training text.

    Raises:
        UserError: a file in one of them is not what it was when the models began to learn from it.
    """
    if data.exists():
        remove_published_work(data)
    if data.exists() and task.exists():
        print(f"Reusing the text in {data} and {task}.")
    else:
        _write_text_and_task(settings, data, task)
    read_in_training = [*data.glob("shard*/*"), *data.glob("tokenizer/*"), *task.glob("*.tsv")]
    files = sorted(path for path in read_in_training if path.is_file())
    checksums = {str(path.relative_to(data.parent)): sha256_of(path) for path in files}

    def describe() -> dict[str, Any]:
        return {"tokens": read_json(data / "manifest.json")["train"]["tokens"], "checksums": checksums}

    described = kept(data.with_name("text.json"), describe)
    for name in {**described["checksums"], **checksums}:
        if described["checksums"].get(name) != checksums.get(name):
            path = data.parent / name
            made = task if path.is_relative_to(task) else data
            raise UserError(f"{path}: is not as it was made; remove {made} and run the same command again")
    return described["tokens"]


def _write_text_and_task(settings: DemoSettings, data: Path, task: Path) -> None:
    print(f"Reading {settings.corpus or 'the English prose that Python carries'}.")
    corpus = settings.corpus or str(write_prose(data.with_name("python_prose.jsonl")))
    if not data.exists():
        # The text is small: every word counts, and every character is worth a piece.
        same = {name: getattr(settings, name) for name in ("vocab_size", "valid_share", "seed")}
        text = TextSettings(character_coverage=1.0)
        build_corpus([corpus], data, CorpusSettings(**same, word_coverage=1.0, text=text))
    if not task.exists():
        write_acceptability_task(clean_documents([corpus]), task, settings.valid_share, settings.seed)


class DemoTraining(Training):
    """The training of a model of MODELS.

    Args:
        measures: of a validation.
        clock: kept with each checkpoint.
    """

    def __init__(self, job: Job, measures: Sequence[str], clock: Clock):
        super().__init__(job)
        self.measures = measures
        self.clock = clock

    def plan(self, total: int) -> None:
        """The learning rate is to be zero after `total` updates."""
        self.total = total
        self.schedule.cfg.max_update = total
        self.schedule.step_update(self.updates)

    def measure(self) -> dict[str, float]:
        """The measures on all that is held out."""
        found = self.evaluate()
        return {measure: float(found[measure]) for measure in self.measures}

    def is_due(self) -> bool:
        return self.updates - self.curve["updates"][-1] >= self.total / VALIDATIONS

    def save(self, with_optimizer: bool = True) -> None:
        super().save(with_optimizer)
        self.clock.keep()

    def _resume_schedule(self, state: Mapping[str, Any]) -> None:
        """Of any total: it was planned, as another will be before the next update."""
        super()._resume_schedule({**state, "decay": self.schedule.state_dict().get("decay")})


def network_of(name: str, recipe: Mapping[str, Any]) -> Network:
    """What builds a model of MODELS, by options of a recipe."""
    arch, sizes = MODELS[name]
    return Network(options_of_arch(arch, **{**chosen(MaskedLMOptions, recipe), **SAME_FOR_BOTH, **sizes}))


def objective_of(settings: DemoSettings, name: str, data: Path) -> MaskedLMObjective:
    """What a model of MODELS learns in pre-training."""
    of_run = settings.sequences, settings.seed, settings.updates
    text = {**chosen(MaskedTextOptions, settings.how), "tokens_per_sample": settings.tokens_per_sample}
    return MaskedLMObjective(network_of(name, settings.how), str(data), *of_run, text, batch_size_valid=128)


def optimization_of(settings: DemoSettings) -> OptimizationConfig:
    """How they learn in pre-training."""
    usual = {"optimizer": "fused_adam", "adam_betas": "(0.9, 0.98)", "lr_scheduler": "linear_warmup"}
    how = {**usual, "warmup_ratio": 0.2, "clip_norm": CLIP_NORM, **settings.how}
    return OptimizationConfig.from_options(how, updates=settings.updates, rate=settings.rate, seed=settings.seed)


def pretrain(settings: DemoSettings, data: Path, folder: Path, clock: Clock) -> dict[str, dict[str, Any]]:
    """Pre-trains all MODELS, or resumes, each in `folder`/NAME; returns what that came to, by model."""
    optimization = optimization_of(settings)
    jobs = [
        Job(name, objective_of(settings, name, data), optimization, folder / name, settings.updates) for name in MODELS
    ]
    trainings = _train_until("pre-training", jobs, ("loss", "accuracy"), clock, PRETRAINED_BY)
    return {
        training.name: {
            "parameters": training.parameters,
            "updates": training.updates,
            "milliseconds": spread([1000 * seconds for seconds in training.seconds]),
            "loss": training.curve["loss"][-1],
            "accuracy": training.curve["accuracy"][-1],
            "curve": training.curve,
        }
        for training in trainings
    }


def finetune(settings: DemoSettings, task: Path, folder: Path, clock: Clock) -> dict[str, dict[str, Any]]:
    """Fine-tunes them on the acceptability task, or resumes, in `folder`/finetuned/NAME; what that came to, by model.

    What counts is measured after the last update: none is chosen by the split that it is measured on.
    """
    updates, schedule = settings.finetuning_updates, {"warmup_ratio": 0.06}
    optimization = OptimizationConfig(updates, 1e-3, settings.seed, schedule_options=schedule, clip_norm=CLIP_NORM)
    jobs = []
    for name in MODELS:
        of_run = settings.seed, "CoLA", folder / name / CHECKPOINT
        objective = LabelledTextsObjective(network_of(name, settings.how), str(task), 32, *of_run)
        jobs.append(Job(name, objective, optimization, folder / "finetuned" / name, updates))
    trainings = _train_until("fine-tuning", jobs, ("matthews",), clock, FINETUNED_BY)
    return {
        training.name: {"finetuning_updates": training.updates, "matthews": training.curve["matthews"][-1]}
        for training in trainings
    }


def _train_until(
    stage: str, jobs: Sequence[Job], measures: Sequence[str], clock: Clock, until: float
) -> list[DemoTraining]:
    """Trains all to the same number of updates: the jobs', or as many as fit until this share of the clock.

    How many fit is asked anew after every turn, for a machine may become slow halfway; the learning rate follows, and
    ends at zero at any pace.
    """
    trainings, most = [DemoTraining(job, measures, clock) for job in jobs], jobs[0].updates
    if any(training.updates for training in trainings):
        print(f"Resuming {stage} at {', '.join(f'{each.name}: update {each.updates}' for each in trainings)}.")
    for training in trainings:
        if not training.curve:
            training.validate()
    began = clock.seconds - sum(sum(training.seconds) for training in trainings)
    with Progress(initial=sum(training.updates for training in trainings), desc=stage, unit=" updates") as progress:

        def plan() -> None:
            made = [training.updates for training in trainings]
            if min(made) < max(made) and progress.total:
                return
            last_validations = sum(training.validation_seconds for training in trainings)
            total = _updates_that_fit(made, most, clock.seconds - began, clock.left(until) - last_validations)
            progress.total = total * len(trainings)
            for training in trainings:
                training.plan(total)

        train_in_turn(trainings, progress, plan)
    for training in trainings:
        training.validate()
        training.save()
    return trainings


def _updates_that_fit(made: list[int], most: int, spent: float, left: float) -> int:
    """Updates of each model in all, by the time that those made so far took.

    Args:
        made: updates of each model.
        most: the answer is never more.
        spent: seconds that `made` took together.
        left: seconds from now.
    """
    if min(made) < FEWEST:
        return max(max(made), min(most, FEWEST)) if left <= 0 else most
    turns = left * sum(made) / (len(made) * max(spent, 1e-9))
    return int(max(max(made), min(most, max(made) + turns)))


def _print_report(settings: DemoSettings, data: Path, task: Path, folder: Path, results: Results, tokens: int) -> None:
    objective = objective_of(settings, next(iter(MODELS)), data)
    cost = objective.texts.cost_of_frequencies(objective.held_out("valid"))
    text = f"{table(results)}\n\n{updates_reached(settings, results)}"
    if sentence := has_shown_nothing({name: result["loss"] for name, result in results.items()}, cost):
        text += f"\n\n{sentence}"
    write_text(folder / "table.md", text + "\n")
    draw(results, cost, folder / "loss.png")
    print(f"\n{text}\n")
    for name, result in results.items():
        print(f"{name}: {result['loss']:.2f} bits a masked token; the unigram loss is {cost:.2f}.")
    print(
        f"Pre-trained on {tokens:,} tokens, in updates of {settings.sequences} blocks of at most "
        f"{settings.tokens_per_sample} tokens, in turn in one process."
    )
    *_, lazy = results
    hub = load(folder / lazy)
    sentences = [row.texts[0] for row in read_split(find_task("CoLA"), task, "valid").examples if row.target == 1]
    rows = fill_masks(hub, sentences, ANSWERS, settings.seed)
    print(f"\n{lazy} fills masks in held-out sentences:\n")
    print(tabulate(rows, ("text", "word", "answers"), maxcolwidths=[60, None, 40]))
    print(f"\nPicture: {folder / 'loss.png'}   Table: {folder / 'table.md'}   Models: {folder / lazy}")


def table(results: Results) -> str:
    """A Markdown table, one row a model."""
    return markdown_table(
        [
            {
                "model": name,
                "parameters": f"{result['parameters']:,}",
                "updates": f"{result['updates']:,}",
                "ms per update (quartiles)": with_spread(result["milliseconds"]),
                "validation loss, bits": f"{result['loss']:.2f}",
                "masked accuracy": f"{result['accuracy']:.1f}%",
                "acceptability, Matthews": f"{result['matthews']:.3f}",
            }
            for name, result in results.items()
        ]
    )


def updates_reached(settings: DemoSettings, results: Results) -> str:
    """A sentence: how many updates each stage made, and whether the clock ended it."""
    made, *_ = results.values()  # the same for each model
    counts = ((made["updates"], settings.updates), (made["finetuning_updates"], settings.finetuning_updates))
    pretraining, finetuning = (f"{done:,} of {most:,} updates" for done, most in counts)
    why = "" if all(done == most for done, most in counts) else f": what {settings.minutes:g} minutes had room for"
    return f"Each model made {pretraining} of pre-training and {finetuning} of fine-tuning{why}."


def draw(results: Results, unigram: float, path: Path) -> None:
    """Validation loss against updates and against training time, with the unigram loss, to a PNG."""
    with picture(path, 1, 2, (5, 4), sharey=True) as (panels,):
        for axis, key, label in zip(panels, ("updates", "seconds"), ("updates", "seconds of training"), strict=True):
            for (name, result), style in zip(results.items(), ("o-", "s--"), strict=True):
                axis.plot(result["curve"][key], result["curve"]["loss"], style, label=name, markersize=4)
            axis.axhline(unigram, color="grey", linestyle=":", label="unigram loss")
            axis.set_xlabel(label)
        panels[0].set_ylabel("validation loss, bits a masked token")
        panels[0].legend()


def fill_masks(hub: LazyFormerHub, sentences: Sequence[str], count: int, seed: int) -> list[list[str]]:
    """Rows (text with a mask, the word that stood there, the model's three likeliest) for held-out sentences.

    Words that the tokenizer splits are passed over: one mask stands for one piece.
    """
    rows: list[list[str]] = []
    chance = random.Random(seed)
    for sentence in chance.sample(sentences, len(sentences)):
        whole_words = [
            found for found in WORD_TO_MASK.finditer(sentence) if len(hub.tokenizer.encode(found.group())) == 1
        ]
        if len(whole_words) < 3 or len(sentence) > 90:
            continue
        word = chance.choice(whole_words)
        text = f"{sentence[: word.start()]}<mask>{sentence[word.end() :]}"
        answers = (f"{answer.word} ({answer.probability:.0%})" for answer in hub.fill_mask(text, topk=3))
        rows.append([text, word.group(), ", ".join(answers)])
        if len(rows) == count:
            break
    return rows
