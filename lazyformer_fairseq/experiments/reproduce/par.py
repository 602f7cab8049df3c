"""PAR Transformer (arXiv 2009.04534): what is reproduced, in its size and in miniature, what it prints, and the steps.

Table 4, PAR BERT, is not among them: ``lazyformer pretrain --recipe phases`` and GLUE's and SQuAD's commands make it.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Optional

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation.planning import PAPER_TERAFLOPS
from lazyformer_fairseq.evaluation.planning.fit import Fit, Place, fit
from lazyformer_fairseq.evaluation.planning.job import Job, job_of_arch, with_options
from lazyformer_fairseq.experiments.demo.text import PROSE, write_prose
from lazyformer_fairseq.experiments.reproduce.engine import CLI, GB, Cost, Step
from lazyformer_fairseq.experiments.search.settings import SearchSettings
from lazyformer_fairseq.experiments.search.supernet import supernet_pattern
from lazyformer_fairseq.patterns.architectures import CAUSAL_ARCHITECTURES
from lazyformer_fairseq.storage.atomic import atomic_folder

WIKITEXT, ENWIK8, TEXT8 = CORPORA = ("wikitext-103", "enwik8", "text8")
PYTHONS_PROSE = "demo"
BASE = ("transformer_xl_base", "sandwich_transformer_base", "par_transformer_base")
LONGER = 140_000  # updates of Table 7
BYTES_OF_PARAMETER = 16  # in a checkpoint, all in 32 bits: weights, the optimizer's copy, two moments
BYTES_OF_STATE = 12  # the search's: weights and two moments in 32 bits
V100 = Place(1, 16 * 10**9, "fp32")  # the search's precision


class Printed(NamedTuple):
    """What the paper prints of a model.

    Attributes:
        measure: test perplexity on WikiText-103, else bits a character.
        milliseconds: latency on an A100.
    """

    name: str
    measure: float
    milliseconds: Optional[float] = None


TABLE_1 = {  # PPL of the base models by architecture, in the paper's order
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
TABLE_2 = dict(zip(BASE, (Printed("Transformer-XL Base", 22.7, 15.2), Printed("Sandwich Transformer Base", 22.6, 15.2),
                          Printed("PAR Transformer Base", 22.7, 9.9)), strict=True))  # fmt: skip
TABLE_3 = {
    (WIKITEXT, "transformer_xl_large"): Printed("Transformer-XL Large", 18.4, 18.9),
    (WIKITEXT, "sandwich_transformer_large"): Printed("Sandwich Transformer Large", 18.2, 18.9),
    (WIKITEXT, "par_transformer_large"): Printed("PAR Transformer Large", 18.4, 13.4),
    (ENWIK8, "transformer_xl_24b"): Printed("Transformer-XL 24B", 1.10, 12.5),
    (ENWIK8, "sandwich_transformer_24b"): Printed("Sandwich Transformer 24B", 1.11, 12.5),
    (ENWIK8, "par_transformer_24b"): Printed("PAR Transformer 24B", 1.11, 8.4),
    (TEXT8, "transformer_xl_24b"): Printed("Transformer-XL 24B", 1.18, 12.5),
    (TEXT8, "sandwich_transformer_24b"): Printed("Sandwich Transformer 24B", 1.19, 12.5),
    (TEXT8, "par_transformer_24b"): Printed("PAR Transformer 24B", 1.18, 8.4),
}
# By hyperparameter: of Transformer-XL, of the paper's base models, and what it is called in a row of ours.
TABLE_5 = {
    "d_model": (410, 512, "decoder_embed_dim"),
    "n_head": (10, 8, "decoder_attention_heads"),
    "d_head": (41, 64, "d_head"),
    "d_inner": (2100, 2048, "decoder_ffn_embed_dim"),
    "tgt_len": (150, 192, "tgt_len"),
    "mem_len": (150, 192, "mem_len"),
}
TABLE_6 = dict(zip(BASE, ((192, 27), (192, 27), (200, 17)), strict=True))  # millions of parameters, GFLOPs
TABLE_7 = dict(zip(BASE, ((23.3, 22.2), (23.4, 22.4), (23.3, 22.4)), strict=True))  # valid PPL at 40k, at 140k


@dataclass(frozen=True)
class Size:
    """How large everything is. Words are options of the commands.

    Attributes:
        pretraining, evaluation, bench, search: further options.
        updates: of each training; None for the arch's own.
        longer: of Table 7.
        flops_per_second: what the plan takes for the speed of one device.
    """

    pretraining: tuple[str, ...]
    evaluation: tuple[str, ...]
    bench: tuple[str, ...]
    search: tuple[str, ...]
    updates: Optional[int]
    longer: int
    flops_per_second: float
    is_tiny: bool = False

    def arch(self, name: str) -> str:
        return f"{name.removesuffix('_base')}_tiny" if self.is_tiny else name


PAPER = Size((), (), ("--rounds", "50"), (), None, LONGER, PAPER_TERAFLOPS * 1e12)
_NO_BANDS = ("--adaptive-softmax-cutoff", "")
_SHORT = ("--tgt-len", "16", "--mem-len", "16")
TINY = Size(
    pretraining=(
        *(*_SHORT, "--sequences-per-update", "8", "--sequences-per-gpu", "8", "--warmup-updates", "10"),
        *("--attention-backend", "eager", "--num-workers", "0", "--log-interval", "20", *_NO_BANDS),
    ),
    evaluation=("--tgt-len", "64", "--mem-len", "64", "--clamp-len", "40"),
    bench=("--rounds", "10"),
    search=(
        *("--batch-size", "8", "--max-updates", "60", "--constant-updates", "20", "--architecture-lr", "0.05"),
        *(*_SHORT, "--attention-backend", "eager", *_NO_BANDS),
    ),
    updates=60,
    longer=120,
    flops_per_second=5e9,  # of one core, at these sizes
    is_tiny=True,
)


def find_inputs(raw: str, size: Size, out: Path) -> dict[str, Path]:
    """The folders of texts by name, of a miniature as many as are there.

    Raises:
        UserError: one is missing.
    """
    if raw == PYTHONS_PROSE:
        if not size.is_tiny:
            raise UserError(f"{PYTHONS_PROSE}: is a megabyte of text, for --tiny alone; give a folder of texts")
        return {name: out / "raw" / name for name in CORPORA}
    found = {name: path for name in CORPORA if (path := Path(raw, name)).exists()}
    if (lacking := [name for name in CORPORA if name not in found]) and (not found or not size.is_tiny):
        scripts = ", ".join(f"scripts/prepare_{name.replace('-', '')}.sh {Path(raw, name)}" for name in lacking)
        raise UserError(f"{raw}: lacks {', '.join(lacking)}; {scripts} makes what is missing, or give a folder with it")
    return found


def write_texts(folder: Path) -> None:
    """Python's prose as three texts, whole or not at all: by words, and by characters with spaces between them."""
    with atomic_folder(folder) as unfinished:
        documents = write_prose(unfinished / PROSE).read_text(encoding="utf-8").splitlines()
        text = "\n".join(json.loads(line)["text"] for line in documents)
        for name, divide, held_out in ((WIKITEXT, str.split, 2_000), (ENWIK8, list, 4_000), (TEXT8, list, 4_000)):
            units = divide(text if name != TEXT8 else "".join(filter(str.isalpha, text.lower())))
            units = ["_" if unit.isspace() else unit for unit in units[:300_000]]
            ends = (0, held_out, 2 * held_out, len(units))
            for split, start, end in zip(("valid", "test", "train"), ends, ends[1:], strict=False):
                (unfinished / name).mkdir(exist_ok=True)
                (unfinished / name / f"wiki.{split}.tokens").write_text(" ".join(units[start:end]), encoding="utf-8")


def training_name(corpus: str, arch: str, updates: Optional[int] = None) -> str:
    """Of a training, as in the names of its steps."""
    return f"{arch}{'' if corpus == WIKITEXT else f'_{corpus}'}{'' if updates is None else '_longer'}"


class Places:
    """Folders in OUT."""

    def __init__(self, out: Path):
        self.out = out
        self.search, self.bench, self.report = (out / name for name in ("search", "bench", "report"))

    def training(self, name: str) -> Path:
        return self.out / "training" / name

    def evaluation(self, name: str, split: str) -> Path:
        return self.training(name) / f"{split}.json"


def steps(size: Size, inputs: Mapping[str, Path], out: Path) -> list[Step]:
    """All of them, in the order in which they run: first what Table 2 needs."""
    places, found, data = Places(out), [], dict(inputs)
    if size.is_tiny and inputs[next(iter(inputs))].parent == out / "raw":
        prose = (__name__, str(out / "raw"))
        found.append(Step("text", "Python's prose, by words and by characters", prose, out / "raw"))
    for name, path in inputs.items():
        if not (path / "manifest.json").exists():
            data[name] = out / "data" / name
            corpus = "wikitext" if size.is_tiny or name == WIKITEXT else name
            official = () if size.is_tiny else ("--official", name)
            command = (CLI, "lm", "prepare", corpus, str(path), str(data[name]), *official)
            needs = tuple(step.name for step in found[:1] if step.name == "text")
            found.append(Step(f"prepare_{name}", "text becomes data", command, data[name] / "manifest.json", needs))
    prepared = {step.name for step in found}
    timed = ",".join(map(size.arch, BASE))
    bench = (CLI, "bench", "models", "--arch", timed, *size.bench, "--output", str(places.bench))
    what = "latencies of Tables 2 and 6"
    found.append(Step("bench", what, bench, places.bench / "results.json", starts_anew=True))
    trainings = [(WIKITEXT, arch, None) for arch in dict.fromkeys((*BASE, *TABLE_1))]
    trainings += [(corpus, arch, None) for corpus, arch in TABLE_3] + [(WIKITEXT, arch, size.longer) for arch in BASE]
    for corpus, arch, updates in trainings:
        if corpus in data:
            needs = tuple({f"prepare_{corpus}"} & prepared)
            found += _training(size, places, data[corpus], (corpus, arch, updates), needs)
    if WIKITEXT in data:
        found.insert(len(prepared), _search(size, places, data[WIKITEXT], tuple({f"prepare_{WIKITEXT}"} & prepared)))
    return found


def _training(
    size: Size, places: Places, data: Path, training: tuple[str, str, Optional[int]], needs: tuple[str, ...]
) -> list[Step]:
    """Of a model, and its evaluation: on the test split, and of Table 7's on the validation split."""
    corpus, arch, longer = training
    name, updates = training_name(*training), longer or size.updates or CAUSAL_ARCHITECTURES[arch].updates
    folder, every = places.training(name), min(1000, max(1, updates // 3))
    command = (
        *(CLI, "pretrain", size.arch(arch), str(data), *size.pretraining, "--max-update", str(updates)),
        *("--save-interval-updates", str(every), "--keep-updates-list", str(updates), "--save-dir", str(folder)),
    )
    what = f"{arch} on {corpus}, {updates:,} updates"
    found = [Step(f"train_{name}", what, command, folder / f"checkpoint_update_{updates}.pt", needs)]
    lengths = size.evaluation or ("--lengths", next(each for each in ("large", "24b", "base") if each in arch))
    splits = () if longer else ("test",)
    for split in (*splits, *(("valid",) if corpus == WIKITEXT and arch in BASE else ())):
        file = places.evaluation(name, split)
        command = (CLI, "lm", "evaluate", str(folder / "checkpoint_best.pt"), str(data), "--split", split, *lengths)
        what = f"{arch} on {corpus}, {split} split, at batch 1"
        found.append(Step(f"{split}_{name}", what, (*command, "--json", str(file)), file, (f"train_{name}",)))
    return found


def _search(size: Size, places: Places, data: Path, needs: tuple[str, ...]) -> Step:
    arch, row = size.arch("transformer_xl_base"), CAUSAL_ARCHITECTURES["transformer_xl_base"]
    of_paper = ("--tgt-len", row.tgt_len, "--mem-len", row.mem_len, "--update-freq", supernet_fit().update_freq)
    sizes = size.search or map(str, of_paper)
    command = (
        *(CLI, "search", str(data), str(places.search), "--task", "language-model", "--arch", arch, *sizes),
        "--decoder-normalize-before",
    )
    return Step("search", "the supernet of Figure 1, and what it finds", command, places.search / "result.json", needs)


# --- What each costs, before any runs: arithmetic, not measurement


def supernet_job() -> Job:
    """PAR's search (section 2.2), as a training of all candidates of 32 layers."""
    settings = SearchSettings("", "language-model", "transformer_xl_base", "sf" * 16)
    pattern = supernet_pattern(settings.candidates, settings.layers)
    job = with_options(job_of_arch(settings.arch), {"sublayer_pattern": pattern, "decoder_normalize_before": True})
    return replace(job, per_update=settings.batch_size, max_update=settings.max_updates)


def supernet_fit(place: Place = V100) -> Fit:
    """The largest part of an update that fits a GPU."""
    return fit(supernet_job(), place)


def job_of(step: Step, size: Size) -> Job:
    """Of a training, as `lazyformer plan` counts it."""
    arch, words = step.command[2], step.command[4:]
    options = {name[2:].replace("-", "_"): value for name, value in zip(words[::2], words[1::2], strict=True)}
    return with_options(job_of_arch(arch, 5_000 if size.is_tiny else None), options)


def cost_of(step: Step, size: Size, speed: float) -> Cost:
    """By the step's name. The search is one process, at the speed of one device."""
    if step.name.startswith("train_"):
        job = job_of(step, size)
        return Cost(job.flops / speed / 3600, job.flops, job.checkpoints * BYTES_OF_PARAMETER * job.parameters / GB)
    if step.name == "search" and not size.is_tiny:
        job = supernet_job()
        return Cost(job.flops / size.flops_per_second / 3600, job.flops, BYTES_OF_STATE * job.parameters / GB)
    return Cost()


def as_json(size: Size, inputs: Mapping[str, Path]) -> dict[str, Any]:
    """What must stay the same when a reproduction is resumed."""
    raw = {name: str(path.absolute()) for name, path in inputs.items()}
    return {"paper": "PAR Transformer", "size": "tiny" if size.is_tiny else "paper", "raw": raw}


if __name__ == "__main__":
    write_texts(Path(sys.argv[1]))
