"""The whole demo: text, two models side by side, fine-tuning, table and picture. What is done already is reused."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from tabulate import tabulate

from lazyformer_fairseq.corpus.build import build_corpus
from lazyformer_fairseq.corpus.run.stages import clean_documents
from lazyformer_fairseq.corpus.settings import CorpusSettings
from lazyformer_fairseq.data.glue.task_table import find_task
from lazyformer_fairseq.data.glue.tsv import read_split
from lazyformer_fairseq.data.text.normalisation import TextSettings
from lazyformer_fairseq.demo import report
from lazyformer_fairseq.demo.acceptability import write_acceptability_task
from lazyformer_fairseq.demo.finetune import finetune
from lazyformer_fairseq.demo.python_prose import python_prose
from lazyformer_fairseq.demo.settings import DemoSettings
from lazyformer_fairseq.demo.side_by_side import pretrain
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.models import LazyFormerModel

ANSWERS = 5


def run_demo(settings: DemoSettings, folder: Path) -> None:
    """Runs the demo in `folder`, or goes on where an earlier run stopped.

    Raises:
        UserError: the folder holds a demo of other settings, or the text does not suffice.
    """
    with _without_the_log_of_fairseq():
        _claim(settings, folder)
        data, task = folder / "data", folder / "acceptability"
        _prepare(settings, data, task)
        results = _pretrained(settings, data, folder)
        _add_matthews(settings, task, folder, results)
        _print_report(settings, data, task, folder, results)


@contextmanager
def _without_the_log_of_fairseq() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(before)


def _claim(settings: DemoSettings, folder: Path) -> None:
    """Keeps the settings in the folder, so that results of other settings are never mixed in."""
    path = folder / "settings.json"
    if path.exists() and (folder / "data").exists():  # before there is data, nothing is lost with the settings
        if json.loads(path.read_text()) != settings.as_json():
            raise UserError(
                f"{folder} holds a demo of other settings (see {path}); remove it or give another --output "
                "(make demo OUTPUT=...)"
            )
        return
    folder.mkdir(parents=True, exist_ok=True)
    _write_whole(path, settings.as_json())


def _prepare(settings: DemoSettings, data: Path, task: Path) -> None:
    if data.exists() and task.exists():
        print(f"Reusing the text in {data} and {task}.")
        return
    print(f"Reading {settings.corpus or 'the English prose that Python carries'}.")
    corpus = settings.corpus or str(_write_prose(data.with_name("python_prose.jsonl")))
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


def _write_prose(path: Path) -> Path:
    if not path.exists():
        unfinished = path.with_suffix(".unfinished")
        with unfinished.open("w", encoding="utf-8") as file:
            for prose in python_prose():
                file.write(json.dumps({"text": "\n".join(prose.paragraphs)}) + "\n")
        unfinished.replace(path)
    return path


def _pretrained(settings: DemoSettings, data: Path, folder: Path) -> dict[str, dict[str, Any]]:
    """What pre-training came to, by model."""
    path = folder / "pretraining.json"
    if path.exists():
        print(f"Reusing the models in {folder}.")
        return json.loads(path.read_text())
    results = {}
    for name, run in pretrain(settings, data, folder).items():
        milliseconds = 1000 * np.array(run.seconds)
        results[name] = {
            "parameters": run.parameters,
            "milliseconds": [float(np.percentile(milliseconds, share)) for share in (50, 25, 75)],
            "loss": run.curve["loss"][-1],
            "accuracy": run.curve["accuracy"][-1],
            "curve": run.curve,
        }
    _write_whole(path, results)
    return results


def _add_matthews(settings: DemoSettings, task: Path, folder: Path, results: dict[str, dict[str, Any]]) -> None:
    path = folder / "finetuning.json"
    if path.exists():
        print(f"Reusing the fine-tuned models in {folder / 'finetuned'}.")
    else:
        _write_whole(path, finetune(settings, task, folder, folder / "finetuned"))
    for name, score in json.loads(path.read_text()).items():
        results[name]["matthews"] = score


def _print_report(
    settings: DemoSettings, data: Path, task: Path, folder: Path, results: dict[str, dict[str, Any]]
) -> None:
    manifest = json.loads((data / "manifest.json").read_text())
    entropy = manifest["valid"]["unigram_entropy_bits"]
    table = report.table(results)
    (folder / "table.md").write_text(table + "\n")
    report.draw(results, entropy, folder / "loss.png")
    print(f"\n{table}\n")
    for name, result in results.items():
        print(
            f"{name}: {result['loss']:.2f} bits a masked token; the held-out text's unigram entropy is {entropy:.2f}."
        )
    print(
        f"Pre-trained on {manifest['train']['tokens']:,} tokens, {settings.updates} updates of {settings.sequences} "
        f"blocks of at most {settings.tokens_per_sample} tokens, in turn in one process."
    )
    *_, lazy = results
    hub = LazyFormerModel.from_pretrained(folder / lazy)
    sentences = [row.texts[0] for row in read_split(find_task("CoLA"), task, "valid").examples if row.target == 1]
    rows = report.fill_masks(hub, sentences, ANSWERS, settings.seed)
    print(f"\n{lazy} fills masks in held-out sentences:\n")
    print(tabulate(rows, ("text", "word", "answers"), maxcolwidths=[60, None, 40]))
    print(f"\nPicture: {folder / 'loss.png'}   Table: {folder / 'table.md'}   Models: {folder / lazy}")


def _write_whole(path: Path, content: Any) -> None:
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(content, indent=2) + "\n")
    unfinished.replace(path)
