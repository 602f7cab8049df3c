"""The command ``lazyformer search``: one pattern as in PAR's section 2, or a front by any method."""

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Optional

import click

from lazyformer_fairseq.arguments import numbers, refuse_missing_folders
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.search.from_checkpoint.commands import OrFromCheckpoint
from lazyformer_fairseq.experiments.search.front.settings import FrontSettings, TrainSettings
from lazyformer_fairseq.experiments.search.methods import METHODS, describe_methods
from lazyformer_fairseq.experiments.search.orders.commands import OrOrders
from lazyformer_fairseq.experiments.search.settings import Schedule, SearchSettings, choose_baseline, read_candidates
from lazyformer_fairseq.patterns.grammar import plan
from lazyformer_fairseq.patterns.kinds import describe_letters

DEFAULTS = {field.name: field.default for kind in (Schedule, SearchSettings) for field in fields(kind)}
FRONT = {field.name: field.default for field in fields(FrontSettings)}
TRAIN = {field.name: field.default for field in fields(TrainSettings)}
FRONTS_PRICE = 1.0  # of latency, nats, unless the user gives another
POSITIVE = click.IntRange(min=1)
ABOVE_0 = click.FloatRange(min=0, min_open=True)
FROM_0 = click.FloatRange(min=0)
WHOLE_FROM_0 = click.IntRange(min=0)


def setting(name: str, help: str, kind: Any = ABOVE_0) -> Callable:
    """An option of a field of the settings, with its default."""
    return click.option(f"--{name.replace('_', '-')}", type=kind, default=DEFAULTS.get(name), help=help)


def front_setting(name: str, help: str, kind: Any) -> Callable:
    """An option of a front, None where it is not given."""
    default = FRONT[name]
    shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
    return click.option(f"--{name.replace('_', '-')}", type=kind, help=f"{help}  [default: {shown}]")


class SearchCommand(OrOrders, OrFromCheckpoint):
    """One pattern or a front, unless the words say orders or --from."""


@click.command(cls=SearchCommand, context_settings={"ignore_unknown_options": True})
@click.argument("data")
@click.argument("out", type=click.Path(path_type=Path))
@click.argument("fairseq_options", nargs=-1, type=click.UNPROCESSED)
@click.option("--task", type=click.Choice(["masked-lm", "language-model"]), required=True, help="What DATA is for.")
@click.option("--arch", required=True, help="Gives sizes, dropout and norm position; its pattern gives way.")
@click.option("--sublayers", type=int, help="Layers to search.  [default: as many as the baseline or ARCH has]")
@click.option("--baseline-pattern", help="What is compared with; of as many sublayers.  [default: sf, half as often]")
@click.option("--candidates", default=",".join(DEFAULTS["candidates"]),
              help=f"What a layer chooses from: {describe_letters()}; settings in brackets.")  # fmt: skip
@click.option("--method", type=click.Choice(list(METHODS)), default="gradient", help=f"{describe_methods()}.")
@click.option("--budgets", metavar="SHARE,...", help="A front: a pattern for each of these shares of the baseline's "
              f"latency.  [default: {','.join(map(str, FRONT['budgets']))}; with --method gradient none, one pattern "
              "instead]")  # fmt: skip
@front_setting("evaluations", "Of a front: patterns that are judged with inherited weights.", POSITIVE)
@front_setting("judged_batches", "Of a front: batches of held-apart data that judge a pattern.", POSITIVE)
@front_setting("check_patterns", "Of a front: patterns spread over the space whose latency is predicted and measured; "
               "0 for none.", WHOLE_FROM_0)  # fmt: skip
@click.option("--control/--no-control", default=None,
              help="Of a front: random search of the same cost beside the method.  [default: --control]")  # fmt: skip
@click.option("--train-updates", type=WHOLE_FROM_0, default=TRAIN["updates"],
              help="Of a front: updates from scratch of each pattern found, and of the control's.")  # fmt: skip
@click.option("--train-seeds", multiple=True, callback=numbers(int), default=TRAIN["seeds"], metavar="N,N,...",
              type=str, help="That train each pattern.")  # fmt: skip
@click.option("--train-lr", type=ABOVE_0, default=TRAIN["rate"], help="Adam's highest learning rate then.")
@click.option("--train-patterns", type=WHOLE_FROM_0, default=TRAIN["patterns"],
              help="Of those whose latency is checked: trained too, to compare with inherited losses.")  # fmt: skip
@setting("batch_size", "Sequences, or streams of text, an update.", POSITIVE)
@setting("architecture_share", "Share of the training data that is held apart for the architecture.",
         click.FloatRange(0, 1, min_open=True, max_open=True))  # fmt: skip
@setting("constant_updates", "Updates of weights alone, before the architecture's first stage.", WHOLE_FROM_0)
@setting("max_updates", "Updates of weights and architecture together; of a front: its cost with all evaluations, in "
         "updates of the baseline, by FLOPs.", POSITIVE)  # fmt: skip
@setting("unchanged_share", "The pattern is found when it has not changed for so many architecture stages.")
@setting("weights_lr", "LAMB's learning rate.")
@setting("weights_decay", "LAMB's weight decay.", FROM_0)
@setting("clip_norm", "Longest gradient of the weights; 0 for any.", FROM_0)
@setting("architecture_lr", "Adam's learning rate.")
@setting("architecture_decay", "Adam's weight decay.", FROM_0)
@setting("temperature", "Of the Gumbel-softmax, until the architecture learns.")
@setting("final_temperature", "At the last update; exponential decay from --constant-updates on.")
@click.option("--latency-price", type=FROM_0, help="Nats a prediction that the architecture pays for one baseline's "
              f"latency.  [default: {DEFAULTS['latency_price']}; of a front {FRONTS_PRICE}]")  # fmt: skip
@setting("latency_budget", "Share of the baseline's latency that is free.", FROM_0)
@click.option("--latencies", type=click.Path(path_type=Path, exists=True, dir_okay=False),
              help='JSON of milliseconds by kind, {"s": 1.2, "f": 0.7}.  [default: measured here]')  # fmt: skip
@setting("latency_tokens", "Tokens that latency is measured with.  [default: the training's]", POSITIVE)
@setting("latency_memory", "Tokens remembered then.  [default: the model's --mem-len]", WHOLE_FROM_0)
@setting("seed", "Of weights, data and choices.", int)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="[default: cuda where there is a GPU]")
@setting("log_interval", "Updates between lines of the history.", POSITIVE)
@click.option("--save-interval", type=POSITIVE, default=500, help="Updates between states that a search can resume.")
@click.option("--time-only", is_flag=True, help="Search nothing; time the supernet's updates beside the baseline's.")
def search(**given: Any) -> None:
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
    from lazyformer_fairseq.experiments.search.measure import time_updates
    from lazyformer_fairseq.experiments.search.run import run_search

    out, save_interval, time_only = given.pop("out"), given.pop("save_interval"), given.pop("time_only")
    train = TrainSettings(*(given.pop(f"train_{name}") for name in ("updates", "patterns", "lr", "seeds")))
    front = _front(given)
    if train.updates and not front:
        raise UserError("--train-updates: of a front; give --budgets, or another --method than gradient, too")
    if given["latency_price"] is None:
        given["latency_price"] = FRONTS_PRICE if front else DEFAULTS["latency_price"]
    if front and not front.trains_mixtures:
        given["constant_updates"] = 0  # they have no architecture that would wait
    settings = _settings(**given)
    if time_only:
        click.echo(time_updates(settings, out))
        return
    if front:
        click.echo(_run_front(settings, front, train, out, save_interval))
        return
    click.echo(_summary(run_search(settings, out, save_interval), out))


def _front(given: dict[str, Any]) -> Optional[FrontSettings]:
    """Takes a front's options out of the others; None where one pattern is searched as in the paper.

    Raises:
        UserError: options that do not fit together.
    """
    method, budgets = given.pop("method"), given.pop("budgets")
    of_front = {name: given.pop(name) for name in ("evaluations", "judged_batches", "check_patterns", "control")}
    chosen = {name: value for name, value in of_front.items() if value is not None}
    if budgets is None and method == "gradient":
        if chosen:
            options = ", ".join(f"--{name.replace('_', '-')}" for name in chosen)
            raise UserError(f"{options}: of a front; give --budgets, or another --method than gradient, too")
        return None
    if given["latency_budget"]:
        raise UserError("--latency-budget: of one pattern; a front has --budgets")
    if budgets is not None:
        chosen["budgets"] = _shares(budgets)
    return FrontSettings(method, **chosen)


def _shares(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"--budgets {text}: give shares of the baseline's latency, such as 0.5,0.75,1.0") from None


def _run_front(
    settings: SearchSettings, front: FrontSettings, train: TrainSettings, out: Path, save_interval: int
) -> str:
    from lazyformer_fairseq.experiments.search.front.report import report
    from lazyformer_fairseq.experiments.search.front.run import run_front, train_found

    result = run_front(settings, front, out, save_interval)
    parts = [report(result)]
    if train.updates:
        parts.append(train_found(settings, train, result, out))
    return "\n" + "\n\n".join([*parts, f"Files: {out}"])


def _settings(
    data: str,
    task: str,
    arch: str,
    sublayers: Optional[int],
    baseline_pattern: Optional[str],
    candidates: str,
    latencies: Optional[Path],
    device: Optional[str],
    **rest: Any,
) -> SearchSettings:
    """Raises UserError if the options do not fit together."""
    from lazyformer_fairseq.experiments.search.price import read_price_list
    from lazyformer_fairseq.experiments.search.supernet import fairseq_model
    from lazyformer_fairseq.measure.costs.machine import device_named

    names, device = read_candidates(candidates), device_named(device)
    cfg = fairseq_model.parse(data, task, arch, rest["seed"], rest["fairseq_options"])
    schedule = Schedule(**{field.name: rest.pop(field.name) for field in fields(Schedule)})
    baseline = choose_baseline(baseline_pattern, sublayers, len(plan(cfg.model.sublayer_pattern)))
    settings = SearchSettings(str(Path(data).absolute()), task, arch, baseline, names, schedule, device=device, **rest)
    return replace(settings, prices=read_price_list(latencies, settings.priced)) if latencies else settings


def _summary(result: dict[str, Any], out: Path) -> str:
    from lazyformer_fairseq.experiments.search.report.comparison import table

    how = "unchanged for long enough" if result["converged"] else "as far as --max-updates went"
    if not result["pattern"]:
        found = "Every layer prefers identity: no sublayer is left. Give a lower --latency-price, or search longer."
    else:
        found = f"Found after {result['updates']} updates ({how}):\n\n  --sublayer-pattern '{result['pattern']}'"
    return f"\n{found}\n\n{table(result['table'])}\n\nFiles: {out}"
