"""The command ``lazyformer lm compare``."""

import signal
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, Optional

import click

from lazyformer_fairseq.arguments import named_patterns, numbers, precision_option
from lazyformer_fairseq.devices.precision import precision_on
from lazyformer_fairseq.language_modeling.commands import PREPARED
from lazyformer_fairseq.language_modeling.comparison.settings import MODELS, RECIPES, ComparisonSettings

DEFAULTS = {field.name: field.default for field in fields(ComparisonSettings)}


def size(name: str, help_text: str, kind: Any = None, flag: str = "") -> Callable:
    """An option of a field of ComparisonSettings, with its default."""
    flag = flag or f"--{name.replace('_', '-')}"
    return click.option(flag, name, type=kind or click.IntRange(1), default=DEFAULTS[name], help=help_text)


def whole_numbers(flag: str, name: str, help_text: str) -> Callable:
    """The same for a field of several."""
    how = {"multiple": True, "type": str, "callback": numbers(int), "metavar": "N,N,..."}
    return click.option(flag, name, default=DEFAULTS[name], help=help_text, **how)


def _of_recipes(name: str) -> str:
    return ", ".join(f"{getattr(recipe, name):g} for {called}" for called, recipe in RECIPES.items())


@click.command()
@click.argument("data", type=PREPARED)
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--sublayers", type=click.Choice(list(map(str, MODELS))), default="16", help="Of each of the models.")
@click.option("--pattern", "more_patterns", multiple=True, callback=named_patterns, metavar="NAME=PATTERN",
              help="A further model; may be given several times.")  # fmt: skip
@whole_numbers("--seeds", "seeds", "Each trains every model.")
@click.option("--updates", type=click.IntRange(1), help=f"Of each model and seed.  [default: {DEFAULTS['updates']}]")
@click.option("--minutes", type=click.FloatRange(0, min_open=True),
              help="In place of --updates: as many as each model makes in this time, by a trial before.")  # fmt: skip
@size("embed_dim", "Embedding dimension.")
@size("ffn_embed_dim", "Width of the feed-forward sublayers.")
@size("heads", "Attention heads.")
@whole_numbers("--adaptive-softmax-cutoff", "cutoffs", "Ids that start a new band of words; '' for one band.")
@size("dropout", "On embeddings and sublayer outputs.", click.FloatRange(0, 1, max_open=True))
@size("tgt_len", "Tokens of a segment in training.")
@size("mem_len", "Tokens remembered in training.", click.IntRange(0))
@size("streams", "Rows of a training batch.", flag="--batch-size")
@size("evaluation_tgt_len", "Tokens of a segment in evaluation and latency.")
@size("evaluation_mem_len", "Tokens remembered in evaluation and latency.", click.IntRange(0))
@size("clamp_len", "In evaluation, distances from here on count as this one; 0 for all as they are.", click.IntRange(0))
@size("evaluation_streams", "Rows of an evaluation batch; no influence on the result.", flag="--evaluation-batch-size")
@click.option("--same-length", is_flag=True, help="In evaluation every query sees itself and as many tokens before it "
              "as the memory has.")  # fmt: skip
@click.option("--post-norm", is_flag=True, help="LayerNorms stand behind sublayers.  [default: before them]")
@click.option("--recipe", type=click.Choice(list(RECIPES)), default="adam",
              help="; ".join(f"{name}: {recipe.help}" for name, recipe in RECIPES.items()) + ".")  # fmt: skip
@click.option("--lr", "rate", type=click.FloatRange(0, 1, min_open=True),
              help=f"Highest learning rate.  [default: the recipe's, {_of_recipes('rate')}]")  # fmt: skip
@click.option("--warmup-ratio", type=click.FloatRange(0, 1),
              help="Share of the updates until then.  "
                   f"[default: the recipe's, {_of_recipes('warmup_ratio')}]")  # fmt: skip
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="[default: cuda where there is a GPU]")
@precision_option
def compare(
    data: Path,
    out: Path,
    sublayers: str,
    more_patterns: dict[str, str],
    updates: Optional[int],
    minutes: Optional[float],
    device: Optional[str],
    precision: Optional[str],
    recipe: str,
    rate: Optional[float],
    warmup_ratio: Optional[float],
    post_norm: bool,
    **sizes: Any,
) -> None:
    """Train Transformer-XL, Sandwich, PAR and lazy PAR on DATA, equal in all but their pattern, and report to OUT.

    DATA is what `lazyformer lm prepare` writes. The models of a seed take turns, update by update, on the same batches;
    then perplexity is taken over every token of the validation and test splits, and latency at batch 1, in turn too.
    OUT gets table.md, table.csv, comparison.png, results.json, and the trained models in runs. Stop it at any time;
    rerun to resume.

    \b
    lazyformer lm compare data/wikitext-2 results/compare
    lazyformer lm compare data/wikitext-2 results/mine --pattern 'found=(sff)x4 (f)x4' --seeds 1,2,3
    """
    if updates and minutes:
        raise click.UsageError("give --updates or --minutes, not both")
    patterns = MODELS[int(sublayers)]
    if taken := patterns.keys() & more_patterns.keys():
        raise click.UsageError(f"--pattern: {', '.join(sorted(taken))} is a model already; give another name")
    from lazyformer_fairseq.costs.machine import device_named
    from lazyformer_fairseq.language_modeling.comparison.run import compare as run

    device = device_named(device)
    settings = ComparisonSettings(
        data=str(data),
        patterns=patterns | more_patterns,
        updates=None if minutes else updates or DEFAULTS["updates"],
        minutes=minutes,
        device=device,
        precision=precision or precision_on(device),
        recipe=recipe,
        rate=RECIPES[recipe].rate if rate is None else rate,
        warmup_ratio=RECIPES[recipe].warmup_ratio if warmup_ratio is None else warmup_ratio,
        normalize_before=not post_norm,
        **sizes,
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    try:
        table = run(settings, out, ["lazyformer", *sys.argv[1:]])
    except KeyboardInterrupt:
        click.echo("stopped; rerun to resume", err=True)
        sys.exit(130)
    click.echo(f"\n{table}\n\nwritten to {out}: table.md, table.csv, comparison.png, results.json")
