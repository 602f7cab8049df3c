"""The commands ``lazyformer search`` and ``lazyformer search compress``."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional

import click

from lazyformer_fairseq.arguments import ExistingPath, checkpoint_at, refuse_missing_folders
from lazyformer_fairseq.child_process import exit_on_interrupt
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.executors.options import ExecutorOptions
from lazyformer_fairseq.experiments.search.settings import (
    TASKS,
    CompressSettings,
    SearchSettings,
    choose_baseline,
    read_candidates,
)
from lazyformer_fairseq.options import Choice, Group, with_options_from
from lazyformer_fairseq.patterns.grammar import plan

OUT = click.argument("out", type=click.Path(path_type=Path))
LATENCIES = click.option(
    "--latencies",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help='JSON file with milliseconds per sublayer, such as {"s": 1.2, "f": 0.7}.  [default: measured on this machine]',
)


@click.group(cls=Group, default="run")
def search() -> None:
    """Search for sublayer patterns: a single one, one per latency budget, or faster ones for a trained model."""


@search.command(context_settings={"ignore_unknown_options": True})
@click.argument("data")
@OUT
@click.argument("fairseq_options", nargs=-1, type=click.UNPROCESSED)
@click.option("--task", type=Choice(TASKS), required=True, help="Task to train the models on.")
@click.option("--arch", required=True, help="Named model that determines sizes, dropout and the placement of norms.")
@click.option(
    "--device",
    type=Choice(["cpu", "cuda"]),
    help="Device to train and measure on.  [default: cuda if there is a GPU]",
)
@click.option(
    "--sublayers",
    type=click.IntRange(max=10_000),
    help="Number of layers to search.  [default: as in the baseline or ARCH]",
)
@click.option(
    "--baseline-pattern",
    help="Baseline pattern; it must have as many sublayers as there are layers to search.  [default: sf, repeated]",
)
@with_options_from(SearchSettings, into="")
@with_options_from(ExecutorOptions, into="place")
@LATENCIES
def run(
    data: str,
    out: Path,
    device: Optional[str],
    sublayers: Optional[int],
    baseline_pattern: Optional[str],
    candidates: Sequence[str],
    latencies: Optional[Path],
    *,
    place: ExecutorOptions,
    **given: Any,
) -> None:
    """Search for a sublayer pattern by gradient descent (PAR Transformer, section 2), or for one per latency budget.

    DATA is the pre-training data, and OUT is the search folder. With --budgets, the search finds a front: one pattern
    for each of these fractions of the baseline's latency. It trains patterns from scratch and stops the worse ones
    early; a random search of equal cost runs for comparison. Without --budgets, the search learns one pattern by
    gradient descent in a supernet, which contains the candidates of all layers and reads only the first shard. Options
    of fairseq's task and model, such as --tokens-per-sample or --encoder-embed-dim, may follow. You can stop the
    command at any time and rerun it to resume. See docs/search.md for details.

    \b
    lazyformer search data/wikitext-2 results/search --task language-model --arch transformer_xl_base \\
      --adaptive-softmax-cutoff '' --tgt-len 192 --mem-len 192
    lazyformer search data results/front --task masked-lm --arch bert_base --candidates s,f,l,identity \\
      --budgets 0.5,0.6,0.7,0.8,0.9,1.0
    """
    refuse_missing_folders(data)
    from lazyformer_fairseq.evaluation.costs.machine import device_named
    from lazyformer_fairseq.experiments.search.latency import read_price_list
    from lazyformer_fairseq.experiments.search.material import merge_options
    from lazyformer_fairseq.experiments.search.report import report_of
    from lazyformer_fairseq.experiments.search.run import run_search

    names = read_candidates(tuple(candidates))
    options, _ = merge_options(given["task"], given["arch"], given["fairseq_options"], given["recipe"])
    settings = SearchSettings(
        data=data,
        baseline=choose_baseline(baseline_pattern, sublayers, len(plan(options.sublayer_pattern))),
        candidates=names,
        device=device_named(device),
        **given,
    )
    if latencies:
        settings = replace(settings, prices=read_price_list(latencies, settings.priced))
    with exit_on_interrupt():
        click.echo(f"\n{report_of(run_search(settings, out, place))}\n\nFiles: {out}")


@search.command()
@click.argument("checkpoint", type=ExistingPath())
@click.argument("text", type=ExistingPath())
@OUT
@with_options_from(CompressSettings, into="")
@LATENCIES
def compress(
    checkpoint: Path,
    text: Path,
    out: Path,
    candidates: Sequence[str],
    latencies: Optional[Path],
    **given: Any,
) -> None:
    """Find, without any training, the faster patterns that increase a trained masked-LM encoder's loss the least.

    CHECKPOINT is a file or a folder of checkpoints. TEXT is held-out text: a file, or a folder written by `lazyformer
    corpus`, whose valid split is used. The command scores every possible change of a single sublayer by how much it
    increases the loss on this text. For each latency budget, dynamic programming selects the changes with the smallest
    total score, and the best patterns are then measured as a whole. The command writes a report and one model per
    budget to OUT. Each model starts from the weights of CHECKPOINT and is stored in the format of `lazyformer import`,
    so `lazyformer pretrain` can continue to train it. You can stop the command at any time and rerun it to resume. See
    docs/search.md for details.

    \b
    lazyformer search compress checkpoints/bert_base data results/faster --budgets 0.6,0.8
    """
    from lazyformer_fairseq.experiments.search.compress import candidates as of_compress
    from lazyformer_fairseq.experiments.search.compress.report import budgets_table
    from lazyformer_fairseq.experiments.search.compress.run import load_original, run_compress
    from lazyformer_fairseq.experiments.search.latency import read_price_list
    from lazyformer_fairseq.storage.json_files import sha256_of

    original = load_original(checkpoint)
    cfg = original.trained.cfg
    old_plan = original.trained.plan
    latency_tokens = given.pop("latency_tokens") or cfg.max_positions
    if latency_tokens > cfg.max_positions:
        raise UserError(f"--latency-tokens {latency_tokens}: the model reads at most {cfg.max_positions}; use fewer")
    if candidates:
        found = of_compress.read_encoder_candidates(candidates)
    else:
        found = of_compress.default_candidates(old_plan, cfg.max_positions)
    by_place = of_compress.Candidates.of(old_plan, found)
    if all(len(options) == 1 for options in by_place.options):
        raise UserError(
            f"--candidates {','.join(candidates)}: none of them can replace a sublayer of {cfg.sublayer_pattern}; try "
            "others, such as identity"
        )
    prices = None
    if latencies:
        prices = dict(read_price_list(latencies, list(by_place.sublayers)))
    settings = CompressSettings(
        checkpoint=str(checkpoint.absolute()),
        weights=sha256_of(checkpoint_at(checkpoint)),
        text=str(text.absolute()),
        candidates=tuple(each.text for each in found),
        prices=prices,
        latency_tokens=latency_tokens,
        **given,
    )
    with exit_on_interrupt():
        result = run_compress(settings, replace(original, latency_tokens=latency_tokens), out)
        click.echo(f"\n{budgets_table(result)}\n\nFiles: {out}")
