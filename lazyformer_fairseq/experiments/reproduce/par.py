"""PAR Transformer (arXiv 2009.04534): what the paper prints, the steps that reproduce it, and the sections of the page.

Table 4, PAR BERT, is not among them: ``lazyformer pretrain --recipe phases`` and the commands for GLUE and SQuAD make
it. Table 5 lists hyperparameters, which patterns/architectures.py has.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Optional

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation.bench.run import milliseconds
from lazyformer_fairseq.evaluation.bench.settings import REMEMBERED, SEGMENT
from lazyformer_fairseq.evaluation.costs.flops import count_flops, makers_of_blocks
from lazyformer_fairseq.evaluation.planning import PAPER_TERAFLOPS
from lazyformer_fairseq.evaluation.planning.job import job_of_arch
from lazyformer_fairseq.experiments.prose import PROSE, write_prose
from lazyformer_fairseq.experiments.reproduce.engine import (
    CLI,
    PYTHONS_PROSE,
    Reproduction,
    Section,
    Step,
    missing,
    option_words,
    show_losses,
    show_picture,
)
from lazyformer_fairseq.experiments.search.report import report_of
from lazyformer_fairseq.patterns.architectures import CAUSAL_ARCHITECTURES
from lazyformer_fairseq.report.numbers import NOTHING
from lazyformer_fairseq.report.tables import markdown_table
from lazyformer_fairseq.storage.atomic import atomic_folder
from lazyformer_fairseq.storage.json_files import read_json

CORPORA = ("wikitext-103", "enwik8", "text8")
WIKITEXT = CORPORA[0]
BASE = ("transformer_xl_base", "sandwich_transformer_base", "par_transformer_base")
KEPT_CHECKPOINTS = 6  # the last three, best, last, and that of the last update


class Printed(NamedTuple):
    """What the paper prints of a model.

    Attributes:
        name: of the model in the paper.
        measure: test perplexity on WikiText-103, else bits per character.
        milliseconds: latency on an A100.
    """

    name: str
    measure: float
    milliseconds: float


class PrintedBase(NamedTuple):
    """What the paper prints of a base model beside Table 2.

    Attributes:
        parameters: in millions (Table 6).
        gigaflops: (Table 6).
        valid_40k, valid_140k: validation perplexity after so many updates (Table 7).
    """

    parameters: int
    gigaflops: int
    valid_40k: float
    valid_140k: float


TABLE_1 = {  # test perplexity of the base models by architecture, in the paper's order
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
TABLE_2 = {
    "transformer_xl_base": Printed("Transformer-XL Base", 22.7, 15.2),
    "sandwich_transformer_base": Printed("Sandwich Transformer Base", 22.6, 15.2),
    "par_transformer_base": Printed("PAR Transformer Base", 22.7, 9.9),
}
TABLE_3 = {
    (WIKITEXT, "transformer_xl_large"): Printed("Transformer-XL Large", 18.4, 18.9),
    (WIKITEXT, "sandwich_transformer_large"): Printed("Sandwich Transformer Large", 18.2, 18.9),
    (WIKITEXT, "par_transformer_large"): Printed("PAR Transformer Large", 18.4, 13.4),
    ("enwik8", "transformer_xl_24b"): Printed("Transformer-XL 24B", 1.10, 12.5),
    ("enwik8", "sandwich_transformer_24b"): Printed("Sandwich Transformer 24B", 1.11, 12.5),
    ("enwik8", "par_transformer_24b"): Printed("PAR Transformer 24B", 1.11, 8.4),
    ("text8", "transformer_xl_24b"): Printed("Transformer-XL 24B", 1.18, 12.5),
    ("text8", "sandwich_transformer_24b"): Printed("Sandwich Transformer 24B", 1.19, 12.5),
    ("text8", "par_transformer_24b"): Printed("PAR Transformer 24B", 1.18, 8.4),
}
TABLES_6_AND_7 = {
    "transformer_xl_base": PrintedBase(192, 27, 23.3, 22.2),
    "sandwich_transformer_base": PrintedBase(192, 27, 23.4, 22.4),
    "par_transformer_base": PrintedBase(200, 17, 23.3, 22.4),
}


@dataclass(frozen=True)
class Size:
    """How large everything is.

    Attributes:
        pretraining, evaluation, bench, search: further options of the commands.
        updates: of each training; None for the architecture's own.
        longer: updates of Table 7.
        flops_per_second: speed that the plan assumes for one device.
        is_tiny: whether it is the miniature.
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
        """Return the architecture that is trained."""
        if self.is_tiny:
            return f"{name.removesuffix('_base')}_tiny"
        return name

    def updates_of(self, arch: str) -> int:
        """Return the updates of a training that is not the longer one."""
        return self.updates or CAUSAL_ARCHITECTURES[arch].updates


PAPER = Size(
    pretraining={},
    evaluation={},
    bench={"rounds": 50},
    # An update of 128 streams in 32 layers of s, f and identity in fp32 takes 62 GB; an eighth of it fits a V100.
    search={"tgt-len": 192, "mem-len": 192, "update-freq": 8},
    updates=None,
    longer=140_000,
    flops_per_second=PAPER_TERAFLOPS * 1e12,
)
TINY = Size(
    pretraining={
        "tgt-len": 16,
        "mem-len": 16,
        "sequences-per-update": 8,
        "sequences-per-gpu": 8,
        "warmup-updates": 10,
        "attention-backend": "eager",
        "num-workers": 0,
        "log-interval": 20,
        "adaptive-softmax-cutoff": "",
    },
    evaluation={"tgt-len": 64, "mem-len": 64, "clamp-len": 40},
    bench={"rounds": 10},
    search={
        "batch-size": 8,
        "max-updates": 60,
        "constant-updates": 20,
        "architecture-lr": 0.05,
        "tgt-len": 16,
        "mem-len": 16,
        "attention-backend": "eager",
        "adaptive-softmax-cutoff": "",
    },
    updates=60,
    longer=120,
    flops_per_second=5e9,  # of one core, at these sizes
    is_tiny=True,
)


@dataclass(frozen=True)
class Training:
    """A training of the tables.

    Attributes:
        corpus: of CORPORA.
        arch: of CAUSAL_ARCHITECTURES.
        is_longer: whether it is one of Table 7.
    """

    corpus: str
    arch: str
    is_longer: bool = False

    @property
    def name(self) -> str:
        """The name of its folder and steps."""
        if self.corpus == WIKITEXT:
            corpus = ""
        else:
            corpus = f"_{self.corpus}"
        return f"{self.arch}{corpus}{'_longer' if self.is_longer else ''}"


def find_inputs(raw: str, size: Size, out: Path) -> dict[str, Path]:
    """Return the folders of texts by name; of a miniature as many as are there.

    Raises:
        UserError: one is missing.
    """
    if raw == PYTHONS_PROSE:
        if not size.is_tiny:
            raise UserError(f"{PYTHONS_PROSE}: is a megabyte of text, for --tiny alone; give a folder of texts")
        return {name: out / "raw" / name for name in CORPORA}
    found = {name: Path(raw, name) for name in CORPORA if Path(raw, name).exists()}
    lacking = [name for name in CORPORA if name not in found]
    if lacking and not (size.is_tiny and found):
        scripts = ", ".join(f"scripts/prepare_{name.replace('-', '')}.sh {Path(raw, name)}" for name in lacking)
        raise UserError(f"{raw}: lacks {', '.join(lacking)}; {scripts} makes what is missing, or give a folder with it")
    return found


def write_texts(folder: Path) -> None:
    """Write Python's prose as three texts, whole or not at all: one by words, two by characters with spaces between."""
    with atomic_folder(folder) as unfinished:
        documents = write_prose(unfinished / PROSE).read_text(encoding="utf-8").splitlines()
        text = "\n".join(json.loads(line)["text"] for line in documents)
        letters = [character for character in text.lower() if character.isalpha()]
        for name, units, held_out in (
            ("wikitext-103", text.split(), 2_000),
            ("enwik8", ["_" if character.isspace() else character for character in text], 4_000),
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
        size: of everything.
        inputs: folders of texts by name.
        out: folder of the results.
    """
    page = _Page(size, out)
    introduction = (
        "Columns marked (paper) are printed in arXiv 2009.04534, with latencies of an A100; all others were measured "
        f"here, with one seed each. Texts: {', '.join(inputs)}."
    )
    if size.is_tiny:
        introduction = (
            "**This shows that everything runs, not which model is better**: models are 32 wide, with segments and "
            f"memory of 16 tokens, 8 streams and {size.updates} updates. The paper's numbers are those of other "
            f"texts.\n\n{introduction}"
        )
    return Reproduction(
        paper="PAR Transformer",
        settings={
            "paper": "PAR Transformer",
            "size": "tiny" if size.is_tiny else "paper",
            "raw": {name: str(path.absolute()) for name, path in inputs.items()},
        },
        steps=list_steps(size, inputs, out),
        sections=[
            Section("Figures 1 and 2: the supernet, and what it finds", page.search),
            Section("Table 1: how much attention a model needs", page.attention),
            Section("Tables 2 and 6: base models", page.base_models),
            Section("Table 3: large models, and models of characters", page.large_models),
            Section("Table 7: longer training", page.longer_training),
        ],
        introduction=introduction,
        note="",
        flops_per_second=size.flops_per_second,
        is_tiny=size.is_tiny,
    )


def list_steps(size: Size, inputs: Mapping[str, Path], out: Path) -> list[Step]:
    """Return all steps, in the order in which they run: first those that Table 2 needs."""
    steps = []
    data = dict(inputs)
    needs: dict[str, tuple[str, ...]] = dict.fromkeys(inputs, ())
    raw = out / "raw"
    is_prose = all(path.parent == raw for path in inputs.values())
    if is_prose:
        command = (__name__, str(raw))
        steps.append(Step("text", "Python's prose, by words and by characters", command, raw))
    for name, path in inputs.items():
        if (path / "manifest.json").exists():
            continue
        data[name] = out / "data" / name
        kind = name
        official = ("--official", name)
        if size.is_tiny:
            official = ()
        if size.is_tiny or name == WIKITEXT:
            kind = "wikitext"
        command = (CLI, "lm", "prepare", kind, str(path), str(data[name]), *official)
        if is_prose:
            before = ("text",)
        else:
            before = ()
        steps.append(Step(f"prepare_{name}", "text becomes data", command, data[name] / "manifest.json", before))
        needs[name] = (f"prepare_{name}",)

    if WIKITEXT in data:
        options = {
            "task": "language-model",
            "arch": size.arch("transformer_xl_base"),
            **size.search,
        }
        folder = out / "search"
        command = (CLI, "search", str(data[WIKITEXT]), str(folder), *option_words(options))
        what = "the supernet of Figure 1, and what it finds"
        result = folder / "result.json"
        steps.append(Step("search", what, (*command, "--decoder-normalize-before"), result, needs[WIKITEXT]))
    options = {"arch": ",".join(map(size.arch, BASE)), **size.bench, "output": out / "bench"}
    command = (CLI, "bench", "models", *option_words(options))
    results = out / "bench" / "results.json"
    steps.append(Step("bench", "latencies of Tables 2 and 6", command, results, starts_anew=True))

    trainings = [Training(WIKITEXT, arch) for arch in dict.fromkeys((*BASE, *TABLE_1))]
    trainings += [Training(corpus, arch) for corpus, arch in TABLE_3]
    trainings += [Training(WIKITEXT, arch, is_longer=True) for arch in BASE]
    for training in trainings:
        if training.corpus in data:
            steps += _training_steps(size, training, data[training.corpus], out, needs[training.corpus])
    return steps


def _training_steps(size: Size, training: Training, data: Path, out: Path, needs: tuple[str, ...]) -> list[Step]:
    """Return a training and its evaluations: on the test split, and of Table 7's models on the validation split."""
    arch = training.arch
    if training.is_longer:
        updates = size.longer
    else:
        updates = size.updates_of(arch)
    folder = out / "training" / training.name
    options = {
        **size.pretraining,
        "max-update": updates,
        "save-interval-updates": min(1000, max(1, updates // 3)),
        "keep-updates-list": updates,
        "save-dir": folder,
    }
    step = Step(
        name=f"train_{training.name}",
        what=f"{arch} on {training.corpus}, {updates:,} updates",
        command=(CLI, "pretrain", size.arch(arch), str(data), *option_words(options)),
        makes=folder / f"checkpoint_update_{updates}.pt",
        needs=needs,
        checkpoints=KEPT_CHECKPOINTS,
    )
    if training.is_longer:
        splits = []
    else:
        splits = ["test"]
    if training.corpus == WIKITEXT and arch in BASE:
        splits.append("valid")
    lengths = next(length for length in ("large", "24b", "base") if length in arch)
    steps = [step]
    for split in splits:
        file = folder / f"{split}.json"
        options = {"split": split, **(size.evaluation or {"lengths": lengths}), "json": file}
        command = (CLI, "lm", "evaluate", str(folder / "checkpoint_best.pt"), str(data), *option_words(options))
        what = f"{arch} on {training.corpus}, {split} split, at batch 1"
        steps.append(Step(f"{split}_{training.name}", what, command, file, (step.name,)))
    return steps


class _Page:
    """The sections of the page: what was measured here beside what the paper prints."""

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
        """Return the report of the search, with its picture."""
        result = self.out / "search" / "result.json"
        if not result.exists():
            return missing("search")
        picture = self.out / "search" / "probabilities.png"
        shown = show_picture(picture, report, "probability of each block in each layer")
        return f"{shown}\n\n{report_of(read_json(result))}"

    def attention(self, _: Path) -> str:
        """Return Table 1."""
        rows = []
        for arch, printed in TABLE_1.items():
            pattern = CAUSAL_ARCHITECTURES[arch].sublayer_pattern
            rows.append(
                {
                    "s": str(len(list(makers_of_blocks(pattern)))),
                    "pattern": f"`{pattern}`",
                    "PPL": self._perplexity(Training(WIKITEXT, arch)),
                    "PPL (paper)": f"{printed:.1f}",
                }
            )
        return markdown_table(rows, left=("pattern",))

    def base_models(self, report: Path) -> str:
        """Return Tables 2 and 6, and the losses of these trainings."""
        results = self.out / "bench" / "results.json"
        if results.exists():
            cells = read_json(results)["cells"]
        else:
            cells = []
        seconds = {
            row["model"]: row["seconds"] for cell in cells for row in cell["rows"] if cell["workload"] == "causal"
        }
        baseline = seconds.get(self.size.arch(BASE[0]))
        printed_baseline = TABLE_2[BASE[0]].milliseconds
        rows = []
        for arch, printed in TABLE_2.items():
            job = job_of_arch(arch)
            gigaflops = count_flops(job.pattern, job.sizes, SEGMENT, REMEMBERED) / 1e9
            of_model = seconds.get(self.size.arch(arch))
            share = NOTHING
            if of_model and baseline:
                share = f"{of_model['median'] / baseline['median']:.2f}"
            rows.append(
                {
                    "model": printed.name,
                    "pattern": f"`{job.pattern}`",
                    "ms": milliseconds(of_model) if of_model else NOTHING,
                    "ms (paper)": f"{printed.milliseconds:.1f}",
                    "of Transformer-XL's": share,
                    "of Transformer-XL's (paper)": f"{printed.milliseconds / printed_baseline:.2f}",
                    "PPL": self._perplexity(Training(WIKITEXT, arch)),
                    "PPL (paper)": f"{printed.measure:.1f}",
                    "parameters": f"{job.parameters / 1e6:.0f}M",
                    "parameters (paper)": f"{TABLES_6_AND_7[arch].parameters}M",
                    "GFLOPs": f"{gigaflops:.1f}",
                    "GFLOPs (paper)": f"{TABLES_6_AND_7[arch].gigaflops}",
                }
            )
        blocks = [markdown_table(rows, left=("pattern",)), "Parameters and GFLOPs are counted at the paper's size."]
        if not cells:
            blocks.append(missing("bench"))
        blocks.append(show_losses([self.out / "training" / arch for arch in BASE], report, "train_*"))
        return "\n\n".join(blocks)

    def large_models(self, _: Path) -> str:
        """Return Table 3."""
        rows = []
        for (corpus, arch), printed in TABLE_3.items():
            has_words = corpus == WIKITEXT
            found = self._evaluation(Training(corpus, arch))
            time = NOTHING
            measure = NOTHING
            if found:
                time = f"{1000 * found['tgt_len'] / found['tokens_per_second']:.1f}"
                if has_words:
                    measure = f"{found['perplexity']:.1f}"
                else:
                    measure = f"{found['bits_per_token']:.3f}"
            rows.append(
                {
                    "text": corpus,
                    "model": printed.name,
                    "pattern": f"`{CAUSAL_ARCHITECTURES[arch].sublayer_pattern}`",
                    "ms per segment": time,
                    "ms (paper)": f"{printed.milliseconds:.1f}",
                    "PPL / bpc": measure,
                    "PPL / bpc (paper)": f"{printed.measure:.1f}" if has_words else f"{printed.measure:.2f}",
                }
            )
        explanation = (
            "The time of a segment is the mean over the evaluation of the test split, at batch 1 in single precision."
        )
        return f"{markdown_table(rows, left=('model', 'pattern'))}\n\n{explanation}"

    def longer_training(self, _: Path) -> str:
        """Return Table 7."""
        short = self.size.updates_of(BASE[0])
        long = self.size.longer
        rows = []
        for arch, printed in TABLES_6_AND_7.items():
            rows.append(
                {
                    "model": TABLE_2[arch].name,
                    f"valid PPL at {short:,}": self._perplexity(Training(WIKITEXT, arch), "valid"),
                    "at 40k (paper)": f"{printed.valid_40k:.1f}",
                    f"valid PPL at {long:,}": self._perplexity(Training(WIKITEXT, arch, is_longer=True), "valid"),
                    "at 140k (paper)": f"{printed.valid_140k:.1f}",
                }
            )
        return markdown_table(rows)


def main(words: Sequence[str]) -> None:
    """Write Python's prose as three texts into the folder that is given."""
    write_texts(Path(words[0]))


if __name__ == "__main__":
    main(sys.argv[1:])
