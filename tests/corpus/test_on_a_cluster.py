"""A corpus made on a Ray cluster of two machines, which are processes here: the same bytes, whoever dies."""

import json
import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from click.testing import CliRunner
from helpers import ROOT, toy_texts

from lazyformer_fairseq.cli import main
from lazyformer_fairseq.corpus.build import build_corpus
from lazyformer_fairseq.corpus.settings import CorpusSettings
from lazyformer_fairseq.corpus.stages import STAGES
from lazyformer_fairseq.executors.interface import Ended
from lazyformer_fairseq.executors.ray_cluster import RayCluster, _call_in

pytestmark = pytest.mark.slow
ray = pytest.importorskip("ray")
SETTINGS = CorpusSettings(vocab_size=200, valid_share=0.1, shards=2, unit_megabytes=0.002)
PROCESSORS = 2  # of a machine
TINY = (
    "--seeds 1,2 --updates 4 --embed-dim 8 --ffn-embed-dim 8 --heads 2 --tokens-per-sample 32 --validation-tokens 200"
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
def cluster(request) -> Iterator[object]:
    """A head without processors, and two machines, whose tasks find the tests' functions."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", str(ROOT / "tests"), prepend=os.pathsep)
        # Looks, three seconds apart, at a silent machine until it counts as dead; one may be silent as it is busy.
        patient = {"health_check_failure_threshold": 5 if "[machine]" in request.node.name else 100}
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "_system_config": patient})
        for _ in range(2):
            made.add_node(num_cpus=PROCESSORS)
        ray.init(address=made.address, log_to_driver=False, logging_level="error")
        yield made
        ray.shutdown()
        made.shutdown()


def content(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".html"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files if path.name != "manifest.json"}


def test_two_machines_write_the_same_bytes_and_train_to_the_same_losses(cluster, text, alone, tmp_path, monkeypatch):
    """The corpus of the command, which finds the cluster by RAY_ADDRESS; and a comparison on it, in fp32."""
    executor = RayCluster()
    assert executor.free == 2 * PROCESSORS
    build_corpus([str(text)], tmp_path / "out", SETTINGS, executor=executor)
    assert content(tmp_path / "out") == alone
    ray.shutdown()
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    losses = {}
    for place in ("local", "ray"):
        command = (
            f"compare run out {place} --task masked-lm --model bert=sf --model lazy=slf --alone --executor {place}"
        )
        result = CliRunner().invoke(main, [*command.split(), *TINY.split()], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        models = json.loads(Path(place, "results.json").read_text())["models"]
        losses[place] = [run["curve"]["loss"] for model in models.values() for run in model["runs"].values()]
    assert losses["local"] == losses["ray"] and len(losses["ray"]) == 4


class Struck(RayCluster):
    """A cluster that loses something when tasks of a stage are under way.

    Attributes:
        strike: what happens to it, once a stage.
        struck: the stages at which it did.
    """

    def __init__(self, strike: Callable[[], None]):
        super().__init__()
        self.strike = strike
        self.struck: list[str] = []

    def wait(self) -> list[Ended]:
        for call in self._calls.values():
            stage = call.function.args[1].name
            if stage not in self.struck and task_processes():
                self.struck.append(stage)
                self.strike()
        return super().wait()


@pytest.mark.parametrize("victim", ["machine", "process"])
def test_a_machine_or_a_process_that_dies_in_each_stage_changes_nothing(cluster, text, alone, tmp_path, victim):
    """Tasks that are lost are done again on what is left; a new machine joins in place of the dead one."""
    chance = random.Random(1)

    def strike() -> None:
        if victim == "machine":
            cluster.remove_node(chance.choice(cluster.list_all_nodes()[1:]), allow_graceful=False)
            cluster.add_node(num_cpus=PROCESSORS)
            return
        for process in chance.sample(workers := task_processes(), min(2, len(workers))):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    executor = Struck(strike)
    build_corpus([str(text)], tmp_path / "out", SETTINGS, executor=executor)
    assert content(tmp_path / "out") == alone
    assert executor.struck == list(STAGES)


def task_processes() -> list[int]:
    """The processes that do a task now, as Ray names them; its agents, without which a machine ends, are others."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            name = (folder / "cmdline").read_bytes().decode()
        except OSError:
            continue
        if name.startswith(f"ray::{_call_in.__name__}"):
            found.append(int(folder.name))
    return found
