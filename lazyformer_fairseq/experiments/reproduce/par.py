"""The reproduction of PAR Transformer (arXiv 2009.04534): the paper's numbers, the steps, and the report's sections.

Table 4, PAR BERT, is not included; use ``lazyformer pretrain --recipe phases`` and the commands for GLUE and SQuAD to
reproduce it. Table 5 lists hyperparameters, which are in patterns/architectures.py.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Optional

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation.bench.report import milliseconds
from lazyformer_fairseq.evaluation.bench.settings import REMEMBERED, SEGMENT
from lazyformer_fairseq.evaluation.costs.flops import count_flops
from lazyformer_fairseq.evaluation.planning import PAPER_TERAFLOPS
from lazyformer_fairseq.evaluation.planning.job import job_of_arch
from lazyformer_fairseq.experiments.prose import PROSE, write_prose
from lazyformer_fairseq.experiments.reproduce.engine import (
    PYTHONS_PROSE,
    Reproduction,
    Step,
    missing,
    our_command,
    show_losses,
    show_picture,
)
from lazyformer_fairseq.experiments.search.report import report_of
from lazyformer_fairseq.patterns.architectures import CAUSAL_ARCHITECTURES
from lazyformer_fairseq.patterns.grammar import plan
from lazyformer_fairseq.patterns.kinds import DISTRIBUTION
from lazyformer_fairseq.report.numbers import NOTHING
from lazyformer_fairseq.report.tables import markdown_table
from lazyformer_fairseq.storage.atomic import atomic_folder
from lazyformer_fairseq.storage.json_files import read_json

CORPORA = ("wikitext-103", "enwik8", "text8")
WIKITEXT = CORPORA[0]
KEPT_CHECKPOINTS = 6  # the latest three, checkpoint_best, checkpoint_last, and the last update's checkpoint


@dataclass(frozen=True)
class Printed:
    """A model in the paper's tables, with the paper's numbers.

    Attributes:
        corpus: one of CORPORA.
        arch: the model's name in this package.
        name: the model's name in the paper.
        measure: the test perplexity on WikiText-103; bits per character on the other corpora.
        milliseconds: the latency on an A100.
        parameters: the number of parameters, in millions (Table 6, base models only).
        gigaflops: the gigaFLOPs (Table 6, base models only).
        valid_40k: the validation perplexity after 40,000 updates (Table 7, base models only).
        valid_140k: the validation perplexity after 140,000 updates (Table 7, base models only).
    """

    corpus: str
    arch: str
    name: str
    measure: float
    milliseconds: float
    parameters: int = 0
    gigaflops: int = 0
    valid_40k: float = 0.0
    valid_140k: float = 0.0


TABLE_1 = {  # the base models' test perplexity by architecture, in the paper's order
    "par_transformer_base_0s": 252.9,
    "par_transformer_base_1s_sfff": 31.5,
    "par_transformer_base_3s_sfff": 23.9,
    "par_transformer_base_4s_sfff": 23.4,
    "par_transformer_base_5s_sfff": 23.0,
    "par_transformer_base_6s_sff": 22.9,
    "par_transformer_base": 22.7,
    "par_transformer_base_7s_sff": 22.7,
    "par_transformer_base_7s_sfff": 22.6,
    "transformer_xl_base": 22.7,
}
BASE_MODELS = (  # Tables 2, 6 and 7
    Printed(
        WIKITEXT,
        "transformer_xl_base",
        "Transformer-XL Base",
        measure=22.7,
        milliseconds=15.2,
        parameters=192,
        gigaflops=27,
        valid_40k=23.3,
        valid_140k=22.2,
    ),
    Printed(
        WIKITEXT,
        "sandwich_transformer_base",
        "Sandwich Transformer Base",
        measure=22.6,
        milliseconds=15.2,
        parameters=192,
        gigaflops=27,
        valid_40k=23.4,
        valid_140k=22.4,
    ),
    Printed(
        WIKITEXT,
        "par_transformer_base",
        "PAR Transformer Base",
        measure=22.7,
        milliseconds=9.9,
        parameters=200,
        gigaflops=17,
        valid_40k=23.3,
        valid_140k=22.4,
    ),
)
BASE = tuple(row.arch for row in BASE_MODELS)
TABLE_3 = (
    Printed(WIKITEXT, "transformer_xl_large", "Transformer-XL Large", measure=18.4, milliseconds=18.9),
    Printed(WIKITEXT, "sandwich_transformer_large", "Sandwich Transformer Large", measure=18.2, milliseconds=18.9),
    Printed(WIKITEXT, "par_transformer_large", "PAR Transformer Large", measure=18.4, milliseconds=13.4),
    Printed("enwik8", "transformer_xl_24b", "Transformer-XL 24B", measure=1.10, milliseconds=12.5),
    Printed("enwik8", "sandwich_transformer_24b", "Sandwich Transformer 24B", measure=1.11, milliseconds=12.5),
    Printed("enwik8", "par_transformer_24b", "PAR Transformer 24B", measure=1.11, milliseconds=8.4),
    Printed("text8", "transformer_xl_24b", "Transformer-XL 24B", measure=1.18, milliseconds=12.5),
    Printed("text8", "sandwich_transformer_24b", "Sandwich Transformer 24B", measure=1.19, milliseconds=12.5),
    Printed("text8", "par_transformer_24b", "PAR Transformer 24B", measure=1.18, milliseconds=8.4),
)


@dataclass(frozen=True)
class Size:
    """The sizes of a reproduction, either full or miniature.

    Attributes:
        pretraining: further options of `lazyformer pretrain`, with underscores instead of dashes.
        evaluation: further options of `lazyformer lm evaluate`.
        bench: further options of `lazyformer bench`.
        search: further options of `lazyformer search`.
        updates: the number of updates per run; None for the arch's own number.
        longer: the number of updates of the longer runs in Table 7.
        flops_per_second: the training speed per device that the plan assumes, in FLOP/s.
        is_tiny: whether this is the miniature version.
    """

    pretraining: Mapping[str, Any]
    evaluation: Mapping[str, Any]
    bench: Mapping[str, Any]
    search: Mapping[str, Any]
    updates: Optional[int]
    longer: int
    flops_per_second: float
    is_tiny: bool = False

    def arch(self, name: str) -> str:
        """Return the arch to train, or its `_tiny` counterpart in the miniature version."""
        if self.is_tiny:
            return f"{name.removesuffix('_base')}_tiny"
        return name

    def updates_of(self, arch: str) -> int:
        """Return the number of updates for an arch, except in the longer runs."""
        return self.updates or CAUSAL_ARCHITECTURES[arch].updates


PAPER = Size(
    pretraining={},
    evaluation={},
    bench={"rounds": 50},
    # An update on 128 streams with 32 layers of s, f and identity takes 62 GB in fp32; an eighth of it fits on a V100.
    search={"tgt_len": 192, "mem_len": 192, "update_freq": 8},
    updates=None,
    longer=140_000,
    flops_per_second=PAPER_TERAFLOPS * 1e12,
)
TINY = Size(
    pretraining={
        "tgt_len": 16,
        "mem_len": 16,
        "sequences_per_update": 8,
        "sequences_per_gpu": 8,
        "warmup_updates": 10,
        "attention_backend": "eager",
        "num_workers": 0,
        "log_interval": 20,
        "adaptive_softmax_cutoff": "",
    },
    evaluation={"tgt_len": 64, "mem_len": 64, "clamp_len": 40},
    bench={"rounds": 10},
    search={
        "batch_size": 8,
        "max_updates": 60,
        "constant_updates": 20,
        "architecture_lr": 0.05,
        "tgt_len": 16,
        "mem_len": 16,
        "attention_backend": "eager",
        "adaptive_softmax_cutoff": "",
    },
    updates=60,
    longer=120,
    flops_per_second=5e9,  # on one core, at these sizes
    is_tiny=True,
)


@dataclass(frozen=True)
class Training:
    """A training run in the tables.

    Attributes:
        corpus: one of CORPORA.
        arch: a key of CAUSAL_ARCHITECTURES.
        is_longer: whether it is one of the longer runs in Table 7.
    """

    corpus: str
    arch: str
    is_longer: bool = False

    @property
    def name(self) -> str:
        """The name of the run's folder and steps."""
        name = self.arch
        if self.corpus != WIKITEXT:
            name += f"_{self.corpus}"
        if self.is_longer:
            name += "_longer"
        return name


def find_inputs(raw: str, size: Size, out: Path) -> dict[str, Path]:
    """Find the folders of the texts, by name; a miniature version uses only texts that exist.

    Args:
        raw: the folder of all texts, or "demo".
        size: the reproduction's sizes.
        out: the reproduction's folder.

    Raises:
        UserError: a text is missing.
    """
    if raw == PYTHONS_PROSE:
        if not size.is_tiny:
            raise UserError(
                f"{PYTHONS_PROSE}: this text is only about a megabyte long and works only with --tiny; use "
                "a folder of texts"
            )
        return {name: out / "raw" / name for name in CORPORA}
    folders = {name: Path(raw, name) for name in CORPORA}
    found = {name: folder for name, folder in folders.items() if folder.exists()}
    lacking = [name for name in CORPORA if name not in found]
    if lacking and not (size.is_tiny and found):
        scripts = ", ".join(f"scripts/prepare_{name.replace('-', '')}.sh {folders[name]}" for name in lacking)
        raise UserError(f"{raw} lacks {', '.join(lacking)}; run {scripts}, or specify a folder that has all texts")
    return found


def write_texts(folder: Path) -> None:
    """Write Python's prose atomically as three texts: one of words, and two of characters separated by spaces."""
    with atomic_folder(folder) as unfinished:
        documents = write_prose(unfinished / PROSE).read_text(encoding="utf-8").splitlines()
        text = "\n".join(json.loads(line)["text"] for line in documents)
        characters = ["_" if character.isspace() else character for character in text]
        letters = [character for character in text.lower() if character.isalpha()]
        for name, units, held_out in (
            ("wikitext-103", text.split(), 2_000),
            ("enwik8", characters, 4_000),
            ("text8", letters, 4_000),
        ):
            splits = {
                "valid": units[:held_out],
                "test": units[held_out : 2 * held_out],
                "train": units[2 * held_out : 300_000],
            }
            (unfinished / name).mkdir()
            for split, part in splits.items():
                (unfinished / name / f"wiki.{split}.tokens").write_text(" ".join(part), encoding="utf-8")


def reproduction(size: Size, inputs: Mapping[str, Path], out: Path) -> Reproduction:
    """Return the reproduction of the paper.

    Args:
        size: the reproduction's sizes.
        inputs: the folders of the texts by name.
        out: the folder for the results.
    """
    page = _Page(size, out)
    introduction = (
        "Columns marked (paper) show the numbers printed in arXiv 2009.04534, whose latencies were measured on an "
        f"A100. All others were measured here with one seed. Texts: {', '.join(inputs)}."
    )
    if size.is_tiny:
        introduction = (
            "**This shows that everything runs, not which model is better**: models have a width of 32, segments "
            f"and memory have 16 tokens each, and training takes {size.updates} updates on 8 streams. The paper's "
            f"numbers were measured on different texts.\n\n{introduction}"
        )

    return Reproduction(
        paper="PAR Transformer",
        settings={
            "paper": "PAR Transformer",
            "size": "tiny" if size.is_tiny else "paper",
            "raw": {name: str(path.absolute()) for name, path in inputs.items()},
        },
        steps=list_steps(size, inputs, out),
        sections={
            "Figures 1 and 2: the supernet and the pattern it finds": page.search,
            "Table 1: how much attention a model needs": page.attention,
            "Tables 2 and 6: base models": page.base_models,
            "Table 3: large models and character-level models": page.large_models,
            "Table 7: longer training": page.longer_training,
        },
        introduction=introduction,
        note="",
        flops_per_second=size.flops_per_second,
        is_tiny=size.is_tiny,
    )


def list_steps(size: Size, inputs: Mapping[str, Path], out: Path) -> list[Step]:
    """Return all steps in execution order; steps for Table 2 come first."""
    steps = []
    before: tuple[str, ...] = ()
    if all(path.parent == out / "raw" for path in inputs.values()):
        step = Step(
            name="text",
            what="Python's prose, by words and by characters",
            command=(__name__, str(out / "raw")),
            output=out / "raw",
        )
        steps.append(step)
        before = ("text",)

    data = dict(inputs)
    needs: dict[str, tuple[str, ...]] = dict.fromkeys(inputs, ())
    for name, path in inputs.items():
        if (path / "manifest.json").exists():
            continue
        data[name] = out / "data" / name
        needs[name] = (f"prepare_{name}",)
        step = Step(
            name=f"prepare_{name}",
            what="prepare the data",
            command=_prepare(size, name, path, data[name]),
            output=data[name] / "manifest.json",
            needs=before,
        )
        steps.append(step)

    if WIKITEXT in data:
        options = {"task": "language-model", "arch": size.arch("transformer_xl_base"), **size.search}
        command = our_command("search", data[WIKITEXT], out / "search", **options)
        step = Step(
            name="search",
            what="the supernet of Figure 1 and the pattern it finds",
            command=(*command, "--decoder-normalize-before"),
            output=out / "search" / "result.json",
            needs=needs[WIKITEXT],
        )
        steps.append(step)
    options = {"arch": ",".join(map(size.arch, BASE)), **size.bench, "output": out / "bench"}
    step = Step(
        name="bench",
        what="latencies for Tables 2 and 6",
        command=our_command("bench", "models", **options),
        output=out / "bench" / "results.json",
        removes_partial_output=True,
    )
    steps.append(step)

    trainings = [Training(WIKITEXT, arch) for arch in dict.fromkeys((*BASE, *TABLE_1))]
    trainings += [Training(row.corpus, row.arch) for row in TABLE_3]
    trainings += [Training(WIKITEXT, arch, is_longer=True) for arch in BASE]
    for training in trainings:
        if training.corpus in data:
            steps += _training_steps(size, training, data[training.corpus], out, needs[training.corpus])
    return steps


def _prepare(size: Size, name: str, text: Path, data: Path) -> tuple[str, ...]:
    """Return the command that prepares a text for training.

    A miniature version's texts are in WikiText's format and are not checked against the official ones.
    """
    if size.is_tiny:
        return our_command("lm", "prepare", "wikitext", text, data)
    corpus = "wikitext" if name == WIKITEXT else name
    return our_command("lm", "prepare", corpus, text, data, official=name)


def _training_steps(size: Size, training: Training, data: Path, out: Path, needs: tuple[str, ...]) -> list[Step]:
    """Return the steps of a run and its evaluations.

    All runs except the longer ones are evaluated on the test split. Base models, including the longer runs, are also
    evaluated on the validation split.
    """
    arch = training.arch
    updates = size.updates_of(arch)
    splits = ["test"]
    if training.is_longer:
        updates = size.longer
        splits = []
    if training.corpus == WIKITEXT and arch in BASE:
        splits.append("valid")

    folder = out / "training" / training.name
    options = {
        **size.pretraining,
        "max_update": updates,
        "save_interval_updates": min(1000, max(1, updates // 3)),
        "keep_updates_list": updates,
        "save_dir": folder,
    }
    steps = [
        Step(
            name=f"train_{training.name}",
            what=f"{arch} on {training.corpus}, {updates:,} updates",
            command=our_command("pretrain", size.arch(arch), data, **options),
            output=folder / f"checkpoint_update_{updates}.pt",
            needs=needs,
            checkpoints=KEPT_CHECKPOINTS,
        )
    ]

    lengths = next(length for length in ("large", "24b", "base") if length in arch)
    evaluation = size.evaluation or {"lengths": lengths}
    for split in splits:
        result = folder / f"{split}.json"
        options = {"split": split, **evaluation, "json": result}
        step = Step(
            name=f"{split}_{training.name}",
            what=f"{arch} on {training.corpus}, {split} split, at batch size 1",
            command=our_command("lm", "evaluate", folder / "checkpoint_best.pt", data, **options),
            output=result,
            needs=(f"train_{training.name}",),
        )
        steps.append(step)
    return steps


class _Page:
    """The report's sections, which show the measured numbers next to the paper's."""

    def __init__(self, size: Size, out: Path):
        self.size = size
        self.out = out

    def _evaluation(self, training: Training, split: str = "test") -> Optional[dict[str, Any]]:
        file = self.out / "training" / training.name / f"{split}.json"
        if file.exists():
            return read_json(file)
        return None

    def _perplexity(self, training: Training, split: str = "test") -> str:
        found = self._evaluation(training, split)
        if found:
            return f"{found['perplexity']:.1f}"
        return NOTHING

    def search(self, report: Path) -> str:
        """Return the search report with its picture."""
        result = self.out / "search" / "result.json"
        if not result.exists():
            return missing("search")
        picture = self.out / "search" / "probabilities.png"
        shown = show_picture(picture, report, "probability of each candidate in each layer")
        return f"{shown}\n\n{report_of(read_json(result))}"

    def attention(self, _: Path) -> str:
        """Return Table 1."""
        rows = []
        for arch, printed in TABLE_1.items():
            pattern = CAUSAL_ARCHITECTURES[arch].sublayer_pattern
            rows.append(
                {
                    "s": str(sum(DISTRIBUTION in planned.kind.hands_on for planned in plan(pattern))),
                    "pattern": f"`{pattern}`",
                    "PPL": self._perplexity(Training(WIKITEXT, arch)),
                    "PPL (paper)": f"{printed:.1f}",
                }
            )
        return markdown_table(rows, left=("pattern",))

    def base_models(self, report: Path) -> str:
        """Return Tables 2 and 6, and the validation losses of the runs."""
        results = self.out / "bench" / "results.json"
        seconds = {}
        if results.exists():
            for cell in read_json(results)["cells"]:
                if cell["workload"] == "causal":
                    seconds |= {row["model"]: row["seconds"] for row in cell["rows"]}
        baseline = seconds.get(self.size.arch(BASE[0]))

        rows = []
        for printed in BASE_MODELS:
            job = job_of_arch(printed.arch)
            gigaflops = count_flops(job.pattern, job.sizes, SEGMENT, REMEMBERED) / 1e9
            of_model = seconds.get(self.size.arch(printed.arch))
            time = NOTHING
            share = NOTHING
            if of_model:
                time = milliseconds(of_model)
            if of_model and baseline:
                share = f"{of_model['median'] / baseline['median']:.2f}"
            rows.append(
                {
                    "model": printed.name,
                    "pattern": f"`{job.pattern}`",
                    "ms": time,
                    "ms (paper)": f"{printed.milliseconds:.1f}",
                    "of Transformer-XL's": share,
                    "of Transformer-XL's (paper)": f"{printed.milliseconds / BASE_MODELS[0].milliseconds:.2f}",
                    "PPL": self._perplexity(Training(WIKITEXT, printed.arch)),
                    "PPL (paper)": f"{printed.measure:.1f}",
                    "parameters": f"{job.parameters / 1e6:.0f}M",
                    "parameters (paper)": f"{printed.parameters}M",
                    "GFLOPs": f"{gigaflops:.1f}",
                    "GFLOPs (paper)": f"{printed.gigaflops}",
                }
            )

        blocks = [markdown_table(rows, left=("pattern",)), "Parameters and GFLOPs are for the paper's model sizes."]
        if not results.exists():
            blocks.append(missing("bench"))
        blocks.append(show_losses([self.out / "training" / arch for arch in BASE], report, "train_*"))
        return "\n\n".join(blocks)

    def large_models(self, _: Path) -> str:
        """Return Table 3."""
        rows = []
        for printed in TABLE_3:
            found = self._evaluation(Training(printed.corpus, printed.arch))
            time = NOTHING
            if found:
                time = f"{1000 * found['tgt_len'] / found['tokens_per_second']:.1f}"
            if printed.corpus == WIKITEXT:
                measure = self._perplexity(Training(printed.corpus, printed.arch))
                printed_measure = f"{printed.measure:.1f}"
            else:
                measure = f"{found['bits_per_token']:.3f}" if found else NOTHING
                printed_measure = f"{printed.measure:.2f}"
            rows.append(
                {
                    "text": printed.corpus,
                    "model": printed.name,
                    "pattern": f"`{CAUSAL_ARCHITECTURES[printed.arch].sublayer_pattern}`",
                    "ms per segment": time,
                    "ms (paper)": f"{printed.milliseconds:.1f}",
                    "PPL / bpc": measure,
                    "PPL / bpc (paper)": printed_measure,
                }
            )
        explanation = (
            "The time per segment is averaged over the test split, which is evaluated at batch size 1 in fp32."
        )
        return f"{markdown_table(rows, left=('model', 'pattern'))}\n\n{explanation}"

    def longer_training(self, _: Path) -> str:
        """Return Table 7."""
        short = self.size.updates_of(BASE[0])
        long = self.size.longer
        rows = []
        for printed in BASE_MODELS:
            training = Training(WIKITEXT, printed.arch)
            rows.append(
                {
                    "model": printed.name,
                    f"valid PPL at {short:,}": self._perplexity(training, "valid"),
                    "at 40k (paper)": f"{printed.valid_40k:.1f}",
                    f"valid PPL at {long:,}": self._perplexity(replace(training, is_longer=True), "valid"),
                    "at 140k (paper)": f"{printed.valid_140k:.1f}",
                }
            )
        return markdown_table(rows)


if __name__ == "__main__":
    write_texts(Path(sys.argv[1]))
