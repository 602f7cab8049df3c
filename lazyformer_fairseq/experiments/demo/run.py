"""The demo in four steps: text, pre-training of two tiny models side by side, fine-tuning, and report.

OUTPUT/data, OUTPUT/acceptability     the corpus and the task
OUTPUT/NAME, OUTPUT/finetuned/NAME    a model's pre-training and fine-tuning runs
OUTPUT/table.md, OUTPUT/loss.png      the report
"""

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from lazyformer_fairseq.corpus.build import build_corpus, remove_published_work
from lazyformer_fairseq.corpus.settings import CorpusSettings
from lazyformer_fairseq.corpus.stages import clean_documents
from lazyformer_fairseq.data.masked_text import MaskedTextOptions
from lazyformer_fairseq.data.text.normalisation import TextSettings
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.demo.settings import DemoSettings
from lazyformer_fairseq.experiments.folder import experiment, load_or_create
from lazyformer_fairseq.experiments.prose import write_acceptability_task, write_prose
from lazyformer_fairseq.experiments.training_runs import Job, Training, train
from lazyformer_fairseq.experiments.yardsticks import Yardsticks, yardsticks_of
from lazyformer_fairseq.modules.networks.options import MaskedLMOptions, options_of_arch
from lazyformer_fairseq.options import select_options
from lazyformer_fairseq.report.figures import picture
from lazyformer_fairseq.report.numbers import in_milliseconds, noise_warning, with_spread
from lazyformer_fairseq.report.page import write_page
from lazyformer_fairseq.report.tables import markdown_table
from lazyformer_fairseq.storage.json_files import read_json, sha256_of
from lazyformer_fairseq.training.laptop import LAPTOP
from lazyformer_fairseq.training.loop import CHECKPOINT
from lazyformer_fairseq.training.objectives.labelled_texts import LabelledTextsObjective
from lazyformer_fairseq.training.objectives.masked_lm import MaskedLMObjective
from lazyformer_fairseq.training.objectives.network import Network
from lazyformer_fairseq.training.optimization import OptimizationConfig

# The models have equal parameter counts, as in Table 2 of the paper: wider feed-forward sublayers make up for the
# projections that lazy attention saves.
MODELS = {
    "bert_m1x4": ("bert_tiny", {"sublayer_pattern": "M1x4", "encoder_ffn_embed_dim": 128}),
    "lazyformer_m2x2": ("lazyformer_m2x6_s_tiny", {"sublayer_pattern": "M2x2", "encoder_ffn_embed_dim": 160}),
}
SIZES = {
    "encoder_embed_dim": 64,
    "encoder_attention_heads": 8,
    "max_positions": 64,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "attention_backend": "eager",  # at this size, "auto" selects a back end that takes 1.5 times as long
}
ADAM = {
    "optimizer": "fused_adam",
    "adam_betas": "(0.9, 0.98)",
    "lr": 2e-3,
    "lr_scheduler": "linear_warmup",
    "warmup_ratio": 0.2,
    "clip_norm": 1.0,
}

Results = Mapping[str, Mapping[str, Any]]  # by model


def run_demo(settings: DemoSettings, folder: Path) -> None:
    """Run the demo in `folder`, resuming where an earlier run stopped.

    Raises:
        UserError: the folder contains a demo with different settings, or there is too little text.
    """
    torch.set_num_threads(1)  # a second thread gains nothing at this size, and stalls if another process is running
    with experiment(folder, asdict(settings), "a demo", "data"):
        tokens = prepare(settings, folder)

        pretraining = pretraining_jobs(settings, folder)
        train(pretraining, partial(DemoTraining, measures=("loss", "accuracy")), "pre-training")
        finetuning = finetuning_jobs(settings, folder)
        train(finetuning, partial(DemoTraining, measures=("matthews",)), "fine-tuning")

        pretrained = {job.name: job.result() for job in pretraining}
        finetuned = {job.name: job.result() for job in finetuning}
        objective = pretraining_objective(settings, folder, next(iter(MODELS)))
        yardsticks = yardsticks_of(objective.texts, objective.held_out("valid"))
        print(f"\n{report(pretrained, finetuned, yardsticks, folder)}")
        print(f"Both models were pre-trained on the same {tokens:,}-token text, and their updates were interleaved.")
        lazy = list(MODELS)[-1]
        print(f"\nPicture: {folder / 'loss.png'}   Table: {folder / 'table.md'}   Models: {folder / lazy}")


def prepare(settings: DemoSettings, folder: Path) -> int:
    """Build the corpus and the acceptability task from the user's text or Python's prose, unless they already exist.

    Returns:
        The number of tokens in the training text.

    Raises:
        UserError: a file in the corpus or the task has changed since it was built.
    """
    data = folder / "data"
    task = folder / "acceptability"
    if data.exists():
        remove_published_work(data)
    if data.exists() and task.exists():
        print(f"Reusing the text in {data} and {task}.")
    else:
        print(f"Reading {settings.corpus or 'the English prose that ships with Python'}.")
        text = settings.corpus or str(write_prose(folder / "python_prose.jsonl"))
        if not data.exists():
            corpus = CorpusSettings(
                vocab_size=settings.vocab_size,
                valid_share=settings.valid_share,
                seed=settings.seed,
                word_coverage=1.0,  # in a small text every word matters, and every character deserves a token
                text=TextSettings(character_coverage=1.0),
            )
            build_corpus([text], data, corpus)
        if not task.exists():
            write_acceptability_task(clean_documents([text]), task, settings.valid_share, settings.seed)

    paths = [*data.glob("shard*/*"), *data.glob("tokenizer/*"), *task.glob("*.tsv")]
    files = [path for path in sorted(paths) if path.is_file()]
    checksums = {str(path.relative_to(folder)): sha256_of(path) for path in files}
    tokens = read_json(data / "manifest.json")["train"]["tokens"]
    before = load_or_create(folder / "text.json", lambda: {"tokens": tokens, "checksums": checksums})
    for name in {**before["checksums"], **checksums}:
        if before["checksums"].get(name) != checksums.get(name):
            made = folder / Path(name).parts[0]
            raise UserError(
                f"{folder / name} has changed since it was created; remove {made} and rerun the same command"
            )
    return before["tokens"]


class DemoTraining(Training):
    """The training loop of one of the models in MODELS.

    Args:
        job: the job to run.
        measures: the names of the metrics in the job's curve.
    """

    validations = 6

    def __init__(self, job: Job, measures: tuple[str, ...]):
        super().__init__(job)
        self.measures = measures

    def measure(self) -> dict[str, float]:
        """Compute the chosen metrics on the whole validation split."""
        found = self.evaluate()
        return {name: float(found[name]) for name in self.measures}


def recipe_options(settings: DemoSettings) -> Mapping[str, Any]:
    """Return the recipe's options for the model, the text and the optimizer, by name."""
    if settings.recipe == "laptop":
        return LAPTOP
    return ADAM


def network(settings: DemoSettings, name: str) -> Network:
    """Return the network of one of the models in MODELS."""
    arch, sizes = MODELS[name]
    options = select_options(MaskedLMOptions, recipe_options(settings)) | SIZES | sizes
    return Network(options_of_arch(arch, **options))


def pretraining_objective(settings: DemoSettings, folder: Path, name: str) -> MaskedLMObjective:
    """Return a model's masked-LM objective."""
    text = select_options(MaskedTextOptions, recipe_options(settings))
    return MaskedLMObjective(
        network(settings, name),
        data=str(folder / "data"),
        batch_size=settings.sequences,
        seed=settings.seed,
        updates=settings.updates,
        text=text | {"tokens_per_sample": settings.tokens_per_sample},
        batch_size_valid=128,
    )


def pretraining_jobs(settings: DemoSettings, folder: Path) -> list[Job]:
    """Return both models' pre-training jobs, which use the same batches."""
    options = recipe_options(settings)
    optimization = OptimizationConfig.from_options(
        options,
        updates=settings.updates,
        rate=options["lr"],
        seed=settings.seed,
    )
    jobs = []
    for name in MODELS:
        objective = pretraining_objective(settings, folder, name)
        jobs.append(Job(name, objective, optimization, folder / name))
    return jobs


def finetuning_jobs(settings: DemoSettings, folder: Path) -> list[Job]:
    """Return the jobs that fine-tune the pre-trained models on the acceptability task."""
    optimization = OptimizationConfig(
        settings.finetuning_updates,
        rate=1e-3,
        seed=settings.seed,
        schedule_options={"warmup_ratio": 0.06},
        clip_norm=1.0,
    )
    jobs = []
    for name in MODELS:
        objective = LabelledTextsObjective(
            network=network(settings, name),
            data=str(folder / "acceptability"),
            batch_size=32,
            seed=settings.seed,
            task="CoLA",
            begins_with=folder / name / CHECKPOINT,
        )
        jobs.append(Job(name, objective, optimization, folder / "finetuned" / name))
    return jobs


def report(pretrained: Results, finetuned: Results, yardsticks: Yardsticks, folder: Path) -> str:
    """Write table.md and loss.png, and return the verdict, the table and the yardsticks.

    Args:
        pretrained: the pre-training results by model.
        finetuned: the fine-tuning results by model. The score after the last update is reported; choosing the best
            score instead would mean selecting on the split that the scores are measured on.
        yardsticks: the losses of count-based predictors, for comparison.
        folder: the folder to write the files to.
    """
    rows = []
    for name, result in pretrained.items():
        curve = result["curve"]
        rows.append(
            {
                "model": name,
                "parameters": f"{result['parameters']:,}",
                "updates": f"{curve['updates'][-1]:,}",
                "ms per update (quartiles)": with_spread(in_milliseconds(result["seconds"])),
                "validation loss, bits": f"{curve['loss'][-1]:.2f}",
                "masked accuracy": f"{curve['accuracy'][-1]:.1f}%",
                "acceptability, Matthews": f"{finetuned[name]['curve']['matthews'][-1]:.3f}",
            }
        )
    losses = {name: result["curve"]["loss"][-1] for name, result in pretrained.items()}
    timings = {name: in_milliseconds(result["seconds"]) for name, result in pretrained.items()}
    blocks = [
        _verdict(pretrained),
        markdown_table(rows),
        yardsticks.describe("bits per masked token"),
        *yardsticks.warn(losses),
        *noise_warning(timings),
    ]
    draw(pretrained, yardsticks, folder / "loss.png")
    return write_page(blocks, folder, "table")


def _verdict(pretrained: Results) -> str:
    """Return two sentences that compare the LazyFormer model with the BERT model."""
    bert_name, lazy_name = pretrained
    bert = pretrained[bert_name]
    lazy = pretrained[lazy_name]
    more_bits = lazy["curve"]["loss"][-1] - bert["curve"]["loss"][-1]
    more_time = median(lazy["seconds"]) / median(bert["seconds"]) - 1
    return (
        f"After {lazy['curve']['updates'][-1]:,} updates, {lazy_name}'s validation loss is {abs(more_bits):.2f} bits "
        f"{'higher' if more_bits > 0 else 'lower'} than {bert_name}'s. Its updates take {abs(more_time):.0%} "
        f"{'more' if more_time > 0 else 'less'} time."
    )


def draw(results: Results, yardsticks: Yardsticks, path: Path) -> None:
    """Plot the validation losses and the yardsticks against updates and training time, and save the plot as PNG."""
    labels = {"updates": "updates", "seconds": "seconds of training"}
    with picture(path, 1, 2, (5, 4), sharey=True) as (panels,):
        for axis, (key, label) in zip(panels, labels.items(), strict=True):
            for (name, result), style in zip(results.items(), ("o-", "s--"), strict=True):
                curve = result["curve"]
                axis.plot(curve[key], curve["loss"], style, label=name, markersize=4)
            axis.axhline(yardsticks.unigram, color="grey", linestyle=":", label="unigram loss")
            axis.axhline(yardsticks.counts, color="grey", linestyle="--", label="counts of neighbors")
            axis.set_xlabel(label)
        panels[0].set_ylabel("validation loss, bits per masked token")
        panels[0].legend()
