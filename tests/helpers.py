"""What tests share beside fixtures."""

import ast
import functools
import importlib.util
import json
import os
import random
import resource
import shlex
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Optional
from unittest import mock

import pytest
import torch

from lazyformer_fairseq.corpus.build import build_corpus
from lazyformer_fairseq.corpus.settings import CorpusSettings
from lazyformer_fairseq.data.glue import TASKS
from lazyformer_fairseq.data.labelled_files import Split, TaskDescription
from lazyformer_fairseq.data.text.dictionary_file import Dictionary
from lazyformer_fairseq.data.text.normalisation import TextNormaliser, TextSettings
from lazyformer_fairseq.data.text.tokenizer import Tokenizer
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation.inference import TrainedModel
from lazyformer_fairseq.executors import nvidia_smi
from lazyformer_fairseq.fairseq_plugin.reliability.command_line import WITH_FAIRSEQ, find_user_error
from lazyformer_fairseq.modules.networks.named import build
from lazyformer_fairseq.patterns.architectures import ARCHITECTURES
from lazyformer_fairseq.patterns.grammar import plan

ROOT = Path(__file__).resolve().parent.parent
ROOMS_WITH_FAIRSEQ = {"fairseq_plugin"}  # all else works without
PRETRAINING = "full_sentences_masked_lm --tokens-per-sample 32"
ASK_NVIDIA_SMI = nvidia_smi._ask.__wrapped__  # without the answers that it keeps

NVIDIA_SMI = """
capabilities=({capabilities})
[[ ${{#capabilities[@]}} -gt 0 ]] || {{ echo "No devices were found"; exit 6; }}
case $1 in
  -L) printf 'GPU 0: NVIDIA of compute capability %s\n  MIG 1g.5gb\n' "${{capabilities[@]}}" ;;
  --query-gpu=compute_cap)
    {knows} || {{ echo 'Field "compute_cap" is not a valid field to query.'; exit 2; }}
    printf '%s\\n' "${{capabilities[@]}}" ;;
  --query-gpu=driver_version) printf '{driver}%.0s\n' "${{capabilities[@]}}" ;;
  *) exit 9 ;;
esac
"""


def false_nvidia_smi(
    folder: Path, monkeypatch, *capabilities: str, driver: str = "580.65.06", knows_capabilities: bool = True
) -> None:
    """Puts an nvidia-smi first on the PATH that shows a GPU of each of the compute capabilities."""
    program = folder / "false_nvidia_smi" / "nvidia-smi"
    known = {"capabilities": " ".join(capabilities), "driver": driver, "knows": str(knows_capabilities).lower()}
    write_program(program, NVIDIA_SMI.format(**known))
    monkeypatch.setenv("PATH", os.pathsep.join([str(program.parent), os.environ["PATH"]]))
    monkeypatch.setattr(nvidia_smi, "_ask", ASK_NVIDIA_SMI)


def write_program(path: Path, script: str) -> None:
    """A script of bash that can be called."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{script}\n")
    path.chmod(0o755)


def run_script(name: str, *arguments: object, **options: Any) -> subprocess.CompletedProcess:
    """A shell script of scripts/; `options` are those of subprocess.run."""
    command = ["bash", str(ROOT / "scripts" / name), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, **options)


def load_script(place: Path | str) -> ModuleType:
    """A Python file of no package, loaded anew; a name is that of one in scripts/."""
    path = place if isinstance(place, Path) else ROOT / "scripts" / f"{place}.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def golden_experiments(of_what: str) -> dict[str, list[float]]:
    """What experiments came to when fairseq's trainer ran them; see ``fixtures/README.md``."""
    return json.loads((ROOT / "tests" / "fixtures" / "golden_experiments.json").read_text())[of_what]


@functools.cache
def syntax_tree(path: Path) -> ast.Module:
    """Return the tree of a file of Python, which several tests read."""
    return ast.parse(path.read_bytes())


def mostly_slow(values: Iterable[Any], *quick: Any) -> list[Any]:
    """Values of a parameter, all but the quick ones for the slow tests."""
    return [value if value in quick else pytest.param(value, marks=pytest.mark.slow) for value in values]


NAMES = ["anna", "ben", "cara", "dan", "eva", "finn", "gina", "hugo", "ida", "jan", "kim", "lea", "max", "nina", "otto"]
VERBS = ["sees", "likes", "calls", "hears", "helps", "finds", "meets", "knows", "thanks", "asks"]
THINGS = ["house", "garden", "river", "letter", "window", "bridge", "market", "forest", "island", "mirror"]


def toy_texts(count: int, seed: int = 1) -> list[str]:
    """Documents of short sentences that a tiny model can learn a little of."""
    rng = random.Random(seed)

    def sentence() -> str:
        first, second = rng.sample(NAMES, 2)
        return rng.choice(
            [
                f"{first.title()} {rng.choice(VERBS)} {second.title()} near the {rng.choice(THINGS)}.",
                f"The {rng.choice(THINGS)} of {first.title()} is behind the old {rng.choice(THINGS)}.",
                f"{first.title()} and {second.title()} walk to the {rng.choice(THINGS)} together.",
            ]
        )

    return [" ".join(sentence() for _ in range(rng.randint(4, 12))) for _ in range(count)]


def build_toy_corpus(
    folder: Path, vocab_size: int, seed: int = 1, shards: int = 1, unit_megabytes: float = 0.01
) -> dict[str, Any]:
    """Builds a corpus of 150 toy documents; returns its manifest."""
    text = folder.with_name(f"{folder.name}.txt")
    text.write_text("\n\n".join(toy_texts(150, seed)))
    settings = CorpusSettings(
        vocab_size, word_coverage=1.0, valid_share=0.1, shards=shards, unit_megabytes=unit_megabytes
    )
    return build_corpus([str(text)], folder, settings)


def count_words(sentences: Iterable[str]) -> list[tuple[str, int]]:
    """The distinct words of normalised sentences, and how often each occurs."""
    return list(Counter(word for sentence in sentences for word in sentence.split()).items())


def train_tokenizer(folder: Path, sentences: Iterable[str], vocab_size: int, settings: TextSettings) -> Tokenizer:
    """A tokenizer trained on raw text."""
    counts = count_words(map(TextNormaliser(settings), sentences))
    return Tokenizer.train_on_counts(counts, folder, vocab_size, settings)


def write_toy_glue(folder: Path, train: int = 120, valid: int = 40) -> Path:
    """Files of GLUE's official layout for every task that can be fine-tuned. Returns `folder`.

    Classes take turns from sentence to sentence; a sentence of class 1 starts with "the". A score is 4.999 or 0.
    """
    sentences = [f"{name} sees the {thing}" for name in NAMES for thing in THINGS]
    rows = {"train": sentences[:train], "valid": sentences[train : train + valid], "test": ["the garden sees Anna"]}
    for task in TASKS.values():
        if "train" in task.splits:
            for name, split in task.splits.items():
                write_lines(folder / task.folder / split.file, _lines(task, split, rows[name.rstrip("1")]))
    return folder


def write_lines(path: Path, lines: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines))


def _lines(task: TaskDescription, split: Split, sentences: list[str]) -> list[str]:
    """One a sentence; a pair is the sentence twice. Columns without a name (CoLA) stand at their numbers."""
    labels = task.labels or ("0", "4.999")
    columns = [*split.texts, *([split.label] if split.label is not None else [])]
    lines = ["\t".join(columns)] if split.has_header else []
    for number, sentence in enumerate(sentences):
        which = number % len(labels)
        text = f"the {sentence}" if which == 1 else sentence
        fields = dict.fromkeys(columns, text)
        if split.label is not None:
            fields[split.label] = labels[which]
        if not split.has_header:
            fields = {column: fields.get(column, "") for column in range(max(columns) + 1)}
        lines.append("\t".join(fields.values()))
    return lines


def count_parameters(arch: str, vocab_size: int = 0) -> int:
    """Parameters of a named model, counted without making them; of the paper's vocabulary if no other is given."""
    with torch.device("meta"):
        model = build(arch, vocab_size or (32_768 if arch in ARCHITECTURES else 267_735))
    return sum(parameter.numel() for parameter in model.parameters())


@functools.cache
def dictionary_of(size: int) -> Dictionary:
    """One of so many symbols."""
    dictionary = Dictionary()
    while len(dictionary) < size:
        dictionary.add_symbol(f"word{len(dictionary)}")
    return dictionary


@torch.no_grad()
def head_logits(model: TrainedModel, head: str, *texts: str, **options: Any) -> torch.Tensor:
    """Return what a head of a trained model gives for texts."""
    return model.model(model.encode(*texts), classification_head_name=head, **options)[0]


def assert_equal_state(one, other, name="checkpoint"):
    """Of two nested containers of tensors and values, bit for bit; `name` tells where they differ."""
    assert type(one) is type(other), name
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), name
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), name
        for key in one:
            assert_equal_state(one[key], other[key], f"{name}.{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), name
        for number, (part, other_part) in enumerate(zip(one, other, strict=True)):
            assert_equal_state(part, other_part, f"{name}[{number}]")
    else:
        assert one == other, name


def train_words(data: Path | str, options: str, save_dir: Path, task: str = PRETRAINING) -> list[str]:
    """What follows ``fairseq-train`` on a command line, for a tiny run on the processor."""
    return shlex.split(
        f"{shlex.quote(str(data))} --user-dir {ROOT / 'lazyformer_fairseq'} --task {task} --cpu --optimizer fused_adam "
        f"--lr-scheduler linear_warmup --lr 1e-3 --save-dir {shlex.quote(str(save_dir))} --num-workers 0 "
        f"--log-format simple --log-interval 100 --no-epoch-checkpoints {options}"
    )


def train_in_two_processes(
    words: list[str], port: int, program: tuple[str, ...] = ("-m", "fairseq_cli.train")
) -> subprocess.CompletedProcess:
    """Under torchrun; `words` are those of :func:`train_words`."""
    launcher = f"{sys.executable} -m torch.distributed.run --nproc-per-node 2 --master-port {port}".split()
    world = "--distributed-world-size 2 --distributed-backend gloo --ddp-backend legacy_ddp".split()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    return subprocess.run([*launcher, *program, *words, *world], capture_output=True, text=True, env=environment)


def train_here(*words: object, command: Optional[Callable[[], None]] = None) -> None:
    """fairseq-train (or fairseq-hydra-train) in this process, as the command would run it."""
    from fairseq import checkpoint_utils
    from fairseq_cli.train import cli_main

    if hasattr(checkpoint_utils.save_checkpoint, "best"):  # fairseq keeps the best loss of the process
        del checkpoint_utils.save_checkpoint.best
    quiet = mock.patch("fairseq_cli.train.logger.info")  # the model and the config, printed whole
    with mock.patch("sys.argv", ["fairseq-train", *map(str, words)]), quiet:
        (command or cli_main)()


@contextmanager
def stopped_at(update: int) -> Iterator[None]:
    """Ctrl-C, as soon as a training in this process has made so many updates."""
    from fairseq.trainer import Trainer

    train_step = Trainer.train_step

    def step(trainer, *arguments, **options):
        if trainer.get_num_updates() == update:
            raise KeyboardInterrupt
        return train_step(trainer, *arguments, **options)

    with mock.patch.object(Trainer, "train_step", step), pytest.raises(KeyboardInterrupt):
        yield


def updates_of(checkpoint: Path | dict) -> int:
    """How many a checkpoint, or its file, has behind it."""
    state = checkpoint if isinstance(checkpoint, dict) else torch.load(checkpoint)
    return state["optimizer_history"][-1]["num_updates"]


def message_of(run: Callable[..., object], *arguments, **options) -> str:
    """The user error that a run ends with, found as the command line finds it."""
    with pytest.raises(Exception) as caught:
        run(*arguments, **options)
    error = find_user_error(caught.value)
    assert isinstance(error, UserError), repr(caught.value)
    return str(error)


def lack_of_fairseq(error: Optional[BaseException]) -> Optional[str]:
    """Why a test cannot run where there is no fairseq; None where the package lacks it that should do without."""
    while error is not None and importlib.util.find_spec("fairseq") is None:
        if "requires fairseq, which is not installed" in str(error):
            return "what it runs says that it needs fairseq"
        if isinstance(error, ModuleNotFoundError) and error.name in WITH_FAIRSEQ:
            *_, place = (
                Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__) if "<" not in frame.filename
            )
            inside = (
                place.relative_to(ROOT / "lazyformer_fairseq").parts
                if place.is_relative_to(ROOT / "lazyformer_fairseq")
                else ()
            )
            return None if inside and inside[0] not in ROOMS_WITH_FAIRSEQ else f"{place.name} imports {error.name}"
        error = error.__cause__ or error.__context__
    return None


PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
}


def assert_refused(pattern: str, under: str, why: str, direction: Optional[str] = None) -> None:
    """A pattern is refused: the message says why, and its caret stands where `under` first begins."""
    with pytest.raises(UserError) as caught:
        plan(pattern, direction)
    *_, shown, caret = str(caught.value).splitlines()
    assert why in str(caught.value)
    assert caret.index("^") - shown.index(pattern) == pattern.index(under)


def write_toy_wikitext(folder: Path) -> Path:
    """wiki.train.tokens and so on: words with spaces around, an empty line after each text. Returns `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, (split, texts) in enumerate({"train": 40, "valid": 6, "test": 6}.items()):
        lines = (text.replace(".", " .") for text in toy_texts(texts, seed=number))
        (folder / f"wiki.{split}.tokens").write_text("".join(f" {line} \n \n" for line in lines))
    return folder


@contextmanager
def largest_file(size: int):
    """The system's limit for this process; a write beyond it fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
