"""The whole demo: text, two models side by side, fine-tuning, table and picture. What is done already is reused."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from lazyformer_fairseq.corpus.build import build_corpus
from lazyformer_fairseq.corpus.settings import CorpusSettings
from lazyformer_fairseq.corpus.stages import clean_documents
from lazyformer_fairseq.data.glue.task_table import find_task
from lazyformer_fairseq.data.glue.tsv import read_split
from lazyformer_fairseq.data.text.normalisation import TextSettings
from lazyformer_fairseq.experiments.demo import report
from lazyformer_fairseq.experiments.demo.acceptability import write_acceptability_task
from lazyformer_fairseq.experiments.demo.clock import Clock
from lazyformer_fairseq.experiments.demo.python_prose import write_prose
from lazyformer_fairseq.experiments.demo.settings import DemoSettings
from lazyformer_fairseq.experiments.demo.side_by_side import finetune, pretrain
from lazyformer_fairseq.fairseq_plugin.models import LazyFormerModel
from lazyformer_fairseq.report.numbers import spread
from lazyformer_fairseq.storage.json_files import read_json, write_json
from lazyformer_fairseq.storage.run_lock import keep_settings, run_lock

ANSWERS = 5


def run_demo(settings: DemoSettings, folder: Path, spent: float = 0.0) -> None:
    """Runs the demo in `folder`, or resumes where an earlier run stopped.

    Args:
        settings: what is trained, and for how long.
        folder: of the results.
        spent: seconds of `settings.minutes` that have passed already.

    Raises:
        UserError: the folder holds a demo of other settings, or the text does not suffice.
    """
    with run_lock(folder), _quiet_on_one_thread():
        begun = (folder / "data").exists()
        keep_settings(folder / "settings.json", asdict(settings), "a demo", begun)
        data, task = folder / "data", folder / "acceptability"
        clock = Clock(settings.minutes, folder / "clock.json", spent)
        try:
            _prepare(settings, data, task)
            results = _pretrained(settings, data, folder, clock)
            _add_finetuned(settings, task, folder, clock, results)
        finally:
            clock.keep()
        _print_report(settings, data, task, folder, results)


@contextmanager
def _quiet_on_one_thread() -> Iterator[None]:
    """Without the log of fairseq; a second thread gains nothing at this size, and waits where another process runs."""
    logged, threads = logging.root.manager.disable, torch.get_num_threads()
    logging.disable(logging.INFO)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        logging.disable(logged)
        torch.set_num_threads(threads)


def _prepare(settings: DemoSettings, data: Path, task: Path) -> None:
    if data.exists() and task.exists():
        print(f"Reusing the text in {data} and {task}.")
        return
    print(f"Reading {settings.corpus or 'the English prose that Python carries'}.")
    corpus = settings.corpus or str(write_prose(data.with_name("python_prose.jsonl")))
    if not data.exists():
        build_corpus(
            [corpus],
            data,
            CorpusSettings(
                vocab_size=settings.vocab_size,
                valid_share=settings.valid_share,
                seed=settings.seed,
                min_word_count=1,  # the text is small: every word counts,
                text=TextSettings(character_coverage=1.0),  # and every character is worth a piece
            ),
        )
    if not task.exists():
        write_acceptability_task(clean_documents([corpus]), task, settings.valid_share, settings.seed)


def _pretrained(settings: DemoSettings, data: Path, folder: Path, clock: Clock) -> dict[str, dict[str, Any]]:
    """What pre-training came to, by model."""
    path = folder / "pretraining.json"
    if path.exists():
        print(f"Reusing the models in {folder}.")
        return read_json(path)
    results = {}
    for run in pretrain(settings, data, folder, clock):
        results[run.name] = {
            "parameters": run.parameters,
            "updates": run.updates,
            "milliseconds": [1000 * spread(run.seconds)[key] for key in ("median", "low", "high")],
            "loss": run.curve["loss"][-1],
            "accuracy": run.curve["accuracy"][-1],
            "curve": run.curve,
        }
    write_json(path, results)
    return results


def _add_finetuned(
    settings: DemoSettings, task: Path, folder: Path, clock: Clock, results: dict[str, dict[str, Any]]
) -> None:
    """Adds what fine-tuning came to, after its last update: none is chosen by the split that it is measured on."""
    path = folder / "finetuning.json"
    if path.exists():
        print(f"Reusing the fine-tuned models in {folder / 'finetuned'}.")
    else:
        runs = finetune(settings, task, folder, folder / "finetuned", clock)
        write_json(
            path,
            {run.name: {"finetuning_updates": run.updates, "matthews": run.curve["matthews"][-1]} for run in runs},
        )
    for name, found in read_json(path).items():
        results[name] |= found


def _print_report(
    settings: DemoSettings, data: Path, task: Path, folder: Path, results: dict[str, dict[str, Any]]
) -> None:
    manifest = read_json(data / "manifest.json")
    entropy = manifest["valid"]["unigram_entropy_bits"]
    table = f"{report.table(results)}\n\n{report.updates_reached(settings, results)}"
    (folder / "table.md").write_text(table + "\n")
    report.draw(results, entropy, folder / "loss.png")
    print(f"\n{table}\n")
    for name, result in results.items():
        print(
            f"{name}: {result['loss']:.2f} bits a masked token; the held-out text's unigram entropy is {entropy:.2f}."
        )
    print(
        f"Pre-trained on {manifest['train']['tokens']:,} tokens, in updates of {settings.sequences} blocks of at most "
        f"{settings.tokens_per_sample} tokens, in turn in one process."
    )
    *_, lazy = results
    hub = LazyFormerModel.from_pretrained(folder / lazy)
    sentences = [row.texts[0] for row in read_split(find_task("CoLA"), task, "valid").examples if row.target == 1]
    rows = report.fill_masks(hub, sentences, ANSWERS, settings.seed)
    print(f"\n{lazy} fills masks in held-out sentences:\n")
    print(tabulate(rows, ("text", "word", "answers"), maxcolwidths=[60, None, 40]))
    print(f"\nPicture: {folder / 'loss.png'}   Table: {folder / 'table.md'}   Models: {folder / lazy}")
