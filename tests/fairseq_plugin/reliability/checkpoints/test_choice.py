"""Which checkpoint a run starts from when files are damaged for real: all its processes the same, or they stop."""

import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from fairseq.distributed import utils as distributed_utils
from fairseq_plugin.reliability.damage import TINY, flip_a_bit, options, truncate
from helpers import ROOT, message_of, write_toy_glue

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.reliability import checkpoints
from lazyformer_fairseq.fairseq_plugin.reliability.checkpoints import choose, look_into, save
from lazyformer_fairseq.storage.atomic import UNFINISHED

TINY = f"{TINY} --encoder-embed-dim 16 --save-interval-updates 3"
NINTH = ("checkpoint_last.pt", "checkpoint_best.pt", "checkpoint_1_9.pt")


def parts_of(state: dict) -> list[int]:
    """After how many updates each part of a run ended."""
    return [part["num_updates"] for part in state["optimizer_history"]]


@pytest.fixture(scope="module")
def run_of_nine(tmp_path_factory):
    return tmp_path_factory.mktemp("run") / "run"


@pytest.fixture
def trained(data_folder, run_of_nine, tmp_path, fairseq_train):
    """A copy of a run of nine updates: checkpoints of the updates 3, 6, 9, the best and the last."""
    if not run_of_nine.exists():
        fairseq_train(data_folder, f"{TINY} --max-update 9", run_of_nine)
    return shutil.copytree(run_of_nine, tmp_path / "run")


@pytest.mark.parametrize("damage", [flip_a_bit, truncate])
def test_the_newest_intact_checkpoint_takes_the_place_of_a_damaged_one(
    data_folder, trained, fairseq_train, caplog, damage
):
    for name in NINTH:
        damage(trained / name)
    (trained / f".checkpoint_last.pt.0011aabb{UNFINISHED}").touch()
    os.utime(trained / "checkpoint_1_3.pt")  # the youngest file, but not the newest checkpoint
    resumed = fairseq_train(data_folder, f"{TINY} --max-update 10", trained)
    for name in ("checkpoint_last.pt", "checkpoint_1_9.pt"):
        assert f"{trained / name}: truncated, damaged or no checkpoint" in caplog.text
    assert f"newest intact checkpoint: {trained / 'checkpoint_1_6.pt'}, update 6" in caplog.text
    assert parts_of(resumed) == [6, 10]
    assert {path.name for path in trained.glob(".*")} == {".training.lock"}, "what a kill left"


def test_without_any_intact_checkpoint_the_run_stops_and_names_them(data_folder, trained, fairseq_train):
    damaged = sorted(trained.glob("checkpoint*.pt"))
    for path in damaged:
        flip_a_bit(path)
    before = {path: path.read_bytes() for path in damaged}
    message = message_of(fairseq_train, data_folder, f"{TINY} --max-update 10", trained)
    assert "no intact checkpoint; move these away to start anew" in message
    assert len(damaged) == 5 and all(f"{path}: truncated, damaged" in message for path in damaged)
    assert {path: path.read_bytes() for path in trained.glob("checkpoint*.pt")} == before


def test_a_missing_last_checkpoint_a_link_to_nowhere_or_a_folder_is_no_start_from_scratch(trained, tmp_path, caplog):
    for name in NINTH:
        (trained / name).unlink()
    assert choose(options(trained)) == trained / "checkpoint_1_6.pt"
    assert "checkpoint_last.pt: is missing" in caplog.text
    assert choose(options(trained, finetune_from_model=str(trained / "checkpoint_1_3.pt"))).name == "checkpoint_1_6.pt"
    (trained / "checkpoint_last.pt").symlink_to("removed.pt")
    (trained / "checkpoint_1_9.pt").mkdir()
    assert choose(options(trained)) == trained / "checkpoint_1_6.pt"
    assert choose(options(trained, checkpoint_suffix="_b")) is None
    assert choose(options(tmp_path)) is None and choose(options(tmp_path / "missing")) is None


def test_a_file_asked_for_by_name_is_taken_and_so_is_the_last_even_if_others_are_newer(trained, caplog):
    last = trained / "checkpoint_last.pt"
    for option in ("finetune_from_model", "continue_once"):  # the last may be named as the start too
        assert choose(options(trained, **{option: str(last)})) == last
    assert choose(options(trained, restore_file=str(trained / "checkpoint_1_3.pt"))).name == "checkpoint_1_3.pt"
    assert "checkpoint_last.pt: passed over for --restore-file" in caplog.text
    shutil.copy(trained / "checkpoint_1_3.pt", last)  # how a user goes back
    assert choose(options(trained)) == last and look_into(last).updates == 3


def test_weights_without_the_optimizer_are_nothing_to_go_on_from(trained):
    flip_a_bit(trained / "checkpoint_last.pt")
    for name in NINTH[1:]:
        state = torch.load(trained / name)
        del state["last_optimizer_state"]
        save(state, trained / name)
    assert choose(options(trained)) == trained / "checkpoint_1_6.pt"
    assert look_into(choose(options(trained, no_save_optimizer_state=True))).updates == 9


def test_a_dangerous_checkpoint_is_refused_and_not_passed_over(trained):
    class Dangerous:
        def __reduce__(self):
            return os.mkdir, (str(trained / "made"),)

    for write in (torch.save, lambda state, path: path.write_bytes(pickle.dumps(state))):
        write({"model": Dangerous()}, trained / "checkpoint_last.pt")
        with pytest.raises(UserError, match="checkpoint_last.pt: refused, nothing of it was run"):
            choose(options(trained))
    assert not (trained / "made").exists()


@pytest.mark.slow
def test_a_checkpoint_asked_for_by_name_must_be_intact(data_folder, trained, tmp_path, fairseq_train):
    flip_a_bit(trained / "checkpoint_1_9.pt")
    glue = write_toy_glue(tmp_path / "glue", train=8, valid=4)
    for option in ("--restore-file", "--finetune-from-model", "--continue-once"):
        for name, words in (("checkpoint_1_9.pt", "truncated, damaged"), ("missing.pt", "no such")):
            with pytest.raises(UserError, match=f"{name}: {words}"):
                fairseq_train(data_folder, f"{TINY} --max-update 10 {option} {trained / name}", tmp_path / "new")
    tuning = TINY.replace("masked_lm_accuracy", f"glue --finetune-from-model {trained / 'checkpoint_1_9.pt'}")
    task = f"glue --tokenizer-folder {trained / 'tokenizer'}"
    message = message_of(fairseq_train, glue / "CoLA", f"{tuning} --max-epoch 1", tmp_path / "new", task=task)
    assert "checkpoint_1_9.pt: truncated, damaged" in message
    assert not list((tmp_path / "new").glob("checkpoint*"))


@pytest.mark.slow
def test_a_suffix_tells_runs_in_one_folder_apart(data_folder, tmp_path, fairseq_train, trained):
    for name in ("checkpoint_last", "checkpoint_1_3"):
        shutil.copy(trained / f"{name}.pt", trained / f"{name}_b.pt")
    truncate(trained / "checkpoint_last_b.pt")
    fairseq_train(data_folder, f"{TINY} --max-update 4 --checkpoint-suffix _b", trained)
    assert parts_of(torch.load(trained / "checkpoint_last_b.pt")) == [3, 4]


# --- several processes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("told", "seen", "words"),
    [
        ((None, "run: holds no intact checkpoint"), [True, True], "run: holds no intact checkpoint"),
        ((Path("checkpoint_last.pt"), None), [True, False], r"processes \[1\] cannot read it; all nodes need the same"),
    ],
)
def test_the_second_process_hears_of_the_problem(told, seen, words):
    trainer = SimpleNamespace(
        data_parallel_rank=1, data_parallel_world_size=2, data_parallel_process_group=None, device=torch.device("cpu")
    )
    doubles = {"broadcast_object": lambda *_: told, "all_gather_list": lambda *_: seen}
    with mock.patch.multiple(distributed_utils, **doubles), pytest.raises(UserError, match=words):
        checkpoints._same_on_all_ranks(trainer, mock.Mock(side_effect=AssertionError("the first one chooses")))


@pytest.mark.slow
@pytest.mark.reliability
def test_two_processes_with_damaged_checkpoints(data_folder, tmp_path, free_port):
    folder = tmp_path / "run"

    def train(updates: int) -> tuple[int, str]:
        command = [
            *("bash", ROOT / "scripts" / "pretrain.sh", "lazyformer_m2x6_s_tiny", data_folder, "--save-dir", folder),
            *f"--gpus 2 --sequences-per-update 8 --master 127.0.0.1:{free_port} --num-workers 0".split(),
            *f"--tokens-per-sample 32 --save-interval-updates 2 --max-update {updates}".split(),
        ]
        environment = {**os.environ, "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"}
        run = subprocess.run(command, capture_output=True, text=True, env=environment)
        return run.returncode, run.stdout + run.stderr

    code, output = train(4)
    assert code == 0, output[-4000:]
    for name in ("checkpoint_last.pt", "checkpoint_best.pt", "checkpoint_1_4.pt"):
        flip_a_bit(folder / name)
    code, output = train(5)
    assert code == 0, output[-4000:]
    assert f"newest intact checkpoint: {folder / 'checkpoint_1_2.pt'}, update 2" in output
    assert parts_of(torch.load(folder / "checkpoint_last.pt")) == [2, 5]
    for path in folder.glob("checkpoint*.pt"):
        flip_a_bit(path)
    code, output = train(6)
    assert code != 0 and "holds no intact checkpoint" in output and "checkpoint_1_2.pt: truncated" in output
