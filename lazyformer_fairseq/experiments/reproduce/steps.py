"""The steps, each a command with what it makes: one table, which the plan prints and the run goes down."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from lazyformer_fairseq.experiments.reproduce.settings import FIGURE_3, TABLE_1, TABLE_3, TABLE_4, Inputs, Size

CLI = "lazyformer_fairseq.cli"


@dataclass(frozen=True)
class Step:
    """A row.

    Attributes:
        name: also of its record and its log.
        what: in words.
        command: a module, which ``python -m`` runs, and its arguments. Run again after a stop, it goes on.
        makes: what is there when it is done.
        needs: names of steps.
        updates: of the training whose log tells how far it is; 0 for a command that shows it itself.
        starts_anew: an unfinished `makes` must go first: the command would refuse it.
    """

    name: str
    what: str
    command: tuple[str, ...]
    makes: Path
    needs: tuple[str, ...] = ()
    updates: int = 0
    starts_anew: bool = False


@dataclass(frozen=True)
class Places:
    """Folders in OUT."""

    out: Path

    @property
    def made(self) -> Path:
        return self.out / "raw"

    @property
    def data(self) -> Path:
        return self.out / "data"

    @property
    def glue(self) -> Path:
        return self.out / "glue"

    @property
    def report(self) -> Path:
        return self.out / "report"

    def pretraining(self, arch: str) -> Path:
        return self.out / "pretraining" / arch

    def checkpoint(self, arch: str, updates: int) -> Path:
        return self.pretraining(arch) / f"checkpoint_update_{updates}.pt"

    def bench(self, name: str) -> Path:
        return self.out / "bench" / name


def model_name(arch: str, updates: int) -> str:
    """Of a checkpoint, in GLUE's tables."""
    return f"{arch}-{updates}"


def finetuned_updates(arch: str, size: Size) -> tuple[int, ...]:
    """At which a model's checkpoints are fine-tuned: those of Figure 2; of Table 4's two the last."""
    return size.kept if arch in TABLE_1 else size.kept[-1:]


def steps(size: Size, inputs: Inputs, out: Path, precision: str, batch_size: Optional[int] = None) -> list[Step]:
    """All of them, in the order in which they run.

    Args:
        precision: of the benchmarks; all other commands take that of the machine.
        batch_size: sequences of pre-training that a GPU takes at once; None for the command's own choice.
    """
    places = Places(out)
    return [
        *([_prose(places)] if inputs.raw is None else []),
        _corpus(size, inputs, places),
        _bench("tables", "times of Tables 2 to 4", size, places, precision,
               (*TABLE_1, *TABLE_3, *TABLE_4), (size.length,)),
        _bench("figure_3", "speed-up against length, Figure 3", size, places, precision, FIGURE_3, size.lengths),
        *_models(size, inputs, places, batch_size),
    ]  # fmt: skip


def _prose(places: Places) -> Step:
    command = ("lazyformer_fairseq.experiments.reproduce.demo_text", str(places.made))
    return Step("text", "Python's prose, and a task made of it", command, places.made / "glue")


def _corpus(size: Size, inputs: Inputs, places: Places) -> Step:
    command = (CLI, "corpus", *inputs.texts(places.made), str(places.data), *size.corpus)
    needs = ("text",) if inputs.raw is None else ()
    return Step("corpus", "text becomes data", command, places.data / "manifest.json", needs)


def _bench(
    name: str, what: str, size: Size, places: Places, precision: str, archs: tuple[str, ...], lengths: tuple[int, ...]
) -> Step:
    folder = places.bench(name)
    command = (
        *(CLI, "bench", "--arch", ",".join(size.bench_arch(arch) for arch in archs if arch != "bert_base")),
        *("--lengths", ",".join(map(str, lengths)), "--what", "training", "--relative-position-buckets", "32"),
        *("--precision", precision, "--minutes", f"{size.minutes:g}", *size.bench, "--output", str(folder)),
    )
    return Step(f"bench_{name}", what, command, folder / "results.json", starts_anew=True)


def _models(size: Size, inputs: Inputs, places: Places, batch_size: Optional[int]) -> Iterator[Step]:
    for arch in (*TABLE_1, *TABLE_4):
        yield _pretraining(arch, size, places, batch_size)
        yield _finetuning(arch, size, inputs, places)


def _pretraining(arch: str, size: Size, places: Places, batch_size: Optional[int]) -> Step:
    widths = (f"--{name} {value}" for name, value in size.widths(arch).items()) if size.is_tiny else ()
    command = (
        *(CLI, "pretrain", arch, str(places.data), *" ".join(widths).split(), *size.pretraining),
        *("--max-update", str(size.updates), "--sequences-per-update", str(size.sequences)),
        *(("--sequences-per-gpu", str(batch_size or size.sequences)) if batch_size or size.is_tiny else ()),
        *("--keep-updates-list", ",".join(map(str, size.kept))),
        *("--validate-interval-updates", str(size.validate_every), "--save-dir", str(places.pretraining(arch))),
    )
    what = f"{arch}, {size.updates:,} updates"
    made = places.checkpoint(arch, size.updates)
    return Step(f"pretrain_{arch}", what, command, made, ("corpus",), size.updates)


def _finetuning(arch: str, size: Size, inputs: Inputs, places: Places) -> Step:
    updates = finetuned_updates(arch, size)
    models = [f"{model_name(arch, each)}={places.checkpoint(arch, each)}" for each in updates]
    command = (
        *(CLI, "glue", "run", "--checkpoint", *models, "--data", str(inputs.glue), "--output", str(places.glue)),
        *("--tasks", *inputs.tasks, "--lrs", *map(str, size.rates), "--seeds", *map(str, size.seeds)),
        *(("--epochs", str(size.epochs), "--max-train-rows", str(size.rows)) if size.rows else ()),
        *("--keep-checkpoints", "none"),
    )
    last = places.glue / "runs" / model_name(arch, updates[-1])
    what = f"{arch} at {len(updates)} checkpoint{'s' * (len(updates) > 1)}"
    return Step(f"glue_{arch}", what, command, last, (f"pretrain_{arch}",))
