"""SIGKILL at random moments of a run that saves all the time: what is there afterwards can always be gone on from."""

import collections
import multiprocessing
import random
import re
import signal
import time
from contextlib import contextmanager

import pytest
from fairseq import checkpoint_utils
from fairseq_plugin.reliability.damaged_files import options
from fairseq_plugin.reliability.watched_training import PHASES, WITHIN_A_SAVE, Watch, train
from helpers import ROOT

from lazyformer_fairseq.fairseq_plugin.reliability.checkpoints import choose, look_into
from lazyformer_fairseq.storage.atomic import UNFINISHED


@pytest.mark.parametrize(
    ("kills", "within"),
    [(2, 1), pytest.param(100, 60, marks=[pytest.mark.slow, pytest.mark.reliability, pytest.mark.timeout(3600)])],
)
def test_killed_at_random_moments(data_folder, tmp_path, record_counts, kills, within):
    folder = tmp_path / "run"
    watch = Watch(tmp_path / "watch")
    chance = random.Random(1)
    phases = collections.Counter()
    leftovers = 0

    def enough() -> bool:
        """How many kills that takes is up to the machine: where a kill falls nobody knows before."""
        seen = phases.total() >= kills and sum(phases[phase] for phase in WITHIN_A_SAVE) >= within
        return bool(seen and watch.reported and (phases["writing a file"] or phases["writing a copy"]))

    while not enough():
        with started(data_folder, folder, watch, tmp_path) as run:
            if chance.random() < 0.8:
                wait_for_saves(run, watch, chance.randrange(3) if watch.milliseconds else 1)
                time.sleep(chance.random() * watch.milliseconds / 1000)
            else:
                time.sleep(chance.random() * 2)
        assert run.exitcode == -signal.SIGKILL, (tmp_path / "log").read_text()[-3000:]
        phases[PHASES[watch.phase]] += 1
        leftovers += len(list(folder.glob(f"*{UNFINISHED}")))
        assert_good(folder, watch)

    unfinished = list(folder.glob(f"*{UNFINISHED}"))
    with started(data_folder, folder, watch, tmp_path) as run:
        wait_for_saves(run, watch, 0)
        assert not any(path.exists() for path in unfinished)
    record_counts(
        "checkpoint kills",
        kills=phases.total(),
        within_a_save=sum(phases[phase] for phase in WITHIN_A_SAVE),
        phases={phase: phases[phase] for phase in PHASES},
        unfinished_files_left=leftovers,
        lost=0,
        updates=watch.updates,
    )


@contextmanager
def started(data, folder, watch, tmp_path):
    """A process that has begun to train, killed at the end of the block; forked from one that has imported everything,
    so it begins at once.
    """
    command = [
        *("fairseq-train", str(data), "--user-dir", str(ROOT / "lazyformer_fairseq"), "--save-dir", str(folder)),
        *"--task full_sentences_masked_lm --tokens-per-sample 32 --cpu --criterion masked_lm_accuracy".split(),
        *"--arch lazyformer_m2x6_s_tiny --sublayer-pattern M2 --encoder-embed-dim 256 --batch-size 2".split(),
        *"--optimizer fused_adam --lr-scheduler linear_warmup --lr 1e-4 --max-update 1000000 --num-workers 0".split(),
        *"--save-interval-updates 2 --keep-interval-updates 2 --keep-last-epochs 1 --max-valid-steps 1".split(),
        *"--log-format simple --log-interval 1000".split(),
    ]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lazyformer_fairseq", "fairseq_cli.train"])
    process = context.Process(target=train, args=(command, tmp_path / "watch", tmp_path / "log"))
    watch.phase = watch.saves = 0
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


def wait_for_saves(run, watch, finished: int) -> None:
    """Until the run begins to save, having saved so many times already."""
    while watch.saves <= finished:
        assert run.is_alive()
        time.sleep(0.0005)


def assert_good(folder, watch) -> None:
    """Every file that has its name is intact and of the update that its name says; a run goes on from what it told."""
    found = choose(options(folder))
    for path in folder.glob("checkpoint*.pt"):
        updates = look_into(path).updates
        claimed = re.fullmatch(r"checkpoint_\d+_(\d+)\.pt", path.name)
        assert claimed is None or updates == int(claimed[1])
        assert updates <= watch.updates
    if found is None:
        assert watch.reported == 0, "a checkpoint was reported, and there is none"
        return
    state = checkpoint_utils.load_checkpoint_to_cpu(str(found))
    assert watch.reported <= state["optimizer_history"][-1]["num_updates"] <= watch.updates
