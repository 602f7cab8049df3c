"""The command ``lazyformer search orders``."""

import signal
import sys
from pathlib import Path
from typing import Any, Optional

import click

from lazyformer_fairseq.arguments import numbers, refuse_missing_folders

POSITIVE = click.IntRange(min=1)
WHOLE_FROM_0 = click.IntRange(min=0)


class OrOrders(click.Command):
    """A command that gives way to :func:`orders` where that is its first word."""

    def make_context(self, info_name: Optional[str], args: list[str], *rest: Any, **extra: Any) -> click.Context:
        if args[:1] == [orders.name]:
            return orders.make_context(f"{info_name} {orders.name}", args[1:], *rest, **extra)
        return super().make_context(info_name, args, *rest, **extra)


@click.command("orders", context_settings={"ignore_unknown_options": True, "show_default": True})
@click.argument("data")
@click.argument("out", type=click.Path(path_type=Path))
@click.argument("fairseq_options", nargs=-1, type=click.UNPROCESSED)
@click.option("--task", type=click.Choice(["masked-lm", "language-model"]), required=True, help="What DATA is for.")
@click.option("--arch", required=True, help="Gives sizes, dropout and norm position; its pattern gives way.")
@click.option("--sublayers", type=POSITIVE, default=16, help="Of each order, half of them s and half f.")
@click.option("--orders", type=POSITIVE, default=20, help="Random orders of as many s as f.")
@click.option(
    "--balances", type=WHOLE_FROM_0, default=0, help="Random orders of equal parameters, whatever the numbers."
)
@click.option("--sandwich", multiple=True, type=str, callback=numbers(int), default=(2, 4, 6), metavar="K,K,...",
              help="Sandwich's orders beside them: K times s, the rest in turn, K times f.")  # fmt: skip
@click.option("--baseline-seeds", type=POSITIVE, default=5, help="Trainings of the interleaved order.")
@click.option("--updates", type=POSITIVE, default=2000, help="Of each training.")
@click.option("--lr", "rate", type=click.FloatRange(0, min_open=True), default=1e-3, help="Adam's highest rate.")
@click.option("--batch-size", type=POSITIVE, default=32, help="Sequences, or streams of text, an update.")
@click.option("--valid-tokens", type=POSITIVE, default=32_768, help="Of the validation split, its first.")
@click.option("--seed", type=int, default=1, help="Of what is drawn, and of the trainings.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="[default: cuda where there is a GPU]")
def orders(data: str, out: Path, device: Optional[str], **given: Any) -> None:
    """Train random orders of self-attention and feed-forward, beside Sandwich's (Press et al., 2019).

    All train on the same batches, update by update in turn; the interleaved order does with several seeds, which shows
    how far seeds alone go apart. OUT gets table.md, orders.csv, orders.png, results.json. Options of fairseq's task and
    model may follow. Stop it at any time; rerun to resume.

    \b
    lazyformer search orders data results/orders --task masked-lm --arch bert_base --encoder-embed-dim 192 \\
      --encoder-ffn-embed-dim 768 --encoder-attention-heads 6 --batch-size 8
    """
    refuse_missing_folders(data)
    from lazyformer_fairseq.experiments.search.from_scratch import Recipe
    from lazyformer_fairseq.experiments.search.orders.run import OrdersSettings, run_orders
    from lazyformer_fairseq.experiments.search.supernet import fairseq_model
    from lazyformer_fairseq.measure.costs.machine import device_named

    names = ("sublayers", "orders", "balances", "sandwich", "baseline_seeds", "seed")
    settings = OrdersSettings(**{name: given.pop(name) for name in names})
    fairseq_model.parse(data, given["task"], given["arch"], settings.seed, given["fairseq_options"])
    recipe = Recipe(str(Path(data).absolute()), device=device_named(device), seeds=(settings.seed,), **given)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    try:
        table = run_orders(settings, recipe, out)
    except KeyboardInterrupt:
        click.echo("stopped; rerun to resume", err=True)
        sys.exit(130)
    click.echo(f"\n{table}\n\nFiles: {out}")
