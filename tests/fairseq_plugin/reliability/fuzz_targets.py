"""What is fuzzed: each reader of a file that somebody else may have written, with valid files to start from.

A target takes bytes, and raises nothing but our own errors. The tests feed it by hypothesis.
"""

import bz2
import gzip
import hashlib
import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import zstandard
from helpers import write_toy_glue
from other_tokenizers import write_bert_files, write_roberta_files
from toy_squad import write_toy_squad

from lazyformer_fairseq.corpus.build import finished_manifest
from lazyformer_fairseq.corpus.readers.files import Piece
from lazyformer_fairseq.corpus.readers.formats import FORMATS, read_piece
from lazyformer_fairseq.corpus.readers.inputs import find_inputs
from lazyformer_fairseq.data.datasets.question_windows import WindowSettings
from lazyformer_fairseq.data.glue import TASKS, read_split
from lazyformer_fairseq.data.prepared_folder import PreparedTask
from lazyformer_fairseq.data.squad import SPLITS, read_squad
from lazyformer_fairseq.data.text.dictionary_file import load_dictionary
from lazyformer_fairseq.data.text.library_tokenizer import PIECES_FILE, LibraryTokenizer, adopt_tokenizer
from lazyformer_fairseq.data.text.tokenizer import DICTIONARY_FILE, MODEL_FILE, SETTINGS_FILE, Tokenizer, load_tokenizer
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.models.lazyformer import LazyFormerModel
from lazyformer_fairseq.fairseq_plugin.reliability.checkpoints import read_setting
from lazyformer_fairseq.fairseq_plugin.reliability.data import check_shards, check_totals
from lazyformer_fairseq.finetuning.results import read_results
from lazyformer_fairseq.finetuning.squad_data import PreparedSquad, prepare_squad
from lazyformer_fairseq.finetuning.tasks.glue import BENCHMARK as GLUE
from lazyformer_fairseq.patterns.grammar import plan
from lazyformer_fairseq.storage.indexed_format import check_items, read_index


@dataclass(frozen=True)
class Target:
    """``read`` takes the bytes of a file; ``seeds`` are valid ones; ``inputs`` is how many the full test gives it."""

    read: Callable[[bytes], object]
    seeds: tuple[bytes, ...]
    inputs: int

    def __call__(self, content: bytes) -> None:
        with suppress(UserError):
            self.read(content)


def make_targets(folder: Path, corpus: Path, exported: Path) -> dict[str, Target]:
    """All targets.

    Args:
        folder: to write in.
        corpus: that ``lazyformer corpus`` wrote.
        exported: a model that ``lazyformer export`` wrote.
    """
    return {
        "pattern": Target(
            lambda content: plan(content.decode("latin-1")), (b"M2x6", b"(sff)x5 (f)x9", b"sf(lf)x4 ((s)x9)x9"), 30_000
        ),
        "setting": Target(
            lambda content: read_setting(content.decode("latin-1")),
            (b"[(512, 3), (512, 2)]", b"(0.9, 0.999)", b"{'a': -1e3, 'b': None}"),
            15_000,
        ),
        "dictionary": _file_target(
            folder / "dict.txt", load_dictionary, (b"the 5\nof 4\n<x> 3\nof 3 #fairseq:overwrite\n",), 15_000
        ),
        **_tsv_targets(folder / "glue", 3_000),
        **_corpus_targets(folder, corpus),
        **_tokenizer_targets(folder / "tokenizer", corpus / "tokenizer"),
        **_other_tokenizer_targets(folder / "other_tokenizer"),
        **_exported_targets(folder / "exported", exported),
        "prepared GLUE manifest": _prepared_target(folder / "prepared", corpus),
        **_squad_targets(folder / "squad", corpus / "tokenizer"),
        **_result_targets(folder / "results"),
        **_document_targets(folder),
    }


def _file_target(path: Path, read: Callable[[Path], object], seeds: tuple[bytes, ...], inputs: int) -> Target:
    """A reader of one file; where others stand beside it, they stay as they are."""

    def write_and_read(content: bytes) -> None:
        path.write_bytes(content)
        read(path)

    return Target(write_and_read, seeds, inputs)


def _tsv_targets(folder: Path, inputs: int) -> dict[str, Target]:
    write_toy_glue(folder, train=4, valid=3)
    chosen = {"CoLA": "train", "MRPC": "train", "STS-B": "valid", "MNLI": "test", "QNLI": "train"}
    targets = {}
    for name, split in chosen.items():
        task = TASKS[name]
        path = folder / task.folder / task.splits[split].file
        targets[f"TSV of {name}"] = _file_target(
            path,
            lambda path, task=task, split=split: read_split(task, path.parent, split),
            (path.read_bytes(),),
            inputs,
        )
    return targets


def _corpus_targets(folder: Path, corpus: Path) -> dict[str, Target]:
    copy = Path(shutil.copytree(corpus, folder / "corpus"))
    shards = sorted(map(str, copy.glob("shard*")))
    content = (copy / "manifest.json").read_bytes()
    plan_of_corpus = {name: json.loads(content)[name] for name in ("settings", "versions", "inputs")}

    def read_manifest(path: Path) -> None:
        with suppress(UserError):
            check_shards(shards)
            check_totals(shards, "train", 100)
        finished_manifest(path.parent, plan_of_corpus)

    data = copy / "shard0" / "valid.bin"
    return {
        "corpus manifest": _file_target(copy / "manifest.json", read_manifest, (content,), 6_000),
        "ids": _file_target(
            data, lambda path: check_items(path.with_suffix(""), 160, 2, "full"), (data.read_bytes(),), 2_000
        ),
        "index of ids": _file_target(
            Path(shutil.copytree(copy / "shard0", folder / "shard0")) / "valid.idx",
            lambda path: check_items(path.with_suffix(""), 160, 2),
            (data.with_suffix(".idx").read_bytes(),),
            4_000,
        ),
    }


def _tokenizer_targets(folder: Path, tokenizer: Path) -> dict[str, Target]:
    """Each of the files alone, with a checksum that fits."""
    contents = {name: (tokenizer / name).read_bytes() for name in (SETTINGS_FILE, MODEL_FILE, DICTIONARY_FILE)}
    folder.mkdir()

    def read(name: str, content: bytes) -> None:
        for each, original in contents.items():
            (folder / each).write_bytes(original)
        if name != SETTINGS_FILE:
            settings = json.loads(contents[SETTINGS_FILE])
            settings["sha256"][name] = hashlib.sha256(content).hexdigest()
            (folder / SETTINGS_FILE).write_text(json.dumps(settings))
        (folder / name).write_bytes(content)
        Tokenizer.load(folder)

    return {
        name: Target(lambda content, name=name: read(name, content), (contents[name],), inputs)
        for name, inputs in ((SETTINGS_FILE, 2_000), (MODEL_FILE, 2_000))
    }


def _other_tokenizer_targets(folder: Path) -> dict[str, Target]:
    """Each of the files that came with a BERT or a RoBERTa alone, and of the folder that is made of them."""
    bert, roberta, whole = write_bert_files(folder / "bert"), write_roberta_files(folder / "roberta"), folder / "whole"
    (bert / "config.json").write_text('{"vocab_size": 200, "pad_token_id": 0}')
    made = adopt_tokenizer(bert, folder / "made").folder
    whole.mkdir()
    LibraryTokenizer.load(made).write_for_transformers(whole)

    def adopt(path: Path) -> None:
        shutil.rmtree(folder / "out", ignore_errors=True)
        adopt_tokenizer(path.parent, folder / "out")

    def load(path: Path) -> None:
        if path.name != SETTINGS_FILE:
            settings = json.loads((path.parent / SETTINGS_FILE).read_bytes())
            settings["sha256"][path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
            (path.parent / SETTINGS_FILE).write_text(json.dumps(settings))
        load_tokenizer(path.parent)

    targets = {}
    for read, source, names in (
        (adopt, whole, ("tokenizer.json", "tokenizer_config.json")),
        (adopt, bert, ("vocab.txt", "config.json")),
        (adopt, roberta, ("vocab.json", "merges.txt")),
        (load, made, (PIECES_FILE, SETTINGS_FILE)),
    ):
        for name in names:
            path = Path(shutil.copytree(source, folder / f"{source.name} {name}")) / name
            targets[f"{name} of {source.name}"] = _file_target(path, read, (path.read_bytes(),), 1_000)
    return targets


def _exported_targets(folder: Path, exported: Path) -> dict[str, Target]:
    shutil.copytree(exported, folder)
    weights, config = folder / "model.safetensors", folder / "config.json"
    original = weights.read_bytes()
    end = 8 + int.from_bytes(original[:8], "little")

    def read_header(content: bytes) -> None:
        shutil.copyfile(exported / config.name, config)
        weights.write_bytes(content + original[end:])
        LazyFormerModel.from_pretrained(folder)

    def read_config(content: bytes) -> None:
        weights.write_bytes(original)
        config.write_bytes(content)
        LazyFormerModel.from_pretrained(folder)

    return {
        "safetensors header": Target(read_header, (original[:end],), 2_000),
        "safetensors config": Target(read_config, (config.read_bytes(),), 2_000),
    }


def _prepared_target(folder: Path, corpus: Path) -> Target:
    folder.mkdir()
    for kind in ("bin", "idx"):
        shutil.copyfile(corpus / "shard0" / f"valid.{kind}", folder / f"train.{kind}")
    rows = len(read_index(folder / "train").sizes)
    np.save(folder / "targets.train.npy", np.zeros(rows, dtype=np.int64))
    manifest = {
        **{"format": "lazyformer glue task", "format_version": 1, "task": "CoLA", "max_length": 64, "tokenizer": {}},
        "files": {"train.tsv": {"sha256": "0", "rows": 1}},
        "splits": {"train": {"rows": rows, "bytes": (folder / "train.bin").stat().st_size}},
    }

    def read(path: Path) -> None:
        prepared = PreparedTask.load(path.parent)
        assert prepared.sha256
        examples = prepared.read("train", 16, 2)
        assert all(len(examples.inputs[index]) for index in range(0, len(examples.inputs), 50))

    return _file_target(folder / "manifest.json", read, (json.dumps(manifest).encode(),), 3_000)


def _squad_targets(folder: Path, tokenizer: Path) -> dict[str, Target]:
    """The official file, and each file of a folder of windows that was made of it."""
    official = write_toy_squad(folder, train=2, valid=1) / SPLITS["train"]
    made = prepare_squad({"train": official}, tokenizer, folder / "prepared", WindowSettings(64, 16, 16)).folder

    def read(path: Path) -> None:
        prepared = PreparedSquad.load(path.parent)
        assert prepared.settings and prepared.sha256
        file, windows = prepared.read("train")
        assert file.questions and all(len(ids) for ids in windows.inputs)
        assert len(windows.first_offset) == len(windows)

    targets = {"SQuAD": _file_target(official, read_squad, (official.read_bytes(),), 3_000)}
    for name, inputs in (("manifest.json", 1_500), ("train.npz", 1_500), ("train.json", 500)):
        path = Path(shutil.copytree(made, folder / f"prepared {name}")) / name
        targets[f"{name} of prepared SQuAD"] = _file_target(path, read, (path.read_bytes(),), inputs)
    return targets


def _result_targets(folder: Path) -> dict[str, Target]:
    run = folder / "runs" / "m" / "CoLA" / "lr2e-05_seed1"
    run.mkdir(parents=True)
    result = {
        **{"format_version": 1, "model": "m", "checkpoint": "c", "updates": 3, "task": "CoLA", "lr": 2e-5, "seed": 1},
        **{"epochs": 10, "metrics": {"dev": {"matthews": 0.5, "accuracy": 0.7}}},
        **{"baseline": {"dev": {"matthews": 0.0, "accuracy": 0.6}}},
        **{"train_rows": 9, "seconds": 1.0, "started_from": None},
    }
    grid = {"models": {"m": "c"}, "tasks": ["CoLA"], "lrs": [2e-5], "seeds": [1]}
    targets = {}
    for path, content in ((run / "result.json", result), (folder / "runs" / "grid.json", grid)):
        seed = json.dumps(content).encode()
        path.write_bytes(seed)

        def read(content: bytes, path=path, seed=seed) -> None:
            path.write_bytes(content)
            try:
                read_results(folder, GLUE)
            finally:
                path.write_bytes(seed)

        targets[path.name] = Target(read, (seed,), 2_500)
    return targets


DOCUMENTS = {
    "mediawiki": b"<mediawiki>\n<page>\n<title>A</title><ns>0</ns><text>Hi</text>\n</page>\n</mediawiki>\n",
    "jsonl": b'{"text": "abc", "title": "x"}\n{"text": "d"}\n',
    "wikiextractor": b'<doc id="1" title="A">\nA\n\nText.\n</doc>\n',
    "wikitext": b"\n = A = \n\n text text\n = = B = = \n",
    "text": b"a b c\n\nd e f\n",
    "book": b"*** START OF THE PROJECT GUTENBERG EBOOK ***\n\nA text.\n",
}


def _document_targets(folder: Path) -> dict[str, Target]:
    assert set(DOCUMENTS) == set(FORMATS)

    def read(path: Path, format: str) -> None:
        with suppress(UserError):
            find_inputs([str(path)])
        assert all(document.text is not None for document in read_piece(Piece(str(path), format)))

    targets = {
        f"documents, {format}": _file_target(
            folder / f"{format}.txt",
            lambda path, format=format: read(path, format),
            (seed, gzip.compress(seed), bz2.compress(seed), zstandard.compress(seed)),
            500,
        )
        for format, seed in DOCUMENTS.items()
    }
    return targets
