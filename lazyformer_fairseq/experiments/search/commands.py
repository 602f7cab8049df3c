"""``lazyformer search``: one pattern as in PAR's section 2, or a front by any method; orders; trained models."""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Optional

import click
from click.core import ParameterSource

from lazyformer_fairseq.arguments import ExistingPath, checkpoint_at, refuse_missing_folders
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.folder import stoppable
from lazyformer_fairseq.experiments.search.settings import (
    FRONTS_PRICE,
    TASKS,
    CompressSettings,
    FrontSettings,
    OrdersSettings,
    Recipe,
    Schedule,
    SearchSettings,
    TrainSettings,
    choose_baseline,
    read_candidates,
)
from lazyformer_fairseq.options import Group, takes
from lazyformer_fairseq.patterns.grammar import plan

OUT = click.argument("out", type=click.Path(path_type=Path))
LATENCIES = click.option(
    "--latencies",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help='JSON of milliseconds by kind, {"s": 1.2, "f": 0.7}.  [default: measured here]',
)


@click.group(cls=Group, default="run")
def search() -> None:
    """Search sublayer patterns: one or a front, random orders, faster ones for a trained model."""


def on_data(command: Callable) -> Callable:
    """The arguments DATA, OUT and fairseq's options; --task, --arch and --device."""
    for decorate in (
        click.option("--device", type=click.Choice(["cpu", "cuda"]), help="[default: cuda where there is a GPU]"),
        click.option("--arch", required=True, help="Gives sizes, dropout and norm position; its pattern gives way."),
        click.option("--task", type=click.Choice(list(TASKS)), required=True, help="What DATA is for."),
        click.argument("fairseq_options", nargs=-1, type=click.UNPROCESSED),
        OUT,
        click.argument("data"),
    ):
        command = decorate(command)
    return command


@search.command(context_settings={"ignore_unknown_options": True})
@on_data
@click.option("--sublayers", type=int, help="Layers to search.  [default: as many as the baseline or ARCH has]")
@click.option("--baseline-pattern", help="What is compared with; of as many sublayers.  [default: sf, half as often]")
@takes(FrontSettings, into="")
@takes(TrainSettings, into="train")
@takes(Schedule, into="schedule")
@takes(SearchSettings, into="")
@LATENCIES
@click.option("--save-interval", type=click.IntRange(min=1), default=500, help="Updates between states to resume from.")
@click.option("--time-only", is_flag=True, help="Search nothing; time the supernet's updates beside the baseline's.")
@click.pass_context
def run(ctx: click.Context, out: Path, train: TrainSettings, save_interval: int, time_only: bool, **given: Any) -> None:
    """Search a sublayer pattern by gradient descent (PAR Transformer, section 2), or a front of them by any method.

    Every layer becomes a mixture of self-attention, feed-forward and identity; what the mixtures come to prefer is
    the pattern. DATA is what pre-training reads (of a corpus in several shards, the first alone), OUT the folder of
    the search. With --budgets or another --method it finds a front: a pattern for each share of the baseline's latency,
    beside those of random search of the same cost. Options of fairseq's task and model, such as --tokens-per-sample or
    --encoder-embed-dim, may follow. Stop it at any time; rerun to resume. More in docs/search.md.

    \b
    lazyformer search data/wikitext-2 results/search --task language-model --arch transformer_xl_base \\
      --adaptive-softmax-cutoff '' --tgt-len 192 --mem-len 192
    lazyformer search data results/search_bert --task masked-lm --arch bert_base \\
      --candidates s,f,l,identity --latency-price 0.5 --latency-budget 0.7
    lazyformer search data results/front --task masked-lm --arch bert_base --candidates s,f,l,identity \\
      --method evolution --budgets 0.5,0.6,0.7,0.8,0.9,1.0
    """
    refuse_missing_folders(given["data"])
    from lazyformer_fairseq.experiments.search.from_scratch import train_front
    from lazyformer_fairseq.experiments.search.front import run_front
    from lazyformer_fairseq.experiments.search.report import front_report, models_table
    from lazyformer_fairseq.experiments.search.run import run_search, time_updates

    chosen = {name for name in given if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE}
    front = _front(given, chosen)
    if train.updates and not front:
        raise UserError("--train-updates: of a front; give --budgets, or another --method than gradient, too")
    if front and "latency_price" not in chosen:
        given["latency_price"] = FRONTS_PRICE
    if front and not front.trains_mixtures:  # they have no architecture that would wait
        given["schedule"] = replace(given["schedule"], constant_updates=0)
    settings = _settings(**given)
    if time_only:
        click.echo(time_updates(settings, out))
    elif front:
        result = run_front(settings, front, out, save_interval)
        trained = [train_front(settings, train, result, out)] if train.updates else []
        click.echo("\n" + "\n\n".join([front_report(result), *trained, f"Files: {out}"]))
    else:
        result = run_search(settings, out, save_interval)
        click.echo(f"\n{_found(result)}\n\n{models_table(result['table'])}\n\nFiles: {out}")


def _front(given: dict[str, Any], chosen: set[str]) -> Optional[FrontSettings]:
    """Takes a front's options out of the others; None where one pattern is searched as in the paper.

    Args:
        chosen: names of what the command line has.

    Raises:
        UserError: options that do not fit together.
    """
    of_front = {each.name: given.pop(each.name) for each in fields(FrontSettings)}
    if of_front["method"] == "gradient" and "budgets" not in chosen:
        if alone := [name for name in of_front if name in chosen - {"method"}]:
            options = ", ".join(f"--{name.replace('_', '-')}" for name in alone)
            raise UserError(f"{options}: of a front; give --budgets, or another --method than gradient, too")
        return None
    if given["latency_budget"]:
        raise UserError("--latency-budget: of one pattern; a front has --budgets")
    return FrontSettings(**of_front)


def _settings(
    data: str,
    task: str,
    arch: str,
    sublayers: Optional[int],
    baseline_pattern: Optional[str],
    candidates: Sequence[str],
    latencies: Optional[Path],
    device: Optional[str],
    **rest: Any,
) -> SearchSettings:
    """Raises UserError if the options do not fit together."""
    from lazyformer_fairseq.experiments.search.fairseq_model import parse
    from lazyformer_fairseq.experiments.search.latency import read_price_list
    from lazyformer_fairseq.measure.costs.machine import device_named

    names, device = read_candidates(",".join(candidates)), device_named(device)
    cfg = parse(data, task, arch, rest["seed"], rest["fairseq_options"])
    baseline = choose_baseline(baseline_pattern, sublayers, len(plan(cfg.model.sublayer_pattern)))
    settings = SearchSettings(str(Path(data).absolute()), task, arch, baseline, names, device=device, **rest)
    return replace(settings, prices=read_price_list(latencies, settings.priced)) if latencies else settings


def _found(result: dict[str, Any]) -> str:
    how = "unchanged for long enough" if result["converged"] else "as far as --max-updates went"
    if not result["pattern"]:
        return "Every layer prefers identity: no sublayer is left. Give a lower --latency-price, or search longer."
    return f"Found after {result['updates']} updates ({how}):\n\n  --sublayer-pattern '{result['pattern']}'"


@search.command(context_settings={"ignore_unknown_options": True})
@on_data
@takes(OrdersSettings)
@takes(Recipe, into="")
def orders(data: str, out: Path, device: Optional[str], settings: OrdersSettings, **given: Any) -> None:
    """Train random orders of self-attention and feed-forward, beside Sandwich's (Press et al., 2019).

    All train on the same batches, update by update in turn; the interleaved order does with several seeds, which shows
    how far seeds alone go apart. OUT gets table.md, orders.csv, orders.png, results.json. Options of fairseq's task and
    model may follow. Stop it at any time; rerun to resume.

    \b
    lazyformer search orders data results/orders --task masked-lm --arch bert_base --encoder-embed-dim 192 \\
      --encoder-ffn-embed-dim 768 --encoder-attention-heads 6 --batch-size 8
    """
    refuse_missing_folders(data)
    from lazyformer_fairseq.experiments.search.fairseq_model import parse
    from lazyformer_fairseq.experiments.search.orders import run_orders
    from lazyformer_fairseq.measure.costs.machine import device_named

    parse(data, given["task"], given["arch"], settings.seed, given["fairseq_options"])
    recipe = Recipe(str(Path(data).absolute()), device=device_named(device), seeds=(settings.seed,), **given)
    with stoppable():
        table = run_orders(settings, recipe, out)
    click.echo(f"\n{table}\n\nFiles: {out}")


@search.command()
@click.argument("checkpoint", type=ExistingPath())
@click.argument("text", type=ExistingPath())
@OUT
@takes(CompressSettings, into="")
@LATENCIES
def compress(
    checkpoint: Path, text: Path, out: Path, candidates: Sequence[str], latencies: Optional[Path], **given: Any
) -> None:
    """Find patterns for a trained masked-LM encoder that are faster and lose least, without training.

    CHECKPOINT is a file, or a folder of checkpoints. TEXT is held-out text: a file, or what `lazyformer corpus` wrote,
    whose split valid is read. Each change of a sublayer is scored on it; for each budget of latency, dynamic
    programming chooses the changes with the least sum. The best are measured, and as many random patterns beside them.
    OUT gets the report and, for each budget, a model that starts from the weights, as `lazyformer import` writes it,
    for `lazyformer continue` to train. Stop it at any time; rerun to go on. More in docs/search_from_checkpoint.md.

    \b
    lazyformer search compress checkpoints/bert_base data results/faster --budgets 0.6,0.8
    """
    from lazyformer_fairseq.experiments.search.compress.choices import Choices, default_candidates
    from lazyformer_fairseq.experiments.search.compress.choices import read_candidates as read
    from lazyformer_fairseq.experiments.search.compress.report import budgets_table
    from lazyformer_fairseq.experiments.search.compress.run import load_original, run_compress
    from lazyformer_fairseq.experiments.search.latency import read_price_list
    from lazyformer_fairseq.storage.hashes import sha256_of

    original = load_original(checkpoint)
    cfg, old_plan = original.trained.cfg, original.trained.plan
    latency_tokens = given.pop("latency_tokens") or cfg.max_positions
    if latency_tokens > cfg.max_positions:
        raise UserError(f"--latency-tokens {latency_tokens}: the model reads {cfg.max_positions} at most")
    found = read(candidates) if candidates else default_candidates(old_plan, cfg.max_positions)
    choices = Choices.of(old_plan, found)
    if all(len(options) == 1 for options in choices.options):
        raise UserError(
            f"--candidates {','.join(candidates)}: no sublayer of {cfg.sublayer_pattern} becomes any of them"
        )
    settings = CompressSettings(
        checkpoint=str(checkpoint.absolute()),
        weights=sha256_of(checkpoint_at(checkpoint)),
        text=str(text.absolute()),
        candidates=tuple(each.text for each in found),
        prices=dict(read_price_list(latencies, list(choices.sublayers))) if latencies else None,
        latency_tokens=latency_tokens,
        **given,
    )
    result = run_compress(settings, replace(original, latency_tokens=latency_tokens), out)
    click.echo(f"\n{budgets_table(result)}\n\nFiles: {out}")
