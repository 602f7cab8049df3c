"""Experiment trackers get each line of metrics.jsonl, whichever command trains, and never end a training."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from helpers import ROOT, write_lines
from in_process import invoke, refusal
from run_records import write_record

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.training.run_record import RUN, MetricsLine, MetricsLog, finite_values, read_metrics
from lazyformer_fairseq.training.trackers import refuse_missing_trackers

CHECKPOINT = ROOT / "tests" / "fixtures" / "checkpoints" / "m2x2"
# Stands in for wandb and for trackio, also in processes that a command starts: each call is a line of a file.
STAND_IN = """
import json, pathlib

def note(call, *args, **given):
    with pathlib.Path(__file__).with_suffix(".jsonl").open("a") as file:
        file.write(json.dumps([call, args, given], default=str) + "\\n")

class Run:
    def __init__(self, name):
        self.name = name
    def log(self, values, **given):
        note("log", self.name, values, **given)
    def define_metric(self, *args, **given):
        note("define_metric", *args, **given)
    def finish(self):
        note("finish", self.name)

def init(**given):
    note("init", **given)
    return Run(given["name"])
"""


class StandIn:
    def __init__(self, file: Path):
        self.file = file

    def calls(self, wanted: str) -> list[tuple[list, dict]]:
        lines = map(json.loads, self.file.read_text().splitlines())
        return [(args, given) for call, args, given in lines if call == wanted]

    def lines_of(self, name: str) -> list[dict]:
        """What was logged for a run: the values of each line, with the number of updates."""
        return [{"updates": given.get("step"), **values} for (run, values), given in self.calls("log") if run == name]


@pytest.fixture(params=["wandb", "trackio"])
def library(request, tmp_path, monkeypatch) -> StandIn:
    folder = tmp_path / "libraries"
    folder.mkdir()
    (folder / f"{request.param}.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, request.param, raising=False)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    yield StandIn(folder / f"{request.param}.jsonl")
    sys.modules.pop(request.param, None)


def reported(folder: Path) -> list[dict]:
    """What trackers must have got for a folder's metrics.jsonl."""
    found = []
    for each in read_metrics(folder):
        values = {name: value for name, value in {**each.values, "seconds": each.seconds}.items() if value is not None}
        found.append({"updates": each.updates, **{f"{each.split}/{name}": value for name, value in values.items()}})
    return found


def line(updates: int, **values: float) -> MetricsLine:
    return MetricsLine(updates, "train", seconds=updates / 2, values=finite_values(values))


def begin(folder: Path, updates: int = 0, *names: str) -> MetricsLog:
    if not (folder / RUN).exists():
        write_record(folder, losses=())
    return MetricsLog(folder, updates, names)


def test_a_tracker_gets_what_metrics_jsonl_has_and_a_resumed_run_goes_on(library, tmp_path, monkeypatch):
    kind, run = library.file.stem, tmp_path / "run"
    log = begin(run, 0, kind)
    other = begin(tmp_path / "other", 0, kind)
    for updates in (10, 20):
        log.append(line(updates, loss=updates / 7, bad=float("nan")))
        other.append(line(updates, loss=1.0))
    log.close()
    log.append(line(30, loss=0.0))  # nobody is told
    (_, first), (_, second) = library.calls("init")
    assert first["project"] == "lazyformer" and first["resume"] == "allow"
    assert first["config"] == json.loads((run / RUN).read_text())
    assert first["name"].startswith(f"{run}-") and first["name"] != second["name"]
    assert library.lines_of(first["name"]) == reported(run)[:2]
    assert library.lines_of(second["name"]) == reported(tmp_path / "other"), "both are open at the same time"
    assert library.calls("finish") == [([first["name"]], {})]

    resumed = begin(run, 20, kind)
    resumed.append(line(25, loss=3.0))
    assert library.calls("init")[-1][1] == first
    assert library.lines_of(first["name"]) == reported(run)
    if kind == "wandb":
        assert (first["id"], first["dir"]) == (first["name"][-8:], str(run))
        assert library.calls("define_metric")[-1] == (["*"], {"step_metric": "updates"})

    monkeypatch.setenv("WANDB_PROJECT", "mine")
    begin(run, 0, kind)  # all is trained again
    anew = library.calls("init")[-1][1]
    assert anew["name"] != first["name"] and anew["project"] == "mine"


def test_tensorboard_shows_a_resumed_run_as_metrics_jsonl_has_it(tmp_path):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    log = begin(tmp_path, 0, "tensorboard")
    for updates in (10, 20, 30):
        log.append(line(updates, loss=updates / 8))
    log.close()
    log = begin(tmp_path, 20, "tensorboard")
    log.append(line(25, loss=7.0))  # is read before the run ends
    shown = reader.EventAccumulator(str(tmp_path / "tensorboard"))
    shown.Reload()
    expected = [(each["updates"], each["train/loss"]) for each in reported(tmp_path)]
    assert [(each.step, each.value) for each in shown.Scalars("train/loss")] == expected
    assert [each.value for each in shown.Scalars("train/seconds")] == [5, 10, 12.5]


@pytest.mark.parametrize("broken", ["init", "log", "finish"])
def test_a_tracker_that_fails_is_warned_of_once_and_the_run_goes_on(library, tmp_path, caplog, broken):
    kind = library.file.stem
    breaks = f'if call == "{broken}":\n        raise OSError("no network")\n    with'
    source = library.file.with_suffix(".py")
    source.write_text(STAND_IN.replace("with", breaks, 1))
    log = begin(tmp_path / "run", 0, kind)
    for updates in (10, 20):
        log.append(line(updates, loss=1.0))
    log.close()
    assert [each.updates for each in read_metrics(tmp_path / "run")] == [10, 20]
    said = [each.getMessage() for each in caplog.records]
    assert said == [f"{kind} failed, and the run continues without it: no network"]


def test_an_unknown_tracker_and_a_missing_package_are_refused_before_all_else(data_folder, tmp_path, monkeypatch):
    unknown = "--report-to wanb: choose from tensorboard, wandb, trackio; did you mean wandb?"
    missing = (
        "--report-to trackio requires trackio (not installed): pip install 'lazyformer_fairseq[trackers]', or in a "
        "checkout pip install '.[trackers]'"
    )
    find = importlib.util.find_spec
    monkeypatch.setattr("lazyformer_fairseq.extras.find_spec", lambda name: None if name == "trackio" else find(name))
    for names, message in (("wanb", unknown), ("trackio", missing)):
        with pytest.raises(UserError) as error:
            refuse_missing_trackers([names])
        assert str(error.value) == message
        out = tmp_path / "out"
        compared = f"compare {data_folder} {out} --task masked-lm --report-to {names}"
        finetuned = f"finetune nowhere.pt --data {data_folder} --output {out} --report-to {names}"
        assert refusal(*compared.split()) == refusal(*finetuned.split()) == message
        assert not out.exists()


IN_PROCESSES = pytest.mark.parametrize("library", ["trackio"], indirect=True)  # where fairseq may import the real wandb


@IN_PROCESSES
@pytest.mark.parametrize("place", ["--in-turn", "--alone"])
def test_compare_reports_all_its_trainings(library, data_folder, tmp_path, place):
    out = tmp_path / "out"
    sizes = "--embed-dim 8 --ffn-embed-dim 8 --heads 2 --batch-size 4 --tokens-per-sample 16 --validation-tokens 64"
    given = f"--task masked-lm --model one=sf --model two=sff --seeds 1 --updates 2 --device cpu {sizes} {place}"
    invoke("compare", data_folder, out, *given.split(), "--report-to", library.file.stem)
    names = {given["name"].rpartition("-")[0]: given["name"] for _, given in library.calls("init")}
    folders = [str(each.parent) for each in out.glob("runs/*/metrics.jsonl")]
    assert sorted(names) == sorted(folders) and len(folders) == 2
    for folder, name in names.items():
        assert library.lines_of(name) == reported(Path(folder)) != []
    assert sorted(run for (run,), _ in library.calls("finish")) == sorted(names.values())


@IN_PROCESSES
def test_finetune_reports_all_its_runs(library, tmp_path):
    data, out = tmp_path / "data", tmp_path / "out"
    for split, count in (("train", 20), ("dev", 8)):
        rows = [f"a house is {'open' if row % 2 else 'shut'}\t{row % 2}" for row in range(count)]
        write_lines(data / f"{split}.tsv", ["text\tlabel", *rows])
    given = f"--data {data} --output {out} --lr 1e-3,2e-3 --seeds 1 --epochs 2 --gpus none --workers 1"
    invoke("finetune", CHECKPOINT, *given.split(), "--report-to", library.file.stem)
    runs = {given["name"].rpartition("-")[0]: given["name"] for _, given in library.calls("init")}
    assert len(runs) == 2
    for folder, name in runs.items():
        assert library.lines_of(name) == reported(Path(folder)) != []
    assert len(library.calls("finish")) == 2


def test_fairseqs_loop_reports_and_a_resumed_run_goes_on(library, data_folder, tmp_path, fairseq_train):
    options = (
        "--arch lazyformer_m2x6_s_tiny --criterion masked_lm_accuracy --batch-size 4 --tokens-per-sample 32 --lr 1e-3 "
        f"--log-interval 2 --log-format none --max-valid-steps 2 --report-to {library.file.stem} --max-update"
    )
    for updates in (3, 6):
        fairseq_train(data_folder, f"{options} {updates}", tmp_path / "run")
    (_, first), (_, resumed) = library.calls("init")
    assert first["name"] == resumed["name"] and resumed["config"]["schedule"]["max_update"] == 6
    assert library.lines_of(first["name"]) == reported(tmp_path / "run")
    with pytest.raises(UserError, match="--report-to wanb: choose from"):
        fairseq_train(data_folder, f"{options} 7 --report-to wanb", tmp_path / "run")
