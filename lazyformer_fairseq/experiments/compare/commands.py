"""The command ``lazyformer compare``."""

import re
import signal
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, Optional

import click

from lazyformer_fairseq.arguments import CommandWithSections, GroupWithDefault, OptionInSection, divided, numbers
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.compare.contestants import EXAMPLE
from lazyformer_fairseq.experiments.compare.recipes import RECIPES
from lazyformer_fairseq.experiments.compare.report.command import report, target_option
from lazyformer_fairseq.experiments.compare.settings import CompareSettings
from lazyformer_fairseq.experiments.compare.tasks.table import TASKS, Task, find_task

DEFAULTS = {field.name: field.default for field in fields(CompareSettings)}
POSITIVE, FROM_0 = click.IntRange(1), click.IntRange(0)
SECONDS = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600}


def duration(text: str) -> float:
    """Seconds of ``90s``, ``10min`` or ``1.5h``. Raises a UserError for what is none of these."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", text)
    if not found or found[2] not in SECONDS or not float(found[1]):
        raise UserError(f"{text!r} is no time; write for example 90s, 10min or 1.5h")
    return float(found[1]) * SECONDS[found[2]]


def _seconds(ctx: click.Context, option: click.Parameter, value: Optional[str]) -> Optional[float]:
    try:
        return None if value is None else duration(value)
    except UserError as error:
        raise click.BadParameter(str(error)) from None


def _shares(ctx: click.Context, option: click.Parameter, values: tuple[str, ...]) -> tuple[float, ...]:
    found = []
    for word in divided(ctx, option, values):
        try:
            found.append(float(word))
        except ValueError:
            raise click.BadParameter(f"{word!r} is no number") from None
        if not 0 < found[-1] <= 10 or found.count(found[-1]) > 1:
            raise click.BadParameter(f"{word} is out of range, or there twice")
    return tuple(found)


def _models(ctx: click.Context, option: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for value in values:
        name, equals, spec = (part.strip() for part in value.partition("="))
        if not equals or not name or not spec or not re.fullmatch(r"[\w.+-]+", name):
            raise click.BadParameter(f"{value!r} is no NAME=SPEC, such as {EXAMPLE}")
        if name in found:
            raise click.BadParameter(f"{name} is there twice")
        found[name] = spec
    return found


def _in(section: str) -> Callable:
    def option(*names: str, **how: Any) -> Callable:
        return click.option(*names, cls=OptionInSection, section=section, **how)

    return option


models, length, rates, sizes, text, where = map(
    _in, ("Models", "How long", "How they learn", "Sizes, of all models", "Validation", "Where")
)


def size(name: str, help_text: str, kind: Any = POSITIVE, flag: str = "", section: Callable = sizes) -> Callable:
    """An option of the tasks that have such a size, with each one's default."""
    having = [task for task in TASKS if name in task.sizes]
    values = {task.name: _shown(task.sizes[name]) for task in having}
    if len(having) < len(TASKS):
        default = f"{having[0].name} alone; default: {values[having[0].name]}"
    elif len(set(values.values())) == 1:
        default = f"default: {values[having[0].name]}"
    else:
        default = "default: " + ", ".join(f"{value} for {task}" for task, value in values.items())
    return section(flag or f"--{name.replace('_', '-')}", name, type=kind, help=f"{help_text}  [{default}]")


def _shown(value: Any) -> str:
    if value is None:
        return "as --tokens-per-sample"
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _cutoffs(ctx: click.Context, option: click.Parameter, value: Optional[str]) -> Optional[tuple[int, ...]]:
    return None if value is None else numbers(int)(ctx, option, (value,))


@click.group("compare", cls=GroupWithDefault, default="run")
def compare() -> None:
    """Train models side by side, equal in all that is not theirs, and report which gets how far in what time.

    `lazyformer compare DATA OUT` is `lazyformer compare run DATA OUT`; see `lazyformer compare run --help`.
    """


@compare.command(cls=CommandWithSections, context_settings={"max_content_width": 120})
@click.argument("data")
@click.argument("out", type=click.Path(path_type=Path))
@click.argument("fairseq_options", nargs=-1, type=click.UNPROCESSED, metavar="[-- OPTIONS OF FAIRSEQ-TRAIN]")
@models("--task", required=True, type=click.Choice([task.name for task in TASKS]), help="What they learn from DATA.")
@models(
    "--model",
    "specs",
    multiple=True,
    callback=_models,
    metavar="NAME=SPEC",
    help="A model; may be given several times.  [default: --presets]",
)
@models(
    "--presets",
    type=int,
    metavar="SUBLAYERS",
    help=f"The task's own models of so many sublayers, beside those of --model: "
    f"{'; '.join(f'{task.name} has {sorted(task.presets)}' for task in TASKS)}.",
)
@models("--baseline", metavar="NAME", help="What the others are compared with.  [default: the first]")
@models(
    "--equal-parameters",
    is_flag=True,
    help="The others get the feed-forward width, a multiple of 8, that brings them closest to the baseline's "
    "parameters without embeddings.",
)
@length(
    "--updates",
    type=POSITIVE,
    help="Of each model and seed, on the same batches.  [default: "
    f"{', '.join(f'{task.updates} for {task.name}' for task in TASKS if task.updates)}]",
)
@length(
    "--budget",
    callback=_seconds,
    metavar="TIME",
    help="In place of --updates: as many as each model makes in so much training, such as 90s or 10min, by a trial "
    f"before.  [default: {', '.join(f'{task.budget:g}s for {task.name}' for task in TASKS if task.budget)}]",
)
@length(
    "--shares",
    multiple=True,
    callback=_shares,
    metavar="X,X,...",
    help="The others train once for each of these shares of the baseline's seconds: NAME@X. A schedule belongs to "
    "a length, so that is how a time to the baseline's loss is found.",
)
@length(
    "--seeds",
    multiple=True,
    type=str,
    default=DEFAULTS["seeds"],
    callback=numbers(int),
    metavar="N,N,...",
    help="Each trains every model.",
)
@rates(
    "--rates",
    multiple=True,
    type=str,
    callback=numbers(float),
    metavar="R,R,...",
    help="Highest learning rate; of several every model tries each with the first seed, and its best one counts.  "
    "[default: one, the task's and the recipe's]",
)
@rates("--rate-updates", type=POSITIVE, help="Of a try.  [default: the full length]")
@rates(
    "--recipe",
    type=click.Choice(list(RECIPES)),
    default="adam",
    help="; ".join(f"{name}: {recipe.help}" for name, recipe in RECIPES.items()) + ".",
)
@rates(
    "--warmup-ratio",
    type=click.FloatRange(0, 1),
    help="Share of the updates until the highest rate.  [default: "
    f"{', '.join(f'{recipe.warmup_ratio:g} for {name}' for name, recipe in RECIPES.items())}]",
)
@size("embed_dim", "Embedding dimension.")
@size("ffn_embed_dim", "Width of the feed-forward sublayers.")
@size("heads", "Attention heads.")
@sizes("--post-norm", is_flag=True, help="LayerNorms stand behind sublayers.  [default: before them]")
@size("dropout", "On embeddings and sublayer outputs.", click.FloatRange(0, 1, max_open=True))
@size("batch_size", "Sequences, or streams of text, of an update.")
@size("tokens_per_sample", "Longest block.")
@size("max_positions", "Rows of the table of positions.")
@size("relative_position_buckets", "Of T5's relative positions, in models of ours; 0 for none.", FROM_0)
@size("tgt_len", "Tokens of a segment.")
@size("mem_len", "Tokens remembered.", FROM_0)
@sizes(
    "--adaptive-softmax-cutoff",
    "adaptive_softmax_cutoff",
    callback=_cutoffs,
    metavar="N,N,...",
    help="Ids that start a new band of words; '' for one band.  [language-model alone; default: 2000,10000]",
)
@text("--points", type=POSITIVE, default=DEFAULTS["points"], help="Of a curve; most stand early.")
@text(
    "--validation-tokens",
    type=POSITIVE,
    default=DEFAULTS["validation_tokens"],
    help="Of a point: the same text, and the same masks, for all models, seeds and points.",
)
@size("evaluation_tgt_len", "Tokens of a segment then, and in latency.", section=text)
@size("evaluation_mem_len", "Tokens remembered then, and in latency.", FROM_0, section=text)
@size("evaluation_batch_size", "Rows then; no influence on the result.", section=text)
@size("clamp_len", "Distances from here on count as this one; 0 for all as they are.", FROM_0, section=text)
@text(
    "--same-length",
    is_flag=True,
    default=None,
    help="Every query sees itself and as many tokens before it as the memory has.  [language-model alone]",
)
@where(
    "--in-turn/--alone",
    default=None,
    help="Update by update in turn in one process, or each in a process of its own, GPU by GPU.  [default: alone "
    "where there are several GPUs]",
)
@where("--workers", type=POSITIVE, help="Processes at a time with --alone.  [default: one per GPU, else one]")
@where("--device", type=click.Choice(["cpu", "cuda"]), help="[default: cuda where there is a GPU]")
@where(
    "--precision",
    type=click.Choice(["fp32", "bf16", "fp16"]),
    help="[default: on GPUs bf16 where all have it, else fp16; on a CPU fp32]",
)
@where("--threads", type=POSITIVE, help="Of torch on a CPU.  [default: torch's]")
@target_option
def run(out: Path, workers: Optional[int], target: Any, **given: Any) -> None:
    """Train models on DATA, equal in all that is not theirs, and report to OUT which gets how far in what time.

    DATA is what `lazyformer corpus` wrote (masked-lm) or `lazyformer lm prepare` (language-model). The models of a seed
    take turns, update by update, on the same batches under the same masks. The clock counts training alone.
    OUT gets results.json with curves, times, memory, versions and checksums; tables and pictures; and the trained
    models. Stop it at any time; rerun to resume. More in docs/compare.md.

    \b
    SPEC is a pattern, an arch of ours, fairseq:roberta_base or hf:bert; sizes of its own may follow:
      '(sff)x4 f'    'M2x3; ffn=448'    'bert_base; sizes=own'    'fairseq:roberta_base; layers=6'

    \b
    lazyformer compare data results/two --task masked-lm
    lazyformer compare data results/mine --task masked-lm --model 'bert=(sf)x6' --model 'mine=(sff)x4 f' \\
      --equal-parameters --rates 1e-3,2e-3,4e-3 --budget 10min --shares 1,0.8,0.7
    """
    settings = _settings(**given)  # before anything heavy is imported: a mistyped path is said at once
    from lazyformer_fairseq.experiments.compare.report.write import write_report
    from lazyformer_fairseq.experiments.compare.run import compare as compare_models

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    try:
        results = compare_models(settings, out, ["lazyformer", *sys.argv[1:]], workers)
    except KeyboardInterrupt:
        click.echo("stopped; rerun to resume", err=True)
        sys.exit(130)
    click.echo(f"\n{write_report(results, out, target)}\nwritten: {out}")


compare.add_command(report)


def _settings(
    task: str,
    data: str,
    specs: dict[str, str],
    presets: Optional[int],
    baseline: Optional[str],
    updates: Optional[int],
    budget: Optional[float],
    rates: tuple[float, ...],
    warmup_ratio: Optional[float],
    post_norm: bool,
    in_turn: Optional[bool],
    device: Optional[str],
    precision: Optional[str],
    recipe: str,
    **rest: Any,
) -> CompareSettings:
    """Raises UserError or UsageError where the options do not fit together."""
    row = find_task(task)
    _refuse_missing_data(row, data)
    if updates and budget:
        raise click.UsageError("give --updates or --budget, not both")
    chosen = _presets(row, presets, specs) | specs
    of_any_task = {name for each in TASKS for name in each.sizes}
    sizes = {name: rest.pop(name) for name in of_any_task}
    if foreign := sorted(name for name in of_any_task - row.sizes.keys() if sizes[name] is not None):
        raise click.UsageError(f"--{foreign[0].replace('_', '-')}: means nothing for --task {task}")
    from lazyformer_fairseq.devices.nvidia_smi import count_gpus
    from lazyformer_fairseq.devices.precision import precision_on
    from lazyformer_fairseq.measure.costs.machine import device_named

    device = device_named(device)
    return CompareSettings(
        task=task,
        data=data,
        models=chosen,
        baseline=baseline or next(iter(chosen)),
        sizes={name: default if sizes[name] is None else sizes[name] for name, default in row.sizes.items()},
        updates=None if budget else updates or row.updates,
        budget=budget or (None if updates else row.budget),
        rates=rates or (row.rates[recipe],),
        recipe=recipe,
        warmup_ratio=RECIPES[recipe].warmup_ratio if warmup_ratio is None else warmup_ratio,
        normalize_before=not post_norm,
        in_turn=(device == "cpu" or count_gpus() < 2) if in_turn is None else in_turn,
        device=device,
        precision=precision or precision_on(device),
        **rest,
    )


def _presets(row: Task, sublayers: Optional[int], specs: dict[str, str]) -> dict[str, str]:
    if sublayers is None:
        return {} if specs else dict(row.presets[min(row.presets)])
    if sublayers not in row.presets:
        raise click.UsageError(f"--presets {sublayers}: {row.name} has {', '.join(map(str, sorted(row.presets)))}")
    presets = dict(row.presets[sublayers])
    if taken := presets.keys() & specs.keys():
        raise click.UsageError(f"--model: {', '.join(sorted(taken))} is a model already; give another name")
    return presets


def _refuse_missing_data(row: Task, data: str) -> None:
    for folder in map(Path, data.split(":")):
        if not (folder / row.holds).is_file() and not any(folder.glob(f"shard*/{row.holds}")):
            raise UserError(f"{folder / row.holds}: no such file; give a folder that `{row.prepares}` wrote")
