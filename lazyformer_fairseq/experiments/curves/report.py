"""A table and a plot of validation losses against updates, tokens, hours and FLOPs, made from the runs' records."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan, nan
from pathlib import Path

import numpy as np
from matplotlib.lines import Line2D

from lazyformer_fairseq.arguments import refuse_missing
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation.costs.flops import count_flops
from lazyformer_fairseq.options import num_processed_tokens, parse_masking_rates
from lazyformer_fairseq.patterns.kinds import sizes_of
from lazyformer_fairseq.report.figures import label_cost, picture, styles
from lazyformer_fairseq.report.numbers import NOTHING
from lazyformer_fairseq.report.tables import markdown_table
from lazyformer_fairseq.training.run_record import METRICS, RUN, MetricsLine, RunRecord, read_metrics, read_run

AXES = ("updates", "tokens", "hours", "flops")
MEASURES = {
    "full_sentences_masked_lm": "validation loss, bits per masked token",
    "masked_permuted_lm": "validation loss, bits per predicted token",
    "stream_language_modeling": "validation loss, bits per token",
}
FORWARD_AND_BACKWARD = 3  # in forward passes: a backward pass costs as much as two

Losses = dict[int, float]  # by update; NaN where the loss was not finite


def _nothing_spent() -> dict[str, dict[int, float]]:
    """Return the cumulative costs before the first update, by axis and update."""
    return {axis: {0: 0.0} for axis in AXES}


@dataclass
class History:
    """The history of a run with one or more consecutive phases; the update count continues across phases.

    Attributes:
        pattern: the first phase's pattern.
        measure: a description of the loss and its unit.
        splits: the losses on each held-out split.
        training: training losses, each averaged over the updates since the record's previous line.
        borders: the updates at which one phase ends and the next begins.
        cumulative_costs: for each axis, the total amount spent up to each recorded update.
        why_no_flops: the reason why a phase's FLOPs cannot be counted; empty if they can.
    """

    pattern: str
    measure: str
    splits: dict[str, Losses] = field(default_factory=dict)
    training: Losses = field(default_factory=dict)
    borders: list[int] = field(default_factory=list)
    cumulative_costs: dict[str, dict[int, float]] = field(default_factory=_nothing_spent)
    why_no_flops: str = ""

    @property
    def losses(self) -> Losses:
        """The losses on the split ``valid``, or on the first validated split if there is no ``valid``."""
        return self.splits.get("valid") or next(iter(self.splits.values()), {})

    @property
    def last_update(self) -> int:
        """The last update in the records."""
        return max(self.cumulative_costs["hours"])

    def at(self, axis: str, updates: Iterable[int]) -> np.ndarray:
        """Convert update numbers to positions on one of AXES, interpolating linearly between the record's lines.

        Positions beyond the last line are extrapolated from the last two lines. Positions are NaN if the record does
        not determine them.
        """
        wanted = np.array(list(updates), dtype=float)
        if axis == "updates":
            return wanted
        known = np.array(sorted(self.cumulative_costs[axis].items()))
        if len(known) < 2 or (axis == "flops" and self.why_no_flops):
            return np.full(len(wanted), nan)
        (before, spent_before), (last, spent) = known[-2:]
        beyond = np.maximum(wanted - last, 0) * (spent - spent_before) / (last - before)
        return np.interp(wanted, known[:, 0], known[:, 1]) + beyond

    def add_phase(self, record: RunRecord, lines: Sequence[MetricsLine]) -> None:
        """Append a phase's record, in which updates, seconds and tokens are counted from the start of the phase."""
        start = self.last_update
        spent = {axis: self.at(axis, [start])[0] for axis in AXES}
        if start:
            self.borders.append(start)
            for axis, value in spent.items():
                self.cumulative_costs[axis][start] = value
        else:
            spent = dict.fromkeys(AXES, 0.0)
        try:
            flops_per_token = count_flops_per_token(record)
        except (KeyError, ValueError) as error:
            flops_per_token = nan
            self.why_no_flops = f"no formula for --task {record.task['name']} and its model ({error!r})"

        hours = spent["hours"]
        tokens = spent["tokens"]
        trained = start
        for line in lines:
            updates = start + line.updates
            loss = line.values.get("loss")
            if loss is None:
                loss = nan
            self.cumulative_costs["hours"].setdefault(updates, hours + line.seconds / 3600)
            if line.split != "train":
                # A phase starts with the previous phase's final weights, and that phase already recorded their loss.
                is_another = updates > start or not start
                if is_another and "loss" in line.values:
                    self.splits.setdefault(line.split, {})[updates] = loss
                continue
            self.training[updates] = loss
            per_update = line.values.get("wpb") or nan
            tokens += line.values.get("tokens") or (updates - trained) * per_update
            trained = updates
            self.cumulative_costs["tokens"][updates] = tokens
            self.cumulative_costs["flops"][updates] = spent["flops"] + (tokens - spent["tokens"]) * flops_per_token


def read_history(phases: Sequence[Path]) -> History:
    """Read a run's history from the records in its folders, one per phase.

    Raises:
        UserError: a record is missing or damaged.
    """
    records = [read_run(folder) for folder in phases]
    model = records[0].model
    measure = MEASURES.get(records[0].task.get("name"), "validation loss")
    history = History(str(model.get("sublayer_pattern", "")), measure)
    for folder, record in zip(phases, records, strict=True):
        lines = []
        if (folder / METRICS).exists():  # a run that has just started has no measurements yet
            lines = read_metrics(folder)
        history.add_phase(record, lines)
    return history


def count_flops_per_token(record: RunRecord) -> float:
    """Return the FLOPs per token of a forward and a backward pass, averaged over a sequence.

    Raises:
        KeyError, ValueError: the model or the task is not from this package.
    """
    model = record.model
    task = {**record.task, "_name": record.task["name"]}
    sizes = sizes_of(model, task["vocab_size"])
    memory = 0
    predicted = None
    if "encoder_embed_dim" in model:
        length = int(task["tokens_per_sample"])
        predicted = round(sum(parse_masking_rates(task["mask_prob"])) / 2 * length)
    else:
        length = int(task["tgt_len"])
        memory = int(model["mem_len"])
    computed = num_processed_tokens(task, length, predicted or 0)
    forward = count_flops(model["sublayer_pattern"], sizes, computed, memory, predicted=predicted)
    return FORWARD_AND_BACKWARD * forward / length


Runs = Mapping[str, History]  # by name


def find_runs(given: Iterable[str]) -> dict[str, list[Path]]:
    """Parse arguments of the form ``[NAME=]FOLDER`` into a mapping from each run's name to the folders of its phases.

    A folder that contains ``phase1``, ``phase2``, ... is a run with these phases. A run is named after its folder by
    default.

    Raises:
        UserError: a folder has no record, or two runs have the same name.
    """
    runs: dict[str, list[Path]] = {}
    for word in given:
        name, equals, place = word.partition("=")
        if not equals or "/" in name:
            name = ""
            place = word
        folder = Path(place)
        refuse_missing(folder)
        name = name or folder.absolute().name
        phases = [path.parent for path in folder.glob(f"phase[0-9]*/{RUN}")]
        phases.sort(key=lambda path: int(path.name.removeprefix("phase")))
        if not phases and not (folder / RUN).is_file():
            raise UserError(f"{folder} contains no {RUN}; specify a checkpoint folder written by this package")
        if name in runs:
            raise UserError(f"{word}: a different run is already called {name}; rename this one with NAME={place}")
        runs[name] = phases or [folder]
    return runs


def read_histories(runs: Mapping[str, Sequence[Path]]) -> tuple[dict[str, History], list[str]]:
    """Return the histories of all runs that have been validated, by name, and a sentence about each of the other runs.

    Raises:
        UserError: no run has been validated, or the runs' losses cannot be compared.
    """
    read = {name: read_history(phases) for name, phases in runs.items()}
    shown = {name: history for name, history in read.items() if history.losses}
    skipped = []
    for name, history in read.items():
        if not history.losses:
            skipped.append(f"{name}: not yet validated after {history.last_update:,} updates")
    if not shown:
        raise UserError(
            f"nothing to plot: {'; '.join(skipped)}. A run is validated whenever it saves a checkpoint "
            "(--save-interval-updates) and every --validate-interval-updates, unless --disable-validation is set"
        )
    measures = {history.measure: name for name, history in shown.items()}
    if len(measures) > 1:
        what = "; ".join(f"{name}: {measure}" for measure, name in measures.items())
        raise UserError(f"these losses cannot be compared ({what}); plot the runs separately")
    return shown, skipped


def table(shown: Runs) -> str:
    """Return a Markdown table of each run's last and best validation losses and its costs up to the last validation."""
    rows = []
    for name, history in shown.items():
        losses = history.losses
        last = max(losses)
        best = min(losses, key=lambda updates: (isnan(losses[updates]), losses[updates], updates))
        spent = {axis: float(history.at(axis, [last])[0]) for axis in AXES}
        rows.append(
            {
                "run": name,
                "pattern": history.pattern or NOTHING,
                "validations": f"{len(losses):,}",
                "updates": f"{last:,}",
                "tokens": _number(spent["tokens"], ",.0f"),
                "hours": _number(spent["hours"], ",.3f"),
                "FLOPs": _number(spent["flops"], ".2e"),
                "last loss": _number(losses[last], ".3f"),
                "best loss": _number(losses[best], ".3f"),
                "at update": f"{best:,}",
            }
        )
    return markdown_table(rows, left=("pattern",))


def _number(value: float, digits: str) -> str:
    if isnan(value):
        return NOTHING
    return format(value, digits)


def draw(shown: Runs, axes: Sequence[str], path: Path, training: bool = False) -> None:
    """Plot the validation losses, with one panel per horizontal axis, and save the figure as a PNG file.

    Dashed vertical lines mark the ends of phases.

    Args:
        shown: the runs.
        axes: the horizontal axes, from AXES.
        path: the PNG file.
        training: whether to also plot the training losses, as thin lines.
    """
    style_of = styles(shown)
    drawn = {}
    legend = []
    size = (4.6 + 1 / len(axes), 4)
    with picture(path, columns=len(axes), panel=size, legend=legend, sharey=True) as (panels,):
        for axis, panel in zip(axes, panels, strict=True):
            for run, history in shown.items():
                colour = style_of[run]["color"]
                where = history.at(axis, history.losses)
                if not np.isnan(where).all():
                    values = history.losses.values()
                    drawn[run], *_ = panel.plot(where, values, label=run, markersize=4, **style_of[run])
                if training:
                    thin = {"color": colour, "alpha": 0.45, "linewidth": 0.8, "zorder": 1}
                    panel.plot(history.at(axis, history.training), history.training.values(), **thin)
                for border in history.at(axis, history.borders):
                    panel.axvline(border, color=colour, linewidth=0.8, linestyle="--")
            label_cost(panel, axis)

        measure = next(iter(shown.values())).measure
        if training:
            measure += " (thin: training loss)"
        panels[0].set_ylabel(measure)
        legend += drawn.values()
        if any(history.borders for history in shown.values()):
            legend.append(Line2D([], [], color="0.4", linewidth=0.8, linestyle="--", label="end of a phase"))


def left_out(shown: Runs, axes: Sequence[str]) -> list[str]:
    """Return, for each run that cannot be plotted against FLOPs, a sentence that states the reason."""
    sentences = []
    for name, history in shown.items():
        if "flops" in axes and history.why_no_flops:
            sentences.append(f"{name} has no curve against FLOPs: {history.why_no_flops}")
    return sentences
