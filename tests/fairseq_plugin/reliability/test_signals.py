"""SIGTERM, SIGUSR1, Ctrl-C and SIGKILL at all sorts of moments: a run saves, ends with exit code 75, and goes on."""

import getpass
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fairseq_plugin.reliability.damage import TINY
from helpers import PRETRAINING, ROOT, assert_equal_state, train_words, updates_of
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from lazyformer_fairseq.fairseq_plugin.reliability import checkpoints, torchrun
from lazyformer_fairseq.fairseq_plugin.reliability.torchrun import Agent
from lazyformer_fairseq.fairseq_plugin.trainer import SafeTrainer
from lazyformer_fairseq.training.stop_signals import EXIT_CODE, INTERRUPTED


@pytest.fixture
def before(monkeypatch) -> Callable[..., None]:
    """``before(owner, name, action, times=1)``: what happens before a function does as ever, at its first calls."""

    def patch(owner, name: str, action: Callable[[], object], times: int = 1) -> None:
        function, calls = getattr(owner, name), []

        def replacement(*args, **kwargs):
            calls.append(None)
            if len(calls) <= times:
                action()
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, replacement)

    return patch


@pytest.fixture
def stopped_run(data_folder, tmp_path, fairseq_train) -> Callable[[str], Path]:
    """``stopped_run(options)``: the folder of a run that ends with the exit code of one that is to be resumed."""

    def run(options: str) -> Path:
        with pytest.raises(SystemExit) as ended:
            # It ends within the loop, so a checkpoint that the fixture looks for is not missed.
            fairseq_train(data_folder, f"{TINY} --max-update 9 {options}", tmp_path / "run")
        assert ended.value.code == EXIT_CODE
        return tmp_path / "run"

    return run


def terminate() -> None:
    signal.raise_signal(signal.SIGTERM)


def test_within_validation_the_checkpoint_comes_first_and_its_score_after(stopped_run, before):
    events = []
    before(SafeTrainer, "valid_step", lambda: signal.raise_signal(signal.SIGUSR1))
    before(SafeTrainer, "valid_step", lambda: events.append("batch"), times=1000)
    before(checkpoints, "save", lambda: events.append("save"), times=1000)
    folder = stopped_run("--save-interval-updates 4")
    assert events[:3] == ["batch", "save", "batch"]  # saved after the batch under way
    assert events[-1] == "save" and events.count("save") == 2  # all of the validation, then its checkpoint
    for name in ("checkpoint_best.pt", "checkpoint_last.pt"):
        assert updates_of(folder / name) == 4


@pytest.mark.slow
def test_while_a_checkpoint_is_written_it_is_written_and_one_update_later_the_run_ends(stopped_run, before):
    before(checkpoints, "save", terminate)
    folder = stopped_run("--save-interval-updates 4 --disable-validation")
    assert updates_of(folder / "checkpoint_1_4.pt") == 4 and updates_of(folder / "checkpoint_last.pt") == 5


def test_before_the_first_update_that_is_made_and_saved(stopped_run, before):
    before(SafeTrainer, "load_checkpoint", terminate)
    assert updates_of(stopped_run("") / "checkpoint_last.pt") == 1


@pytest.mark.parametrize(
    ("task", "options"),
    [
        (PRETRAINING, f"{TINY} --tokens-per-sample 32 --update-freq 3 --dropout 0.2"),
        pytest.param(
            "stream_language_modeling --tgt-len 8",
            "--arch par_transformer_tiny --sublayer-pattern sf --mem-len 8 --criterion causal_lm --batch-size 4 "
            "--update-freq 3 --dropout 0.2",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["masked", "streams"],
)
def test_ctrl_c_within_an_update_loses_that_update_alone(
    data_folder, lm_data, tmp_path, fairseq_train, before, task, options, interruptible
):
    data, passes = data_folder if task == PRETRAINING else lm_data, []
    options += " --disable-validation --max-update 4"
    whole = fairseq_train(data, options, tmp_path / "whole", task)

    def interrupt() -> None:
        passes.append(None)
        if len(passes) in (2, 10):  # while the second pass of the first update, and of the third, is prepared
            signal.raise_signal(signal.SIGINT)

    before(SafeTrainer, "_prepare_sample", interrupt, times=100)
    last = tmp_path / "run" / "checkpoint_last.pt"
    for passes_made, updates in ((2, 0), (10, 2)):
        with pytest.raises(SystemExit) as ended:
            fairseq_train(data, options, tmp_path / "run", task)
        assert ended.value.code == INTERRUPTED and len(passes) == passes_made
        assert updates == (updates_of(last) if last.exists() else 0)
    resumed = fairseq_train(data, options, tmp_path / "run", task)
    for part in ("model", "last_optimizer_state"):
        assert_equal_state(resumed[part], whole[part], part)


@pytest.mark.parametrize("option", ["--no-save", "--no-last-checkpoints"])
def test_without_saving_it_ends_as_well_and_afterwards_signals_mean_what_they_did(stopped_run, before, caplog, option):
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    before(SafeTrainer, "train_step", terminate)
    folder = stopped_run(option)
    assert "nothing was saved (--no-save or --no-last-checkpoints) at 1 updates" in caplog.text
    assert not list(folder.glob("*.pt"))
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)] == handlers


@pytest.mark.slow
def test_a_disk_that_is_full_is_no_reason_to_say_75(data_folder, tmp_path, fairseq_train, before, monkeypatch):
    def full(state, path):
        raise OSError(28, "No space left on device")

    before(SafeTrainer, "train_step", terminate)
    monkeypatch.setattr(checkpoints, "save", full)
    with pytest.raises(Exception, match="No space left on device") as ended:
        fairseq_train(data_folder, f"{TINY} --max-update 9", tmp_path / "run")
    assert not isinstance(ended.value, SystemExit)


def words_of(data: Path, folder: Path) -> list[str]:
    """Of a run of two data workers, without an end."""
    return train_words(data, f"{TINY} --num-workers 2 --max-update 100000 --log-interval 1", folder / "run")


def command_of(entry: str, data: Path, folder: Path) -> list[str]:
    """The same run, as a way to start fairseq's training has it."""
    if entry == "python -m":
        return [sys.executable, "-m", "fairseq_cli.train", *words_of(data, folder)]
    program = str(Path(sys.executable).parent / entry)
    if entry == "fairseq-train":
        return [program, *words_of(data, folder)]
    return [
        *(program, "--config-dir", str(ROOT / "configs" / "pretraining"), "--config-name", "lazyformer_m2x6_s"),
        *(f"task.data={data}", f"checkpoint.save_dir={folder / 'run'}"),
        *"common.cpu=true common.fp16=false distributed_training.distributed_world_size=1".split(),
        *"dataset.num_workers=2 dataset.batch_size=4 optimization.update_freq=[1]".split(),
        *"task.tokens_per_sample=32 model.encoder_embed_dim=32 model.encoder_attention_heads=2".split(),
        *"model.encoder_ffn_embed_dim=64 common.log_interval=1 common.log_format=simple hydra.run.dir=.".split(),
        f"common.user_dir={ROOT / 'lazyformer_fairseq'}",
    ]


def stop_after_five(command: list[str], folder: Path, number: int, stop) -> tuple[str, int]:
    """Runs; calls `stop(process)` when five updates are in the log. Returns the output, and updates that were saved."""
    output = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder, start_new_session=True
    ) as run:
        for line in run.stdout:
            output.append(line)
            if stop and re.search(r"num_updates['\"]?[=:] ?['\"]?5\b", line):
                stop(run)
                stop = None
    output = "".join(output)
    assert run.returncode == (INTERRUPTED if number == signal.SIGINT else EXIT_CODE), output[-3000:]
    assert "Traceback" not in output and f"{number.name}: saved at" in output
    return output, updates_of(folder / "run" / "checkpoint_last.pt")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("entry", "number"),
    [
        ("python -m", signal.SIGTERM),
        ("python -m", signal.SIGUSR1),
        ("fairseq-train", signal.SIGTERM),
        ("fairseq-hydra-train", signal.SIGUSR1),
        ("fairseq-train", signal.SIGINT),
    ],
)
def test_a_signal_to_every_process_and_another_one(data_folder, tmp_path, entry, number, interruptible):
    def stop(run):
        for _ in range(1 if number == signal.SIGINT else 2):
            os.killpg(run.pid, number)  # the data workers get it too

    (tmp_path / "run").mkdir()
    output, saved = stop_after_five(command_of(entry, data_folder, tmp_path), tmp_path, number, stop)
    logged = [int(updates) for updates in re.findall(r"num_updates['\"]?[=:] ?['\"]?(\d+)", output)]
    assert saved == max(logged)  # no update came after it


TWO_GPUS = """
import torch

torch.cuda.device_count = lambda: 2  # for the process that starts the others; these see what is there
if __name__ == "__main__":
    from fairseq_cli.train import cli_main  # what is imported above, every data worker imports too

    cli_main()
"""
STUCK = """
import time

from fairseq.trainer import Trainer
from fairseq_cli.train import cli_main

def train_step(self, samples, raise_oom=False):
    print("an update without an end", flush=True)
    while True:
        time.sleep(0.1)

if __name__ == "__main__":
    Trainer.train_step = train_step
    cli_main()
"""


@pytest.mark.slow
def test_a_second_ctrl_c_ends_it_at_once(data_folder, tmp_path, interruptible, warm_python):
    (tmp_path / "stuck.py").write_text(STUCK)
    command = [warm_python / "python", str(tmp_path / "stuck.py"), *words_of(data_folder, tmp_path)]
    output = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        for line in run.stdout:
            output.append(line)
            if "an update without an end" in line or "press again to exit immediately" in line:
                run.send_signal(signal.SIGINT)
    assert run.returncode == -signal.SIGINT, "".join(output)[-3000:]  # shells call it 130
    assert not list((tmp_path / "run").glob("*.pt"))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_where_fairseq_starts_the_processes_a_signal_reaches_them(data_folder, tmp_path, number, interruptible):
    (tmp_path / "two_gpus.py").write_text(TWO_GPUS)
    world = "--distributed-world-size 2 --distributed-backend gloo --ddp-backend legacy_ddp".split()
    command = [sys.executable, str(tmp_path / "two_gpus.py"), *words_of(data_folder, tmp_path), *world]
    # A terminal's Ctrl-C goes to all of them.
    send = os.killpg if number == signal.SIGINT else os.kill
    output, saved = stop_after_five(command, tmp_path, number, lambda run: send(run.pid, number))
    assert output.count("saved at") == 1 and saved >= 5


# --- several processes through scripts/pretrain.sh: one is killed, one is sent a signal, there are more or fewer ------


ENVIRONMENT = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
SCRIPT = ("bash", ROOT / "scripts" / "pretrain.sh")
# Dropout on, two batches an update, a checkpoint within the first epoch.
SCRIPTED = (
    "--sublayer-pattern M2 --tokens-per-sample 32 --lr 1e-3 --num-workers 0 --sequences-per-update 16 "
    "--sequences-per-gpu 4 --max-update 8 --save-interval-updates 3 --log-interval 1 --log-seconds 0 "
    "--disable-validation"
)


@pytest.fixture
def pretrain(data_folder, tmp_path) -> Callable[..., subprocess.Popen]:
    """``pretrain("--gpus 2 ...", save_dir)``: the script, or the command that is given, started; to be read."""

    def start(options: str, folder: str = "run", by=SCRIPT) -> subprocess.Popen:
        words = f"lazyformer_m2x6_s_tiny {data_folder} --save-dir {tmp_path / folder} {SCRIPTED} {options}".split()
        pipe = subprocess.PIPE
        return subprocess.Popen([*by, *words], env=ENVIRONMENT, stdout=pipe, stderr=subprocess.STDOUT, text=True)

    return start


def finish(run: subprocess.Popen, *steps: tuple[str, Callable[[], object]]) -> tuple[int, str]:
    """Reads to the end, and acts once when a line has a step's words, then looks for the next step's.

    Returns the exit code and the output.
    """
    output, left = [], list(steps)
    with run:
        for line in run.stdout:
            output.append(line)
            if left and re.search(left[0][0], line):
                left.pop(0)[1]()
    assert not left, "".join(output)[-3000:]
    return run.returncode, "".join(output)


def workers_of(run: subprocess.Popen) -> list[int]:
    """The processes that train, in order of their rank. The script has become their launcher."""
    return [int(pid) for pid in Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()]


def assert_equal_runs(folder: Path, name: str = "checkpoint_last.pt") -> None:
    """A run that was disturbed saved what the whole one did."""
    one, other = (torch.load(folder / run / name) for run in ("run", "whole"))
    assert one["optimizer_history"][-1] == other["optimizer_history"][-1]
    for part in ("model", "last_optimizer_state"):
        assert_equal_state(one[part], other[part], part)


EXPERTS = "--sublayer-pattern sf[experts=4]"
SAVED = r"Saved checkpoint .* @ {} updates"


@pytest.mark.slow
def test_one_of_two_processes_is_killed_then_their_launcher(pretrain, tmp_path, monkeypatch, warm_python):
    """All start again after the first kill, as if nothing had been; after the second they save and end."""
    temporary = Path(tempfile.mkdtemp())  # tmp_path is too long for the data workers' sockets
    monkeypatch.setitem(ENVIRONMENT, "TMPDIR", str(temporary))
    options = "--gpus 2 --max-restarts 1 --num-workers 1 --max-update 100000"
    whole = pretrain(options, "whole", by=(warm_python / "lazyformer", "pretrain"))
    code, output = finish(whole, (SAVED.format(6), whole.terminate))
    assert code == EXIT_CODE, output[-3000:]
    assert {path.name for path in temporary.iterdir()} <= {f"torchinductor_{getpass.getuser()}"}, "nothing is left"

    run, workers = pretrain(options), []

    def kill_launcher():
        workers.extend(os.pidfd_open(pid) for pid in workers_of(run))
        run.kill()

    second_worker = (SAVED.format(3), lambda: os.kill(workers_of(run)[1], signal.SIGKILL))
    _, output = finish(run, second_worker, (SAVED.format(6), kill_launcher))  # until nobody can write any more
    assert "restart 1 of 1" in output and "@ 3 updates)" in output
    assert_equal_runs(tmp_path, "checkpoint_1_6.pt")
    for worker in workers:
        assert select.select([worker], [], [], 600)[0], "it trains on without its launcher"
        os.close(worker)
    assert re.search(r"SIGTERM: saved at \d+ updates", output), output[-3000:]
    assert updates_of(tmp_path / "run" / "checkpoint_last.pt") >= 6


@pytest.mark.slow
@pytest.mark.reliability
@pytest.mark.parametrize(
    ("to_the_script", "number", "expected"),
    [(True, signal.SIGUSR1, EXIT_CODE), (False, signal.SIGUSR1, EXIT_CODE), (True, signal.SIGINT, INTERRUPTED)],
)
def test_a_signal_changes_nothing(pretrain, tmp_path, interruptible, to_the_script, number, expected):
    assert finish(pretrain("--gpus 2", "whole"))[0] == 0
    run = pretrain("--gpus 2")
    # To one of them: both agree on the update to stop at.
    stop = ("num_updates=4", lambda: os.kill(run.pid if to_the_script else workers_of(run)[1], number))
    code, output = finish(run, stop)
    assert code == expected, output[-3000:]
    assert "Traceback" not in output and "restart" not in output
    assert updates_of(tmp_path / "run" / "checkpoint_last.pt") < 8
    assert finish(pretrain("--gpus 2"))[0] == 0
    assert_equal_runs(tmp_path)


def test_a_signal_while_there_are_no_processes_reaches_those_that_come(monkeypatch):
    """Between the end of some and the start of the next ones, after one of them has died."""
    told = []
    agent = object.__new__(Agent)
    agent._remaining_restarts, agent._pcontext = 1, SimpleNamespace(pids=lambda: {0: 12345})
    monkeypatch.setattr(LocalElasticAgent, "_start_workers", lambda *_: {0: 12345})
    monkeypatch.setattr(Agent, "signalled", 0)
    monkeypatch.setattr(torchrun.signal, "signal", lambda *_: None)
    monkeypatch.setattr(torchrun.os, "kill", lambda pid, number: told.append((pid, number)))
    agent._start_workers(None)
    assert told == []
    agent._forward(signal.SIGUSR1, None)
    agent._start_workers(None)
    assert told == [(12345, signal.SIGUSR1)] * 2 and agent._remaining_restarts == 0


@pytest.mark.slow
@pytest.mark.reliability
@pytest.mark.parametrize("more", ["", EXPERTS])
def test_killed_again_and_again(pretrain, tmp_path, more, record_counts):
    assert finish(pretrain(f"--gpus 2 --max-update 20 {more}", "whole"))[0] == 0
    run = pretrain(f"--gpus 2 --max-update 20 --max-restarts 5 {more}")
    kills = []
    with run:
        for line in run.stdout:
            saved = re.search(r"Saved checkpoint .* @ (\d+) updates", line)
            if saved and int(saved[1]) > max(kills, default=0) and len(kills) < 5:
                kills.append(int(saved[1]))
                os.kill(workers_of(run)[len(kills) % 2], signal.SIGKILL)
    assert run.returncode == 0 and len(kills) == 5
    assert_equal_runs(tmp_path)
    record_counts("a process of two killed, all started again, bit for bit", model=more, kills=len(kills))


@pytest.mark.slow
@pytest.mark.reliability
def test_two_nodes_start_again_together(pretrain, tmp_path, free_port):
    nodes = f"--nodes 2 --gpus 1 --master 127.0.0.1:{free_port} --max-restarts 2"

    def both(folder: str, kill: bool) -> None:
        started = [pretrain(f"{nodes} --node-rank {rank}", folder) for rank in (0, 1)]
        with ThreadPoolExecutor() as readers:
            read = [readers.submit(finish, run) for run in started]
            while kill and not (tmp_path / folder / "checkpoint_1_3.pt").exists():
                time.sleep(0.02)
                assert not read[0].done(), read[0].result()
            if kill:
                os.kill(workers_of(started[1])[0], signal.SIGKILL)
        (first, _), (second, output) = (each.result() for each in read)
        assert (first, second) == (0, 0), output
        assert ("restart 1 of 2" in output) == kill

    both("whole", kill=False)
    both("run", kill=True)
    assert_equal_runs(tmp_path)


NOTES_IDS = """
import os, signal
from lazyformer_fairseq.fairseq_plugin.registration import after_registration

def note_ids():
    from lazyformer_fairseq.fairseq_plugin.trainer import SafeTrainer
    original = SafeTrainer.train_step

    def train_step(self, samples, *args, **kwargs):
        stop = int(os.environ["STOP_AT"])
        if self.get_num_updates() == stop - 1 and self.data_parallel_rank == self.data_parallel_world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        ids = [str(number) for sample in samples if sample for number in sample["id"].tolist()]
        output = original(self, samples, *args, **kwargs)  # or the run ends here, before the update is made
        with open(os.environ["IDS"], "a") as file:
            file.write(" ".join(ids) + "\\n")
        return output

    SafeTrainer.train_step = train_step

after_registration(note_ids)
"""


@pytest.mark.slow
@pytest.mark.reliability
@pytest.mark.parametrize(
    ("processes", "more"),
    [
        *((processes, "") for processes in ([1, 2], [2, 1], [2, 1, 2], [2, 3])),
        *((processes, EXPERTS) for processes in ([1, 2], [2, 1], [2, 3])),  # three hold all of the four experts
    ],
)
def test_other_processes_see_every_sample_once(pretrain, tmp_path, monkeypatch, processes, more, record_counts):
    (tmp_path / "sitecustomize.py").write_text(NOTES_IDS)  # which each python imports when it starts
    monkeypatch.setitem(ENVIRONMENT, "PYTHONPATH", str(tmp_path))
    monkeypatch.setitem(ENVIRONMENT, "IDS", str(tmp_path / "ids"))
    for number, count in enumerate(processes):
        stop = 3 * (number + 1) if number < len(processes) - 1 else 0
        monkeypatch.setitem(ENVIRONMENT, "STOP_AT", str(stop))
        options = f"--gpus {count} --sequences-per-update 12 --max-epoch 1 --max-update 1000 {more}"
        code, output = finish(pretrain(options))
        assert code == (EXIT_CODE if stop else 0), output[-3000:]
    kept = torch.load(tmp_path / "run" / "checkpoint_last.pt")
    if more:
        experts = {name.partition(".experts.")[2][:1] for name in kept["model"] if ".experts." in name}
        assert experts == set("0123")
    ids = sorted(map(int, (tmp_path / "ids").read_text().split()))
    assert ids == list(range(len(ids))) and len(ids) > 200
    counts = {"processes": processes, "model": more, "samples": len(ids)}
    record_counts("an epoch of runs of so many processes", **counts, twice=0, missing=0)
