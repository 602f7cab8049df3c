"""Work on a Ray cluster of two machines, which are processes here: the same bytes and the same losses, whoever dies."""

import json
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Optional

import fsspec
import pytest
from click.testing import CliRunner
from helpers import ROOT, toy_texts, write_toy_glue
from toy_squad import START

from lazyformer_fairseq.cli import main
from lazyformer_fairseq.corpus.build import build_corpus
from lazyformer_fairseq.corpus.settings import CorpusSettings
from lazyformer_fairseq.corpus.stages import STAGES
from lazyformer_fairseq.executors.interface import Call, JobResult
from lazyformer_fairseq.executors.ray_cluster import RayCluster, _call_in

pytestmark = pytest.mark.slow
ray = pytest.importorskip("ray")
SETTINGS = CorpusSettings(vocab_size=200, valid_share=0.1, shards=2, unit_megabytes=0.002)
PROCESSORS = 2  # of a machine
MACHINES = ("first", "second")
COMPARISON = (  # six models and three seeds
    "compare run out {place} --task masked-lm --model bert=sf --model lazy=slf --model par=sff --model conv=cf "
    "--model deep=sfsf --model wide=sf;ffn=16 --seeds 1,2,3 --alone --executor {place} --updates 4 --embed-dim 8 "
    "--ffn-embed-dim 8 --heads 2 --tokens-per-sample 32 --validation-tokens 200"
)
GRID = (  # four rates and five seeds
    "finetune m={start} --task glue --data glue --output {place} --tasks CoLA --lrs 1e-3,2e-3,3e-3,4e-3 "
    "--seeds 1,2,3,4,5 --epochs 1 --gpus none --keep-checkpoints none --executor {place}"
)


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("raw") / "plain.txt"
    path.write_text("\n\n".join(toy_texts(400)))
    return path


@pytest.fixture(scope="module")
def alone(text, tmp_path_factory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("alone") / "out"
    build_corpus([str(text)], folder, SETTINGS)
    return content(folder)


@pytest.fixture
def cluster(request, tmp_path) -> Iterator[object]:
    """A head without processors, and two machines with a TMPDIR each, whose tasks find the tests' functions."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", str(ROOT / "tests"), prepend=os.pathsep)
        # Looks, three seconds apart, at a silent machine until it counts as dead; one may be silent as it is busy.
        patient = {"health_check_failure_threshold": 5 if "machine-" in request.node.name else 100}
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "_system_config": patient})
        for name in MACHINES:
            (tmp_path / name).mkdir()
            made.add_node(num_cpus=PROCESSORS, env_vars={"TMPDIR": str(tmp_path / name)})
        ray.init(address=made.address, log_to_driver=False, logging_level="error")
        yield made
        ray.shutdown()
        made.shutdown()


def content(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".html"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files if path.name != "manifest.json"}


def test_two_machines_write_the_same_bytes_and_train_to_the_same_losses(cluster, text, alone, tmp_path, monkeypatch):
    """A corpus, a comparison and a grid of fine-tuning runs, in fp32; commands find the cluster by RAY_ADDRESS."""
    executor = RayCluster()
    assert executor.free == 2 * PROCESSORS
    build_corpus([str(text)], tmp_path / "out", SETTINGS, executor=executor)
    assert content(tmp_path / "out") == alone
    ray.shutdown()
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)

    losses = {place: losses_of(COMPARISON, place, "runs/*-seed*") for place in ("local", "ray")}
    assert losses["local"] == losses["ray"] and len(losses["ray"]) == 6 * 3
    write_toy_glue(tmp_path / "glue", train=64, valid=20)
    losses = {place: losses_of(GRID, place, "runs/m/CoLA/*") for place in ("local", "ray")}
    assert losses["local"] == losses["ray"] and len(losses["ray"]) == 4 * 5


def losses_of(command: str, place: str, runs: str) -> dict[str, list[dict]]:
    """All that the trainings of a command measured, by the names of their folders; without the seconds."""
    shutil.rmtree(place, ignore_errors=True)
    result = CliRunner().invoke(main, command.format(place=place, start=START).split(), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    measured = {}
    for log in Path(place).glob(f"{runs}/metrics.jsonl"):
        points = [json.loads(line)["values"] for line in log.read_text().splitlines()]
        measured[log.parent.name] = [point | {"seconds": None} for point in points]
    return measured


def test_two_machines_share_nothing_but_s3(s3_bucket, cluster, text, alone, tmp_path, monkeypatch):
    """What a machine was given lies in its own TMPDIR."""
    (tmp_path / "here").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "here"))
    executor = RayCluster()
    files, top = fsspec.core.url_to_fs(s3_bucket, use_listings_cache=False)
    files.put_file(str(text), f"{top}/plain.txt")
    build_corpus([f"{s3_bucket}/plain.txt"], f"{s3_bucket}/out", SETTINGS, executor=executor)
    files.get(f"{top}/out/", f"{tmp_path}/fetched/", recursive=True)
    assert content(tmp_path / "fetched") == alone
    assert not list((tmp_path / "here").glob("lazyformer-*/*/.out.unfinished"))
    for name in MACHINES:
        assert list((tmp_path / name).glob("lazyformer-*/*/.out.unfinished/tasks/*/*.json"))


class Struck(RayCluster):
    """A cluster that loses something in the middle of each stage: tasks wait in their processes until it has.

    Args:
        flags: a folder of files, by which tasks learn that their stage was struck.
        strike: loses something, and returns how many it has lost.

    Attributes:
        losses: how many machines or processes it has lost, by stage.
    """

    def __init__(self, flags: Path, strike: Callable[[], int]):
        super().__init__()
        self.flags = flags
        self.strike = strike
        self.losses: dict[str, int] = {}
        self._send = ray.remote(num_cpus=1, max_retries=0)(call_once_struck)

    def start(self, calls: Sequence[Call]) -> None:
        for call in calls:
            self._calls[self._send.remote(self.flags, os.getcwd(), call.function, call.arguments)] = call

    def wait(self) -> list[JobResult]:
        stage = stage_of(next(iter(self._calls.values())).function)
        if stage not in self.losses and len(task_processes()) == min(len(self._calls), 2 * PROCESSORS):
            self.losses[stage] = self.strike()
            (self.flags / stage).touch()
        return super().wait()


def call_once_struck(flags: Path, folder: str, function: partial, arguments: tuple) -> Optional[BaseException]:
    while not (flags / stage_of(function)).exists():
        time.sleep(0.01)
    return _call_in(folder, function, arguments)


def stage_of(function: partial) -> str:
    """The stage of a task; ``function`` is ``run_task`` with what it does and the stage's folder."""
    return function.args[1].name


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("victim", ["machine", "process"])
def test_a_machine_or_a_process_that_dies_in_each_stage_changes_nothing(
    cluster, text, alone, tmp_path, victim, seed, record_property
):
    """Tasks that are lost are done again: a new machine joins in place of the dead one; all processes at work die."""
    chance = random.Random(seed)

    def strike() -> int:
        if victim == "machine":
            cluster.remove_node(chance.choice(cluster.list_all_nodes()[1:]), allow_graceful=False)
            cluster.add_node(num_cpus=PROCESSORS)
            return 1
        killed = 0
        for process in task_processes():
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
                killed += 1
        return killed

    (tmp_path / "flags").mkdir()
    executor = Struck(tmp_path / "flags", strike)
    build_corpus([str(text)], tmp_path / "out", SETTINGS, executor=executor)
    record_property("lost", sum(executor.losses.values()))
    assert content(tmp_path / "out") == alone
    assert list(executor.losses) == list(STAGES) and min(executor.losses.values()) > 0


def task_processes() -> list[int]:
    """The processes that do a task now, as Ray names them; its agents, without which a machine ends, are others."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            name = (folder / "cmdline").read_bytes().decode()
        except OSError:
            continue
        if name.startswith(f"ray::{call_once_struck.__name__}"):
            found.append(int(folder.name))
    return found
