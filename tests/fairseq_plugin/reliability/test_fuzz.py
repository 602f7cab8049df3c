"""Broken files of every kind: each reader of what somebody else may have written raises nothing but our own errors."""

import bz2
import gzip
import hashlib
import io
import json
import logging
import math
import resource
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import zstandard
from fairseq_plugin.reliability.test_untrusted import write_prepared
from helpers import write_toy_glue
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from other_tokenizers import write_bert_files, write_roberta_files
from PIL import Image
from pyarrow import parquet
from toy_squad import write_toy_squad

from lazyformer_fairseq.corpus.build import finished_manifest
from lazyformer_fairseq.corpus.readers.files import Piece
from lazyformer_fairseq.corpus.readers.formats import FORMATS, read_piece
from lazyformer_fairseq.corpus.readers.inputs import find_inputs
from lazyformer_fairseq.data.datasets.question_windows import WindowSettings
from lazyformer_fairseq.data.glue import TASKS
from lazyformer_fairseq.data.labelled_files import read_split
from lazyformer_fairseq.data.prepared_folder import PreparedTask
from lazyformer_fairseq.data.prepared_squad import PreparedSquad, prepare_squad
from lazyformer_fairseq.data.shards import check_shards, check_totals
from lazyformer_fairseq.data.squad import SPLITS, read_squad
from lazyformer_fairseq.data.text.dictionary_file import load_dictionary
from lazyformer_fairseq.data.text.library_tokenizer import PIECES_FILE, LibraryTokenizer, adopt_tokenizer
from lazyformer_fairseq.data.text.tokenizer import MODEL_FILE, SETTINGS_FILE, load_tokenizer
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation.planning.job import job_of_yaml
from lazyformer_fairseq.experiments.compare.results import read_folder
from lazyformer_fairseq.experiments.search.latency import read_price_list
from lazyformer_fairseq.experiments.training_runs import Finished
from lazyformer_fairseq.fairseq_plugin.models.lazyformer import LazyFormerModel
from lazyformer_fairseq.fairseq_plugin.reliability.checkpoints import read_setting
from lazyformer_fairseq.finetuning.results import read_results
from lazyformer_fairseq.finetuning.tasks.glue import BENCHMARK as GLUE
from lazyformer_fairseq.language_modeling import images
from lazyformer_fairseq.language_modeling.commands import read_lengths
from lazyformer_fairseq.modules.timing import Autotuner
from lazyformer_fairseq.patterns.grammar import plan
from lazyformer_fairseq.storage.arrays import map_array
from lazyformer_fairseq.storage.indexed_format import check_items
from lazyformer_fairseq.storage.json_files import cache_get, read_as

ALL_INPUTS = 100_000


@dataclass(frozen=True)
class Target:
    """A reader of the file at `path`; `seeds` are valid contents; `inputs` is how many the full test gives it."""

    path: Path
    read: Callable[[Path], object]
    seeds: tuple[bytes, ...]
    inputs: int

    def __call__(self, content: bytes) -> None:
        self.path.write_bytes(content)
        with suppress(UserError):
            self.read(self.path)


def in_parquet(texts: list[str]) -> bytes:
    file = io.BytesIO()
    parquet.write_table(pyarrow.table({"text": texts}), file)
    return file.getvalue()


class Targets(dict[str, Target]):
    """All targets, each in a folder of its own, where others beside its file stay as they are."""

    def __init__(self, folder: Path, corpus: Path, exported: Path):
        """`corpus`: that ``lazyformer corpus`` wrote; `exported`: a model that ``lazyformer export`` wrote."""
        self.folder = folder
        self.add_texts()
        self.add_glue(corpus)
        self.add_corpus(corpus)
        self.add_tokenizers(corpus / "tokenizer")
        self.add_exported(exported)
        self.add_squad(corpus / "tokenizer")
        self.add_results()
        self.add_experiments()
        self.add_arrays_and_pictures()

    def add(self, name: str, read: Callable[[Path], object], inputs: int, *seeds: bytes, of: Path | None = None):
        """`of`: the valid file, in a folder that is copied; else `seeds` are what the file holds."""
        if of is None:
            path = self.folder / str(len(self)) / "file.txt"
            path.parent.mkdir()
        else:
            path = Path(shutil.copytree(of.parent, self.folder / str(len(self)))) / of.name
        self[name] = Target(path, read, seeds or (path.read_bytes(),), inputs)

    def add_texts(self) -> None:
        def read_text(read: Callable[[str], object]) -> Callable[[Path], object]:
            return lambda path: read(path.read_bytes().decode("latin-1"))

        self.add("pattern", read_text(plan), 30_000, b"M2x6", b"(sff)x5 (f)x9", b"sf(lf)x4 ((s)x9)x9")
        seeds = b"[(512, 3), (512, 2)]", b"(0.9, 0.999)", b"{'a': -1e3, 'b': None}"
        self.add("setting", read_text(read_setting), 15_000, *seeds)
        self.add("dictionary", load_dictionary, 15_000, b"the 5\nof 4\n<x> 3\n")
        documents = {
            "mediawiki": b"<mediawiki>\n<page>\n<title>A</title><ns>0</ns><text>Hi</text>\n</page>\n</mediawiki>\n",
            "jsonl": b'{"text": "abc", "title": "x"}\n{"text": "d"}\n',
            "wikiextractor": b'<doc id="1" title="A">\nA\n\nText.\n</doc>\n',
            "wikitext": b"\n = A = \n\n text text\n = = B = = \n",
            "text": b"a b c\n\nd e f\n",
            "babylm": b"*CHI: a b c\nd\n\ne f\n",
            "book": b"*** START OF THE PROJECT GUTENBERG EBOOK ***\n\nA text.\n",
            "parquet": in_parquet(["abc", "d"]),
        }
        assert set(documents) == set(FORMATS)

        def read(path: Path, format: str) -> None:
            with suppress(UserError):
                find_inputs([str(path)])
            assert all(document.text is not None for document in read_piece(Piece(str(path), format)))

        for format, seed in documents.items():
            seeds = (seed,)
            if not FORMATS[format].magic:
                seeds = seed, gzip.compress(seed), bz2.compress(seed), zstandard.compress(seed)
            self.add(f"documents, {format}", lambda path, format=format: read(path, format), 500, *seeds)

    def add_glue(self, corpus: Path) -> None:
        glue = write_toy_glue(self.folder / "glue", train=4, valid=3)
        chosen = {"CoLA": "train", "MRPC": "train", "STS-B": "valid", "MNLI": "test", "QNLI": "train"}
        for name, split in chosen.items():
            task = TASKS[name]

            def read_tsv(path: Path, task=task, split=split) -> object:
                return read_split(task, path.parent, split)

            self.add(f"TSV of {name}", read_tsv, 3_000, of=glue / task.folder / task.splits[split].file)

        def read(path: Path) -> None:
            prepared = PreparedTask.load(path.parent)
            assert prepared.sha256
            examples = prepared.read("train", 16, 2)
            assert all(len(examples.inputs[index]) for index in range(0, len(examples.inputs), 50))

        prepared = write_prepared(self.folder / "prepared", corpus)
        self.add("prepared GLUE manifest", read, 3_000, of=prepared / "manifest.json")

    def add_corpus(self, corpus: Path) -> None:
        manifest = json.loads((corpus / "manifest.json").read_bytes())
        plan_of_corpus = {name: manifest[name] for name in ("settings", "versions", "inputs")}

        def read_manifest(path: Path) -> None:
            shards = sorted(map(str, path.parent.glob("shard*")))
            with suppress(UserError):
                check_shards(shards)
                check_totals(shards, "train", 100)
            finished_manifest(path.parent, plan_of_corpus)

        def read_ids(path: Path) -> object:
            return check_items(path.with_suffix(""), 160, 2, "full" if path.suffix == ".bin" else "quick")

        self.add("corpus manifest", read_manifest, 6_000, of=corpus / "manifest.json")
        self.add("ids", read_ids, 2_000, of=corpus / "shard0" / "valid.bin")
        self.add("index of ids", read_ids, 4_000, of=corpus / "shard0" / "valid.idx")

    def add_tokenizers(self, tokenizer: Path) -> None:
        """Each file of ours, of what came with a BERT or a RoBERTa, and of the folder that is made of that."""
        bert, roberta = (write(self.folder / write.__name__) for write in (write_bert_files, write_roberta_files))
        (bert / "config.json").write_text('{"vocab_size": 200, "pad_token_id": 0}')
        made, whole = adopt_tokenizer(bert, self.folder / "made").folder, self.folder / "whole"
        whole.mkdir()
        LibraryTokenizer.load(made).write_for_transformers(whole)

        def adopt(path: Path) -> None:
            shutil.rmtree(self.folder / "out", ignore_errors=True)
            adopt_tokenizer(path.parent, self.folder / "out")

        def load(path: Path) -> None:
            """With a checksum that fits."""
            if path.name != SETTINGS_FILE:
                settings = json.loads((path.parent / SETTINGS_FILE).read_bytes())
                settings["sha256"][path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
                (path.parent / SETTINGS_FILE).write_text(json.dumps(settings))
            load_tokenizer(path.parent)

        for read, source, inputs, *names in (
            (load, tokenizer, 2_000, SETTINGS_FILE, MODEL_FILE),
            (adopt, whole, 1_000, "tokenizer.json", "tokenizer_config.json"),
            (adopt, bert, 1_000, "tokenizer.json", "config.json"),
            (adopt, roberta, 1_000, "tokenizer.json"),
            (load, made, 1_000, PIECES_FILE, SETTINGS_FILE),
        ):
            for name in names:
                self.add(f"{name} of {source.name}", read, inputs, of=source / name)

    def add_exported(self, exported: Path) -> None:
        weights = (exported / "model.safetensors").read_bytes()
        end = 8 + int.from_bytes(weights[:8], "little")

        def read_header(path: Path) -> None:
            path.write_bytes(path.read_bytes() + weights[end:])
            LazyFormerModel.from_pretrained(path.parent)

        def read_config(path: Path) -> None:
            LazyFormerModel.from_pretrained(path.parent)

        self.add("safetensors header", read_header, 2_000, weights[:end], of=exported / "model.safetensors")
        self.add("safetensors config", read_config, 2_000, of=exported / "config.json")

    def add_squad(self, tokenizer: Path) -> None:
        """The official file, and each file of a folder of windows that was made of it."""
        official = write_toy_squad(self.folder / "squad", train=2, valid=1) / SPLITS["train"]
        windows = WindowSettings(64, 16, 16)
        made = prepare_squad({"train": official}, tokenizer, self.folder / "windows", windows).folder

        def read(path: Path) -> None:
            prepared = PreparedSquad.load(path.parent)
            assert prepared.settings and prepared.sha256
            file, windows = prepared.read("train")
            assert file.questions and all(len(ids) for ids in windows.inputs)
            assert len(windows.first_offset) == len(windows)

        self.add("SQuAD", read_squad, 3_000, of=official)
        for name, inputs in (("manifest.json", 1_500), ("train.npz", 1_500), ("train.json", 500)):
            self.add(f"{name} of prepared SQuAD", read, inputs, of=made / name)

    def add_results(self) -> None:
        run = Path("m/CoLA/lr2e-05_seed1/result.json")
        result = {
            **{"format_version": 1, "model": "m", "checkpoint": "c", "updates": 3, "task": "CoLA", "lr": 2e-5},
            **{"seed": 1, "epochs": 10, "metrics": {"dev": {"matthews": 0.5, "accuracy": 0.7}}, "train_rows": 9},
            **{"baseline": {"dev": {"matthews": 0.0, "accuracy": 0.6}}, "seconds": 1.0},
        }
        grid = {"models": {"m": "c"}, "tasks": ["CoLA"], "lrs": [2e-5], "seeds": [1]}
        contents = {run: json.dumps(result).encode(), Path("grid.json"): json.dumps(grid).encode()}
        for name, seed in contents.items():
            runs = self.folder / f"results {name.name}" / "runs"
            (runs / run).parent.mkdir(parents=True)
            for each, content in contents.items():
                (runs / each).write_bytes(content)
            self[name.name] = Target(
                runs / name, lambda _, folder=runs.parent: read_results(folder, GLUE), (seed,), 2_500
            )

    def add_experiments(self) -> None:
        """Files of settings and results, and a cache."""
        prices = {"s": 1.2, "f": 0.7}
        self.add("prices", lambda path: read_price_list(path, ["s", "f"]), 1_000, json.dumps(prices).encode())
        curve = {"curve": {"updates": [0, 5], "seconds": [0.0, 1.5], "loss": [9.0, 8.5]}}
        self.add("result of a training", lambda path: read_as(Finished, path), 1_000, json.dumps(curve).encode())
        run = {"curve": {"updates": [0, 5], "seconds": [0, 1], "flops": [0, 9], "tokens": [0, 9], "loss": [9.0, 8.0]}}
        measure = {"name": "loss", "unit": "bits", "lower_is_better": True}
        models = {"a": {"of": "a", "share": 1.0, "runs": {"1": {**run, "final": {"loss": 8.0}}}}}
        results = {"measure": measure, "baseline": "a", "models": models, "settings": {}, "task": "t", "data": {}}
        self.add("results of a comparison", read_folder, 1_500, json.dumps(results).encode())
        self.add(
            "lengths", lambda path: read_lengths(str(path)), 1_000, b"tgt_len: 64\nmem_len: 640\nsame_length: true\n"
        )

        def plan_yaml(path: Path) -> None:
            job_of_yaml(Path(shutil.copyfile(path, path.with_name("plan.yaml"))))

        self.add(
            "plan in YAML", plan_yaml, 1_000, b"model: {_name: lazyformer, dropout: 0.1}\ntask: {mask_prob: 0.15}\n"
        )

        def remember(path: Path) -> None:
            cache, known = path.with_name("speeds.json"), ("a", "b")
            shutil.copyfile(path, cache)
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("LAZYFORMER_CACHE", str(cache.parent))
                assert cache_get(cache.name, "m", "k", known.__contains__) in (None, *known)

        self.add("cache", remember, 1_000, json.dumps({"m": {"k": "b"}}).encode())

        def load_choices(path: Path) -> None:
            with suppress(ValueError, RecursionError):
                Autotuner().load_state_dict(json.loads(path.read_bytes()))

        self.add("choices of a checkpoint", load_choices, 1_000, json.dumps({"m": {"shape": "eager"}}).encode())

    def add_arrays_and_pictures(self) -> None:
        """Of images, and of what is made of labelled texts."""
        for name, array in {
            "array of images": np.zeros((2, 4, 4), np.uint8),
            "array of fractions": np.zeros((2, 4, 4)),
            "labels": np.arange(3),
            "words as labels": np.array(["a", "bc"]),
        }.items():
            content = io.BytesIO()
            np.save(content, array)
            dtypes = "biufUS" if "labels" in name else "iuf"
            self.add(name, lambda path, dtypes=dtypes: len(map_array(path, "", dtypes)), 2_500, content.getvalue())
        for ending in ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM"):
            content = io.BytesIO()
            Image.new("RGB", (8, 8), (9, 99, 200)).save(content, ending)
            self.add(ending, lambda path: list(images._read([path], 4)), 1_000, content.getvalue())


EDITS = st.tuples(
    st.sampled_from(["replace", "insert", "delete", "cut", "repeat"]),
    st.integers(0, 2**16),
    st.one_of(st.binary(min_size=1, max_size=8), st.sampled_from([b"\0", b"\n", b"\t", b"-1", b"99999999999", b"../"])),
)


def edited(seed: bytes, edits: list[tuple[str, int, bytes]]) -> bytes:
    content = bytearray(seed)
    for action, place, new in edits:
        at = place % (len(content) + 1)
        if action == "replace":
            content[at : at + len(new)] = new
        elif action == "insert":
            content[at:at] = new
        elif action == "delete":
            del content[at : at + 4 * len(new)]
        elif action == "repeat":
            content[at:at] = content[at : at + 16] * len(new)
        else:
            del content[at:]
    return bytes(content)


ODD = st.sampled_from(["../x", "/etc/passwd", 2**63, 10**90, 10**200, -1, 0, 1e308, math.nan, math.inf, "\ud800"])
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=6), ODD),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=4,
)


def with_another_value(content: Any, path: list[int], value: Any) -> Any:
    """A copy of JSON in which what lies at the end of `path` is another value, or gone."""
    if not path or not isinstance(content, (dict, list)) or not content:
        return value
    keys = list(content) if isinstance(content, dict) else list(range(len(content)))
    key = keys[path[0] % len(keys)]
    copy = content.copy()
    if len(path) == 1 and path[0] % 5 == 0:
        del copy[key]
    else:
        copy[key] = with_another_value(content[key], path[1:], value)
    return copy


def inputs_of(target: Target) -> st.SearchStrategy[bytes]:
    """Valid files with some edits, JSON with another value somewhere, and bytes of any kind."""
    edits = st.builds(edited, st.sampled_from(target.seeds), st.lists(EDITS, min_size=1, max_size=6))
    strategies = [edits, st.binary(max_size=200)]
    if target.seeds[0].startswith(b"{") and len(target.seeds) == 1:
        content, paths = json.loads(target.seeds[0]), st.lists(st.integers(0, 99), min_size=1, max_size=5)
        strategies.append(
            st.builds(lambda path, value: json.dumps(with_another_value(content, path, value)).encode(), paths, VALUES)
        )
    return st.one_of(strategies)


@pytest.fixture
def targets(data_folder, exported, tmp_path, monkeypatch) -> Targets:
    (tmp_path / "files").mkdir()
    monkeypatch.setattr(logging.root, "level", logging.ERROR)
    return Targets(tmp_path / "files", data_folder, exported)


LARGEST = 1 << 30  # bytes that reading all these files may add to the process's memory at its peak


def peak_memory() -> int:
    """Bytes that this process has had at most."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def fuzz(target: Target, count: int, derandomize: bool) -> int:
    """Gives a target `count` inputs; returns how many it was given."""
    given_to_it = []

    @settings(
        **{"max_examples": count, "database": None, "derandomize": derandomize},
        **{"suppress_health_check": list(HealthCheck), "phases": [Phase.generate, Phase.shrink]},
    )
    @given(inputs_of(target))
    def run(content: bytes) -> None:
        given_to_it.append(None)
        target(content)

    run()
    return len(given_to_it)


@pytest.mark.parametrize(
    "share", [200, pytest.param(1, marks=[pytest.mark.slow, pytest.mark.reliability, pytest.mark.timeout(7200)])]
)
def test_readers_raise_our_own_errors_alone(targets, record_counts, share):
    for target in targets.values():
        for seed in target.seeds:
            target.path.write_bytes(seed)
            target.read(target.path)  # raises where it is not valid: the fuzzing would see but a reader's first line
    before = peak_memory()
    counts = {}
    errors = []
    for name, target in targets.items():
        try:
            counts[name] = fuzz(target, max(10, target.inputs // share), share > 1)
        except Exception as error:
            error.add_note(f"while reading {name}")
            errors.append(error)
    if errors:  # all at once: a run of all inputs takes half an hour
        raise ExceptionGroup("errors that are not ours", errors)
    assert peak_memory() - before < LARGEST, "a small file filled the memory"
    record_counts("fuzz", inputs=sum(counts.values()), errors_not_ours=0, **counts)
    assert sum(counts.values()) >= ALL_INPUTS // share, counts
