"""The command ``lazyformer search --from CHECKPOINT``."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

import click

from lazyformer_fairseq.arguments import ExistingPath, divided, patterns_apart
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.warm_start.options import heads_option

FROM = "--from"
POSITIVE = click.IntRange(min=1)


def _shares(ctx: click.Context, option: click.Parameter, values: tuple[str, ...]) -> tuple[float, ...]:
    """Callback: shares of the original's latency, above 0 and below 1, each once."""
    found = []
    for word in divided(ctx, option, values):
        try:
            share = float(word)
        except ValueError:
            raise click.BadParameter(f"{word!r} is no number") from None
        if not 0 < share < 1:
            raise click.BadParameter(f"{word}: a share of the model's latency is above 0 and below 1")
        found.append(share)
    return tuple(dict.fromkeys(found))


class OrFromCheckpoint(click.Command):
    """A command that gives way to :func:`search_from_checkpoint` where ``--from`` is among the words."""

    def make_context(self, info_name: Optional[str], args: list[str], *rest: Any, **extra: Any) -> click.Context:
        if any(word == FROM or word.startswith(f"{FROM}=") for word in args):
            return search_from_checkpoint.make_context(f"{info_name} {FROM}", args, *rest, **extra)
        return super().make_context(info_name, args, *rest, **extra)


@click.command("search --from")
@click.argument("text", metavar="TEXT", type=ExistingPath())
@click.argument("out", type=click.Path(path_type=Path))
@click.option(FROM, "checkpoint", required=True, type=ExistingPath(), help="A masked-LM encoder, or its folder.")
@click.option("--budgets", multiple=True, default=("0.5,0.6,0.7,0.8,0.9",), callback=_shares,
              help="Shares of the model's latency.")  # fmt: skip
@click.option("--candidates", multiple=True, callback=patterns_apart,
              help="What a sublayer may become, as in a pattern, and identity.  [default: every kind that takes its "
              "weights, windows of a sixteenth, an eighth and a quarter of the longest input, identity]")  # fmt: skip
@click.option("--tokens", type=POSITIVE, default=32_768, help="Of TEXT, that losses are measured on.")
@click.option("--reach", type=POSITIVE, default=4, help="An l or k may read from so many s below, the nearest first.")
@click.option("--top", type=POSITIVE, default=4, help="Patterns of each budget that are measured in a round.")
@click.option("--rounds", type=POSITIVE, default=2,
              help="From the second on, the changes of the best patterns are scored where they stand.")  # fmt: skip
@click.option("--control", type=click.IntRange(min=0),
              help="Random patterns of each budget.  [default: in all as many as the search measures]")  # fmt: skip
@heads_option
@click.option("--latencies", type=click.Path(path_type=Path, exists=True, dir_okay=False),
              help='JSON of milliseconds by kind, {"s": 1.2, "f": 0.7}.  [default: measured here]')  # fmt: skip
@click.option("--latency-tokens", type=POSITIVE, help="Of a sequence.  [default: the longest the model reads]")
@click.option("--seed", default=1, help="Of random patterns, and of weights that start fresh.")
def search_from_checkpoint(
    text: Path, out: Path, checkpoint: Path, candidates: Sequence[str], latencies: Optional[Path], **given: Any
) -> None:
    """Find patterns for a trained masked-LM encoder that are faster and lose least, without training.

    TEXT is held-out text: a file, or what `lazyformer corpus` wrote, whose split valid is read. Each change of a
    sublayer is scored on it; for each budget of latency, dynamic programming chooses the changes with the least sum.
    The best are measured, and as many random patterns beside them. OUT gets the report and, for each budget, a model
    that starts from the weights, as `lazyformer import` writes it, for `lazyformer continue` to train. Stop it at any
    time; rerun to go on. More in docs/search_from_checkpoint.md.

    \b
    lazyformer search --from checkpoints/bert_base data results/faster --budgets 0.6,0.8
    """
    from lazyformer_fairseq.arguments import checkpoint_at
    from lazyformer_fairseq.experiments.search.from_checkpoint.choices import (
        Choices,
        default_candidates,
        read_candidates,
    )
    from lazyformer_fairseq.experiments.search.from_checkpoint.latency import priced
    from lazyformer_fairseq.experiments.search.from_checkpoint.report import budgets_table
    from lazyformer_fairseq.experiments.search.from_checkpoint.run import Original, run_from_checkpoint
    from lazyformer_fairseq.experiments.search.from_checkpoint.settings import FromCheckpoint, load_trained
    from lazyformer_fairseq.experiments.search.price import read_price_list
    from lazyformer_fairseq.storage.hashes import sha256_of

    original = Original(*load_trained(checkpoint))
    cfg, plan = original.trained.cfg, original.trained.plan
    latency_tokens = given.pop("latency_tokens") or cfg.max_positions
    if latency_tokens > cfg.max_positions:
        raise UserError(f"--latency-tokens {latency_tokens}: the model reads {cfg.max_positions} at most")
    found = read_candidates(candidates) if candidates else default_candidates(plan, cfg.max_positions)
    choices = Choices.of(plan, found)
    if all(len(options) == 1 for options in choices.options):
        raise UserError(
            f"--candidates {','.join(candidates)}: no sublayer of {cfg.sublayer_pattern} becomes any of them"
        )
    settings = FromCheckpoint(
        checkpoint=str(checkpoint.absolute()),
        weights=sha256_of(checkpoint_at(checkpoint)),
        text=str(text.absolute()),
        candidates=tuple(each.text for each in found),
        prices=dict(read_price_list(latencies, list(priced(choices)))) if latencies else None,
        latency_tokens=latency_tokens,
        **given,
    )
    result = run_from_checkpoint(settings, original, out)
    click.echo(f"\n{budgets_table(result)}\n\nFiles: {out}")
