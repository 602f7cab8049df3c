"""A long run holds no more memory, files, threads and processes at its end than when it has warmed up."""

import os
from pathlib import Path

import pytest
from fairseq.logging import metrics
from fairseq_plugin.reliability.soak import FLAT, draw, growth, run_soak, what_grows

READ_AHEAD = 12  # batches: fairseq's --data-buffer-size, and two of the worker's

pytestmark = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="measures through Linux's /proc")


@pytest.mark.slow
def test_a_short_run_loses_nothing_in_its_epochs(data_folder, tmp_path):
    samples = run_soak(data_folder, tmp_path, updates=500, every=10)
    assert not what_grows(samples, "short"), samples
    without_worker = [sample for sample in samples if not sample["children"]]
    assert all(sample["batches_left"] <= READ_AHEAD for sample in without_worker), "the dips in the picture"


@pytest.mark.slow
@pytest.mark.reliability
@pytest.mark.timeout(7200)
def test_memory_and_handles_are_flat_over_20000_updates(data_folder, tmp_path, record_counts):
    samples = run_soak(data_folder, tmp_path, updates=20_000, every=100)
    log = (tmp_path / "log").read_text()
    record_counts(
        "soak",
        updates=samples[-1]["update"],
        epochs=log.count("begin training epoch"),
        validations=log.count("begin validation on"),
        checkpoints=log.count("Saved checkpoint"),
        skipped=log.count("is skipped: "),
        rollbacks=log.count("updates in a row were bad: back to"),
        held={what: [samples[index][what] for index in (0, len(samples) // 2, -1)] for what in FLAT["full"]},
        growth_an_update={what: growth(samples, what) for what in FLAT["full"]},
    )
    counts_file = os.environ.get("LAZYFORMER_RELIABILITY_COUNTS")
    draw(samples, (Path(counts_file).parent if counts_file else tmp_path) / "soak.png")
    assert not what_grows(samples, "full")


def test_meters_keep_nothing_of_an_update(data_folder, tmp_path, fairseq_train):
    options = "--arch lazyformer_m2x6_s_tiny --sublayer-pattern M2 --criterion masked_lm_accuracy --batch-size 4"
    fairseq_train(data_folder, f"{options} --max-update 20 --disable-validation", tmp_path / "run")
    assert len(metrics._active_aggregators_cnt) < 5
