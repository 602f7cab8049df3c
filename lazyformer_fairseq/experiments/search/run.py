"""A search in its folder, from its settings to its result; every file there is complete or absent, and all resumes.

A supernet is trained, then patterns of it are judged: of each budget of latency the best one counts, beside a control.
What was found becomes tables and pictures.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Optional

import numpy as np
import torch
from torch import Tensor

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.folder import SETTINGS, experiment, kept
from lazyformer_fairseq.experiments.search import latency, space, training
from lazyformer_fairseq.experiments.search.material import Material
from lazyformer_fairseq.experiments.search.settings import CONTROL, SearchSettings
from lazyformer_fairseq.experiments.search.supernet import SinglePath
from lazyformer_fairseq.measure.stepwise import moved
from lazyformer_fairseq.patterns.grammar import read_sublayer
from lazyformer_fairseq.report.figures import picture, styles
from lazyformer_fairseq.report.numbers import spread, with_spread
from lazyformer_fairseq.report.page import Block, markdown, write_page
from lazyformer_fairseq.report.tables import Table
from lazyformer_fairseq.storage.json_files import read_json, write_json

RESULT, JUDGED = "result.json", "judged.json"
CONTROL_FOLDER = "control"
CONTROLS_SEED = 1000  # further than the method's: the two draw other patterns


def search_in(path: Path, settings: Any, begun: str, search: Callable[[], dict[str, Any]]) -> dict:
    """The result of `search` in the folder `path`; of a finished one there, what result.json holds.

    Args:
        settings: a dataclass of all that decides it.
        begun: the file that shows that work has begun; until then settings may change.

    Raises:
        UserError: the folder holds a search begun with other settings, or other things, or is not writable.
    """
    is_other = path.exists() and not (path / SETTINGS).exists()
    if is_other and (not path.is_dir() or any(entry.name[0] != "." for entry in path.iterdir())):
        raise UserError(f"{path}: exists already and holds no search; choose another folder")
    with experiment(path, settings, "a search", begun, made_by_them=[latency.LATENCIES]):
        if (path / RESULT).exists():
            print(f"{path}: this search is finished.")
        return kept(path / RESULT, search)  # written last: it marks the folder as complete


def run_search(settings: SearchSettings, path: Path) -> dict[str, Any]:
    """Searches in the folder `path`, resumes a stopped search there, or returns the result of a finished one.

    Returns:
        What result.json holds.

    Raises:
        UserError: as :func:`search_in`; settings and data do not fit together; or the evaluations alone cost all
            updates.
    """
    material = Material(settings)
    material.parts()  # data that does not fit must not leave a folder behind
    _supernets_cost(settings)

    def search() -> dict[str, Any]:
        result = Search(material, path).result()
        write_report(result, path)
        return result

    return search_in(path, settings, training.STATE, search)


def _supernets_cost(settings: SearchSettings) -> float:
    """What is left for the supernet in updates of the baseline, when a pattern as large as it costs an evaluation.

    Raises:
        UserError: nothing is left.
    """
    most = settings.max_updates
    if not settings.budgets:
        return most
    of_evaluations = settings.evaluations * settings.judged_batches * training.FORWARD
    if of_evaluations >= most:
        raise UserError(
            f"--max-updates {most}: {settings.evaluations} evaluations on {settings.judged_batches} batches cost as "
            f"much as {of_evaluations:.0f} updates; give more updates, or fewer --evaluations or --judged-batches"
        )
    return most - of_evaluations


@dataclass
class Inheritance:
    """Losses with inherited weights on the first batches of the held-apart data, always the same; kept in `file`.

    Attributes:
        single: a trained supernet.
        batches: how many.
        losses: in bits a prediction, of the patterns judged so far.
    """

    material: Material
    single: SinglePath
    counting: training.Counting
    batches: int
    file: Path
    losses: dict[space.Subnet, float] = field(default_factory=dict)

    def __post_init__(self):
        self.part = self.material.parts()[1]
        if self.file.exists():
            self.losses = {space.subnet_of(text): loss for text, loss in read_json(self.file).items()}

    def __call__(self, subnet: space.Subnet) -> float:
        self.losses[subnet] = self._loss(subnet)
        write_json(self.file, {space.by_layer(each): loss for each, loss in self.losses.items()}, durable=False)
        return self.losses[subnet]

    @torch.no_grad()
    def _loss(self, subnet: space.Subnet) -> float:
        self.single.take(subnet)
        self.single.eval()
        losses: list[Tensor] = []
        count = 0
        for batch in itertools.chain.from_iterable(itertools.islice(self.part.batches(1, 0), self.batches)):
            loss, predictions = self.material.loss_of(self.single, moved(batch, self.material.settings.device))
            losses.append(loss.double())
            count += int(predictions)
        return float(sum(losses)) / count / math.log(2)

    def cost_of(self, subnets: Sequence[space.Subnet]) -> training.Cost:
        """What it cost to judge these."""
        batches = min(self.batches, len(self.part))
        counted = sum(training.FORWARD * batches * self.counting.subnet(subnet) for subnet in subnets)
        return training.Cost(evaluations=len(subnets), counted=counted)


class Search:
    """The run in a folder, part by part."""

    def __init__(self, material: Material, path: Path):
        self.material, self.settings, self.path = material, material.settings, path
        settings = self.settings
        self.prices = settings.prices
        if self.prices is None:
            sublayers = {name: read_sublayer(name) for name in settings.priced}
            self.prices = latency.prices_of(material, settings.baseline, sublayers, path)
        self.counting = training.Counting(material)
        self.space = space.Space(settings.candidates, settings.layers, self.prices)
        self.budgets: list[Optional[float]] = sorted(settings.budgets) or [None]
        self.bands = [space.Band(0.0, math.inf)]
        if settings.budgets:
            self.bands = space.bands_of(settings.budgets, latency.latency_of(self.prices, settings.baseline))
        baseline = space.subnet_of(settings.baseline)
        self.baseline = baseline if set(baseline) <= set(settings.candidates) else None

    def result(self) -> dict[str, Any]:
        """All that the report needs."""
        settings = self.settings
        supernet, inheritance = self._supernet(settings.trains_mixtures, self.path)
        fronts = {"found": self._search(settings.method, supernet, inheritance, settings.seed)}
        if settings.budgets and settings.control and settings.method != CONTROL:
            fronts["control"] = self._control(supernet, inheritance)
        measured = self._latencies([*fronts.values()])
        rows = measured.values()
        return {
            "settings": {name: getattr(settings, name) for name in ("data", "task", "candidates")},
            "sizes": asdict(self.counting.sizes),
            **{name: self._described(each, measured) for name, each in fronts.items()},
            "baseline": {
                "pattern": space.compact(settings.baseline),
                **measured[settings.baseline],
                "loss": None if self.baseline is None else inheritance.losses[self.baseline],
            },
            "probabilities": [choices.probabilities().tolist() for choices in supernet.choices],
            "latency_correlation": latency.rank_correlations(
                [row["predicted"] for row in rows], [row["measured"]["median"] for row in rows]
            ),
        }

    def _supernet(self, of_mixtures: bool, folder: Path) -> tuple[training.SupernetTraining, Inheritance]:
        """Trained, and what its patterns inherit."""
        single = self.material.build_supernet(self.settings.candidates)
        data, cost = (self.material.loss_of, self.material.parts()), _supernets_cost(self.settings)
        kind = training.MixtureTraining if of_mixtures else training.SubnetTraining
        trained = kind(single, self.settings, *data, cost, self.prices, self.counting)
        trained.run_in(folder)
        return trained, Inheritance(self.material, single, self.counting, self.settings.judged_batches, folder / JUDGED)

    def _search(
        self, method: str, supernet: training.SupernetTraining, inheritance: Inheritance, seed: int
    ) -> dict[str, Any]:
        """A method's front on a trained supernet: of each budget the best pattern that was judged, and the cost."""
        evaluations = self.settings.evaluations if self.settings.budgets else 1  # else the most probable alone
        judge = space.Judge(inheritance, evaluations, dict(inheritance.losses))
        if self.baseline is not None and self.baseline not in inheritance.losses:
            inheritance(self.baseline)  # for the report: it is no evaluation of the method
        shares = [choices.probabilities().tolist() for choices in supernet.choices] or None
        task = space.Task(self.space, self.bands, judge, seed, shares)
        print(f"judging {evaluations} patterns ({method})")
        space.JUDGING[method](task)
        points = []
        for budget, band in zip(self.budgets, self.bands, strict=True):
            best = task.best_within(band.high)
            points.append({"budget": budget, "subnet": best, "loss": None if best is None else judge.losses[best]})
        judged = [{"latency": self.space.latency(subnet), "loss": loss} for subnet, loss in judge.losses.items()]
        cost = supernet.spent + inheritance.cost_of(list(judge.losses))
        return {"method": method, "points": points, "judged": judged, "cost": cost}

    def _control(self, supernet: training.SupernetTraining, inheritance: Inheritance) -> dict[str, Any]:
        """Random search: on the same supernet where that trains patterns, else on one of its own, of the same cost."""
        if self.settings.trains_mixtures:
            supernet, inheritance = self._supernet(False, self.path / CONTROL_FOLDER)
        return self._search(CONTROL, supernet, inheritance, self.settings.seed + CONTROLS_SEED)

    def _latencies(self, fronts: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """By pattern `predicted` ms and `measured`: median and quartiles in ms of a forward pass at batch 1."""
        found = [point["subnet"] for front in fronts for point in front["points"] if point["subnet"] is not None]
        patterns = [self.settings.baseline, *map(space.letters, found)]
        return {
            pattern: {
                "predicted": latency.latency_of(self.prices, pattern),
                "measured": spread([1000 * sample for sample in timing.samples]),
            }
            for pattern, timing in latency.measure_models(self.material, patterns, latency.ROUNDS_OF_FRONTS).items()
        }

    def _described(self, front: Mapping[str, Any], measured: Mapping[str, Any]) -> dict[str, Any]:
        """With patterns in place of parts of the supernet."""
        cost, points = front["cost"], []
        for point in front["points"]:
            pattern: Optional[str] = None
            found: Mapping[str, Any] = {}
            if point["subnet"] is not None:
                pattern = space.letters(point["subnet"])
                found = {"by_layer": space.by_layer(point["subnet"]), "loss": point["loss"], **measured[pattern]}
            points.append({"budget": point["budget"], "pattern": pattern and space.compact(pattern), **found})
        return {**front, "cost": asdict(cost), "points": points}


FRONTS = ("found", "control")


def write_report(result: Mapping[str, Any], folder: Path) -> None:
    """table.md, front.png; of gradient descent also probabilities.png."""
    write_page(_page(result), folder, "table")
    _draw_front(result, folder / "front.png")
    if result["probabilities"]:
        _draw_probabilities(result, folder / "probabilities.png")


def _draw_probabilities(result: Mapping[str, Any], path: Path) -> None:
    """Layers along x, candidates as rows, brighter where more probable (PAR Transformer, Figure 2)."""
    sublayers = map(read_sublayer, result["settings"]["candidates"])
    labels = [
        each.kind.name + each.text[1:] for each in sublayers
    ]  # ``self-attention``, and its settings if it has any
    tables = [np.asarray(table).T for table in result["probabilities"]]
    layers = tables[0].shape[1]
    panel = (max(5.0, 0.32 * layers + 2.5), 0.5 * len(labels) + 1.4)
    with picture(path, len(tables), panel=panel) as axes:
        for axis, table, point in zip(axes.flat, tables, result["found"]["points"], strict=True):
            axis.grid(False)
            image = axis.imshow(table, cmap="viridis", aspect="auto")  # as many colours as there are numbers
            axis.scatter(range(layers), table.argmax(axis=0), s=14, color="white", edgecolors="black", linewidths=0.6)
            axis.set_yticks(range(len(labels)), labels)
            axis.set_xticks(range(layers), range(1, layers + 1), fontsize=7)
            axis.set_xlabel(f"layer, the lowest first{_of_budget(point, '; ')}")
            axis.figure.colorbar(image, label="probability", pad=0.02)


def _of_budget(point: Mapping[str, Any], before: str = "") -> str:
    return "" if point["budget"] is None else f"{before}{point['budget']:.0%}"


def report_of(result: Mapping[str, Any]) -> str:
    """What was found beside its control, what each cost, and how well latency was predicted; in Markdown."""
    return markdown(_page(result)).rstrip()


def _page(result: Mapping[str, Any]) -> list[Block]:
    page: list[Block] = [_front_table(result), _costs_table(result)]
    if found := result["latency_correlation"]:
        page.append(
            f"Predicted with measured latency of these {found['n']} patterns: Spearman's rank correlation "
            f"{found['spearman']:.3f}, Kendall's tau {found['kendall']:.3f}."
        )
    return [*page, "Inherited losses are what a search goes by. To train the patterns from scratch, side by side:",
            _comparison(result)]  # fmt: skip


def _comparison(result: Mapping[str, Any]) -> str:
    """A command that trains the baseline and all that was found, in the sizes of the search."""
    settings, sizes = result["settings"], result["sizes"]
    patterns = {"baseline": result["baseline"]["pattern"]}
    for front in FRONTS:
        points = result.get(front, {"points": ()})["points"]
        patterns |= {f"{front}{_of_budget(each, '-').rstrip('%')}": each["pattern"] for each in points}
    lines = [f"lazyformer compare {settings['data']} FOLDER --task {settings['task']}"]
    lines += [f"  --model '{name}={pattern}'" for name, pattern in patterns.items() if pattern]
    widths = (sizes["embed_dim"], sizes["ffn_embed_dim"], sizes["num_heads"])
    lines.append("  --embed-dim {} --ffn-embed-dim {} --heads {}".format(*widths))
    return "```bash\n" + " \\\n".join(lines) + "\n```"


def _front_table(result: Mapping[str, Any]) -> Table:
    """The baseline, then of each budget a row of the method and one of its control."""
    baseline = result["baseline"]
    rows = [_row("baseline", "", baseline, baseline)]
    for number, point in enumerate(result["found"]["points"]):
        for name in FRONTS:
            if name in result:
                of_budget = result[name]["points"][number]
                rows.append(_row(_called(result, name), _of_budget(point), of_budget, baseline))
    return Table("", rows, left=("pattern",))


def _called(result: Mapping[str, Any], name: str) -> str:
    return result[name]["method"] + (", the control" if name == "control" else "")


def _row(name: str, budget: str, point: Mapping[str, Any], baseline: Mapping[str, Any]) -> dict[str, str]:
    found = {"predicted, ms": "", "measured, ms (quartiles)": "", "of the baseline": "", "inherited loss, bits": ""}
    if point["pattern"] is not None:
        loss = point["loss"]
        found = {
            "predicted, ms": f"{point['predicted']:.2f}",
            "measured, ms (quartiles)": with_spread(point["measured"], 2),
            "of the baseline": f"{point['measured']['median'] / baseline['measured']['median']:.0%}",
            "inherited loss, bits": "" if loss is None else f"{loss:.3f}",
        }
    pattern = "none found" if point["pattern"] is None else f"`{point['pattern']}`"
    return {"": name, "budget": budget, "pattern": pattern, **found}


def _costs_table(result: Mapping[str, Any]) -> Table:
    """Updates and evaluations, both in updates of the baseline by FLOPs."""
    headers = {
        "weights_updates": "updates of weights",
        "architecture_updates": "of the architecture",
        "evaluations": "evaluations",
        "counted": "in updates of the baseline",
    }
    rows = []
    for name in FRONTS:
        if name in result:
            cost = result[name]["cost"]
            cells = {header: f"{cost[each]:,.0f}" for each, header in headers.items()}
            rows.append({"": _called(result, name), **cells})
    return Table("", rows)


def _draw_front(result: Mapping[str, Any], path: Path) -> None:
    """Inherited loss against predicted latency: a small mark is a judged pattern, a large one a point of a front."""
    with picture(path, panel=(6.5, 4.5)) as ((axis,),):
        for name, style in styles(FRONTS).items():
            if name not in result:
                continue
            judged = [(each["latency"], each["loss"]) for each in result[name]["judged"]]
            axis.scatter(*zip(*judged, strict=True), s=8, alpha=0.4, c=style["color"])
            points = [(each["predicted"], each["loss"]) for each in result[name]["points"] if each["pattern"]]
            axis.plot(*np.reshape(points, (-1, 2)).T, label=_called(result, name), **style)
        baseline = result["baseline"]
        if baseline["loss"] is not None:
            star = {"markersize": 11, "linestyle": "", "label": "baseline"}
            axis.plot([baseline["predicted"]], [baseline["loss"]], "k*", **star)
        axis.set(xlabel="predicted latency, ms", ylabel="loss with inherited weights, bits")
        axis.legend()
