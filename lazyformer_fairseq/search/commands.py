"""The command ``lazyformer search``."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Optional

import click

from lazyformer_fairseq.existing_paths import refuse_missing_folders
from lazyformer_fairseq.extras import refuse_without_extra
from lazyformer_fairseq.patterns.kinds import describe_letters
from lazyformer_fairseq.search.schedule import Schedule

DEFAULT = Schedule()
POSITIVE = click.IntRange(min=1)
ABOVE_0 = click.FloatRange(min=0, min_open=True)
NOT_NEGATIVE = click.FloatRange(min=0)


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("data")
@click.argument("out", type=click.Path(path_type=Path))
@click.argument("fairseq_options", nargs=-1, type=click.UNPROCESSED)
@click.option("--task", type=click.Choice(["masked-lm", "language-model"]), required=True, help="What DATA is for.")
@click.option("--arch", required=True, help="Gives sizes, dropout and norm position; its pattern gives way.")
@click.option("--sublayers", type=int, help="Layers to search.  [default: as many as the baseline or ARCH has]")
@click.option("--baseline-pattern", help="What is compared with; of as many sublayers.  [default: sf, half as often]")
@click.option(
    "--candidates",
    default="s,f,identity",
    help=f"What a layer chooses from: {describe_letters()}; settings in brackets.",
)
@click.option("--batch-size", type=POSITIVE, default=128, help="Sequences, or streams of text, an update.")
@click.option("--architecture-share", type=click.FloatRange(0, 1, min_open=True, max_open=True), default=0.2,
              help="Share of the training data that is held apart for the architecture.")  # fmt: skip
@click.option("--constant-updates", type=click.IntRange(min=0), default=DEFAULT.constant_updates,
              help="Updates of weights alone, before the architecture's first stage.")  # fmt: skip
@click.option(
    "--max-updates", type=POSITIVE, default=DEFAULT.max_updates, help="Updates of weights and architecture together."
)
@click.option("--unchanged-share", type=ABOVE_0, default=DEFAULT.unchanged_share,
              help="The pattern is found when it has not changed for so many architecture stages.")  # fmt: skip
@click.option("--weights-lr", type=ABOVE_0, default=1e-2, help="LAMB's learning rate.")
@click.option("--weights-decay", type=NOT_NEGATIVE, default=1e-4, help="LAMB's weight decay.")
@click.option("--clip-norm", type=NOT_NEGATIVE, default=0.25, help="Longest gradient of the weights; 0 for any.")
@click.option("--architecture-lr", type=ABOVE_0, default=1e-2, help="Adam's learning rate.")
@click.option("--architecture-decay", type=NOT_NEGATIVE, default=5e-4, help="Adam's weight decay.")
@click.option(
    "--temperature",
    type=ABOVE_0,
    default=DEFAULT.temperature,
    help="Of the Gumbel-softmax, until the architecture learns.",
)
@click.option("--final-temperature", type=ABOVE_0, default=DEFAULT.final_temperature,
              help="At the last update; exponential decay from --constant-updates on.")  # fmt: skip
@click.option(
    "--latency-price",
    type=NOT_NEGATIVE,
    default=0.0,
    help="Nats a prediction that the architecture pays for one baseline's latency.",
)
@click.option("--latency-budget", type=NOT_NEGATIVE, default=0.0, help="Share of the baseline's latency that is free.")
@click.option("--latencies", type=click.Path(path_type=Path, exists=True, dir_okay=False),
              help='JSON of milliseconds by kind, {"s": 1.2, "f": 0.7}.  [default: measured here]')  # fmt: skip
@click.option(
    "--latency-tokens", type=POSITIVE, help="Tokens that latency is measured with.  [default: the training's]"
)
@click.option(
    "--latency-memory", type=click.IntRange(min=0), help="Tokens remembered then.  [default: the model's --mem-len]"
)
@click.option("--seed", type=int, default=1, help="Of weights, data and choices.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="[default: cuda where there is a GPU]")
@click.option("--log-interval", type=POSITIVE, default=100, help="Updates between lines of the history.")
@click.option("--save-interval", type=POSITIVE, default=500, help="Updates between states that a search can resume.")
@click.option("--time-only", is_flag=True, help="Search nothing; time the supernet's updates beside the baseline's.")
def search(**given: Any) -> None:
    """Search a sublayer pattern by gradient descent (PAR Transformer, section 2).

    Every layer becomes a mixture of self-attention, feed-forward and identity; what the mixtures come to prefer is
    the pattern. DATA is what pre-training reads (of a corpus in several shards, the first alone), OUT the folder of
    the search. Options of fairseq's task and model, such as --tokens-per-sample or --encoder-embed-dim, may follow.
    Stop it at any time; rerun to resume. More in docs/search.md.

    \b
    lazyformer search data/wikitext-2 results/search --task language-model --arch transformer_xl_base \\
      --adaptive-softmax-cutoff '' --tgt-len 192 --mem-len 192
    lazyformer search data results/search_bert --task masked-lm --arch bert_base \\
      --candidates s,f,l,identity --latency-price 0.5 --latency-budget 0.7
    """
    refuse_missing_folders(given["data"])
    refuse_without_extra("search", "lazyformer search")
    from lazyformer_fairseq.search.latency.step_cost import time_updates
    from lazyformer_fairseq.search.run import run_search

    out, save_interval, time_only = given.pop("out"), given.pop("save_interval"), given.pop("time_only")
    settings = _settings(**given)
    if time_only:
        click.echo(time_updates(settings, out))
        return
    click.echo(_summary(run_search(settings, out, save_interval), out))


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
):
    """Raises UserError if the options do not fit together."""
    import torch

    from lazyformer_fairseq.errors import UserError
    from lazyformer_fairseq.search.latency.price import read_price_list
    from lazyformer_fairseq.search.settings import SearchSettings, choose_baseline
    from lazyformer_fairseq.search.supernet import fairseq_model
    from lazyformer_fairseq.search.supernet.choices import read_candidates

    names = read_candidates(candidates)
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch finds no GPU here")
    cfg = fairseq_model.parse(data, task, arch, rest["seed"], rest["fairseq_options"])
    schedule = Schedule(**{name: rest.pop(name) for name in Schedule.__dataclass_fields__})
    baseline = choose_baseline(baseline_pattern, sublayers, fairseq_model.sublayers_of(cfg))
    settings = SearchSettings(
        data=str(Path(data).absolute()),
        task=task,
        arch=arch,
        baseline=baseline,
        candidates=names,
        schedule=schedule,
        device=device or ("cuda" if torch.cuda.is_available() else "cpu"),
        **rest,
    )
    prices = read_price_list(latencies, settings.priced).as_json() if latencies else None
    return replace(settings, prices=prices)


def _summary(result: dict[str, Any], out: Path) -> str:
    from lazyformer_fairseq.search.report.comparison import markdown_table

    how = "unchanged for long enough" if result["converged"] else "as far as --max-updates went"
    if not result["pattern"]:
        found = "Every layer prefers identity: no sublayer is left. Give a lower --latency-price, or search longer."
    else:
        found = f"Found after {result['updates']} updates ({how}):\n\n  --sublayer-pattern '{result['pattern']}'"
    return f"\n{found}\n\n{markdown_table(result['table'])}\n\nFiles: {out}"
