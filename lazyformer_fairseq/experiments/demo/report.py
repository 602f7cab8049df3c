"""The demo's table, picture and answers."""

import random
import re
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from lazyformer_fairseq.experiments.demo.settings import DemoSettings
from lazyformer_fairseq.fairseq_plugin.models.hub import LazyFormerHub
from lazyformer_fairseq.report.figures import write_picture
from lazyformer_fairseq.report.numbers import with_spread
from lazyformer_fairseq.report.tables import markdown_table

WORD_TO_MASK = re.compile(r"\b[a-z]{2,}\b")


def table(results: dict[str, dict[str, Any]]) -> str:
    """A Markdown table, one row a model."""
    rows = []
    for name, result in results.items():
        milliseconds = dict(zip(("median", "low", "high"), result["milliseconds"], strict=True))
        rows.append(
            {
                "model": name,
                "parameters": f"{result['parameters']:,}",
                "updates": f"{result['updates']:,}",
                "ms per update (quartiles)": with_spread(milliseconds),
                "validation loss, bits": f"{result['loss']:.2f}",
                "masked accuracy": f"{result['accuracy']:.1f}%",
                "acceptability, Matthews": f"{result['matthews']:.3f}",
            }
        )
    return markdown_table(rows)


def updates_reached(settings: DemoSettings, results: dict[str, dict[str, Any]]) -> str:
    """A sentence: how many updates each stage made, and whether the clock ended it."""
    made, *_ = results.values()  # the same for each model
    counts = ((made["updates"], settings.updates), (made["finetuning_updates"], settings.finetuning_updates))
    pretraining, finetuning = (f"{done:,} of {most:,} updates" for done, most in counts)
    why = "" if all(done == most for done, most in counts) else f": what {settings.minutes:g} minutes had room for"
    return f"Each model made {pretraining} of pre-training and {finetuning} of fine-tuning{why}."


def draw(results: dict[str, dict[str, Any]], unigram_entropy: float, path: Path) -> None:
    """Validation loss against updates and against training time, with the text's unigram entropy, to a PNG."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, key, label in zip(axes, ("updates", "seconds"), ("updates", "seconds of training"), strict=True):
        for (name, result), style in zip(results.items(), ("o-", "s--"), strict=True):
            axis.plot(result["curve"][key], result["curve"]["loss"], style, label=name, markersize=4)
        axis.axhline(unigram_entropy, color="grey", linestyle=":", label="unigram entropy of the text")
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("validation loss, bits a masked token")
    axes[0].legend()
    write_picture(figure, path)


def fill_masks(hub: LazyFormerHub, sentences: list[str], count: int, seed: int) -> list[list[str]]:
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
