"""Fixtures that several test files share."""

import gc
import importlib.util

gc.disable()  # until all tests are collected: there is nothing to collect in what is imported

import logging
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Optional

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny tensors: a second thread only waits
if "PYTEST_XDIST_WORKER" not in os.environ:
    # What killed processes leave behind goes with one folder, at the end of the tests. tmp_path stays where it ever is.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    # A short name: those of sockets end at 107 characters.
    temporary = tempfile.TemporaryDirectory(prefix="lf_", ignore_cleanup_errors=True)
    os.environ["TMPDIR"] = tempfile.tempdir = temporary.name
    # What the user's machine was measured at decides nothing here.
    os.environ.setdefault("LAZYFORMER_CACHE", str(Path(temporary.name) / "cache"))
for talkative in ("matplotlib", "fairseq.tasks.text_to_speech"):  # when imported, which is before pytest looks
    logging.getLogger(talkative).setLevel(logging.WARNING)

import copy
import functools
import signal
import subprocess
from multiprocessing import forkserver

import hypothesis
import pytest
import torch
from helpers import (
    PRETRAINING,
    ROOT,
    build_toy_corpus,
    false_nvidia_smi,
    lack_of_fairseq,
    train_here,
    train_words,
    write_program,
    write_toy_glue,
    write_toy_wikitext,
)
from warm_python.forkserver import fork_the_forkserver

from lazyformer_fairseq.executors import cpuinfo
from lazyformer_fairseq.fairseq_plugin.replacements import start_run
from lazyformer_fairseq.language_modeling.prepare import prepare


def make_hydra_quick() -> None:
    """Without what it does anew for every run, which was half of the time of a tiny training.

    Settings that a command line gives are parsed once each; the store of all configs is not copied each time.
    """
    from hydra._internal.config_repository import CachingConfigRepository, IConfigRepository
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parse = OverridesParser.parse_rule

    @functools.cache
    def parsed(words: str, rule: str) -> object:
        return parse(OverridesParser.create(), words, rule)

    def copy_sources(self: CachingConfigRepository, delegate: IConfigRepository) -> None:
        self.delegate = copy.copy(delegate)  # which gets a new list of sources; what they hold is only read
        self.cache = {}

    OverridesParser.parse_rule = lambda self, words, rule: copy.copy(parsed(words, rule))
    CachingConfigRepository.__init__ = copy_sources


if importlib.util.find_spec("fairseq"):
    start_run()  # once: what a test replaces for itself is to stand outside of the hooks
    make_hydra_quick()
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # as in processes of their own
if sys.platform == "linux":
    # Now, so that nothing that a test replaces is in it.
    fork_the_forkserver()
    forkserver.set_forkserver_preload(["torch._dynamo", "lazyformer_fairseq.finetuning.training"])
    forkserver.ensure_running()
hypothesis.settings.register_profile("no deadline", deadline=None)  # a machine may be busy
hypothesis.settings.load_profile("no deadline")


@pytest.fixture(autouse=True)
def a_processor_without_bf16(monkeypatch):
    """On every machine, so that tests of one are tests of all."""
    monkeypatch.setattr(cpuinfo, "WITH_BF16", frozenset())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first: at the end of several processes all but one would wait for it."""
    items.sort(key=lambda item: item.originalname != "test_every_command_runs")


def pytest_collection_finish() -> None:
    """What is imported and collected stays to the end: garbage collection, which some tests ask for, may skip it."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # libraries in C complain at the end of the process of objects that nobody has freed


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """Where there is no fairseq, files and tests that need it are skipped; here alone, whatever they are."""
    report = yield
    return skipped_without_fairseq(report, report.call.excinfo)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    return skipped_without_fairseq((yield), call.excinfo)


def skipped_without_fairseq(report: pytest.TestReport, error: Optional[pytest.ExceptionInfo]) -> pytest.TestReport:
    if report.outcome == "failed" and error and (reason := lack_of_fairseq(error.value)):
        report.outcome, report.longrepr = "skipped", (report.nodeid, 0, f"Skipped: no fairseq; {reason}")
    return report


@pytest.fixture
def interruptible():
    """A shell's background job ignores Ctrl-C, and so would the processes that a test starts there."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real corpora and GLUE files; tests that need it skip where it is not."""
    folder = Path(os.environ.get("LAZYFORMER_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no real data at {folder}; set LAZYFORMER_DATA to run this test")
    return folder


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory) -> Path:
    """A folder of binarised data with its tokenizer, as the corpus code writes it."""
    folder = tmp_path_factory.mktemp("corpus") / "data"
    build_toy_corpus(folder, vocab_size=160)
    return folder


@pytest.fixture(scope="session")
def two_shards(tmp_path_factory) -> Path:
    """A corpus of two shards, to be read."""
    folder = tmp_path_factory.mktemp("two_shards") / "corpus"
    build_toy_corpus(folder, vocab_size=160, shards=2)
    return folder


@pytest.fixture(scope="session")
def three_shards(tmp_path_factory) -> Path:
    """A corpus of three shards, to be read."""
    folder = tmp_path_factory.mktemp("three_shards") / "corpus"
    build_toy_corpus(folder, vocab_size=160, shards=3)
    return folder


@pytest.fixture(scope="session")
def lm_data(tmp_path_factory) -> Path:
    """A folder that ``lazyformer lm prepare`` wrote, of toy text."""
    folder = tmp_path_factory.mktemp("language modelling")
    prepare("wikitext", write_toy_wikitext(folder / "text"), folder / "data")
    return folder / "data"


@pytest.fixture(scope="session")
def glue(tmp_path_factory) -> Path:
    """Toy files of every task of GLUE."""
    return write_toy_glue(tmp_path_factory.mktemp("glue"))


@pytest.fixture(scope="session")
def fairseq_train() -> Callable[..., dict]:
    """``fairseq_train(data, "options ...", save_dir=...)``: trains in this process; returns the last checkpoint."""

    def run(data: Path, options: str, save_dir: Path, task: str = PRETRAINING):
        train_here(*train_words(data, options, save_dir, task))
        return torch.load(save_dir / "checkpoint_last.pt")

    return run


@pytest.fixture(scope="session")
def warm_python() -> Iterator[Path]:
    """A folder of programs, python and lazyformer among them, that start in milliseconds.

    A server that has imported what is heavy forks them. Elsewhere than on Linux it is the folder of this process's own
    python.
    """
    real, server_and_client = Path(sys.executable), ROOT / "tests" / "warm_python"
    if not hasattr(os, "pidfd_open"):
        yield real.parent
        return
    with tempfile.TemporaryDirectory(prefix="warm_") as name:
        folder = Path(name)
        socket, python = folder / "socket", folder / "python"
        for name in (python, folder / "python3"):
            write_program(name, f'exec "{real}" -ISu "{server_and_client / "client.py"}" "{socket}" "{real}" "$@"')
        for command in ("lazyformer", "fairseq-train", "fairseq-hydra-train"):
            write_program(folder / command, f'exec "{python}" "{real.parent / command}" "$@"')
        serve = [str(real), str(server_and_client / "server.py"), str(socket), str(python)]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen(serve, env=environment, **pipes) as server:
            assert server.stdout.readline() == b"ready\n"
            yield folder
            server.terminate()  # a process that a test left behind may hold its standard input open


@pytest.fixture
def without_fairseq(warm_python, monkeypatch) -> Path:
    """The folder of warm programs; they, and all processes of theirs, have no fairseq, as Python 3.13 has none."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests" / "without_fairseq"))
    return warm_python


@pytest.fixture
def without_gpus(tmp_path, monkeypatch) -> None:
    """A folder of its own to be in, on a machine without GPUs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    false_nvidia_smi(tmp_path, monkeypatch)


@pytest.fixture
def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
