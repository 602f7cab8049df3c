"""A kind of sublayer that tests alone have goes through every command."""

import csv
import json
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from helpers import assert_equal_state
from local_mean import LocalMean, registered_local_mean, run  # noqa: F401 (a fixture)

from lazyformer_fairseq.fairseq_plugin.models import LazyFormerModel

TINY_ENCODER = (
    "--arch bert_tiny --sublayer-pattern 'm[width=5] f s m l' --dropout 0.1 --criterion masked_lm_accuracy "
    "--batch-size 4"
)


def from_the_third_update(folder: Path) -> Path:
    """A folder as a run that was killed after its third update leaves it."""
    (folder / "resumed").mkdir()
    shutil.copy(folder / "whole" / "checkpoint_1_3.pt", folder / "resumed" / "checkpoint_last.pt")
    return folder / "resumed"


def test_an_encoder_trains_resumes_and_is_exported(data_folder, tmp_path, fairseq_train):
    options = f"{TINY_ENCODER} --max-update 6 --save-interval-updates 3"
    whole = fairseq_train(data_folder, options, tmp_path / "whole")
    resumed = fairseq_train(data_folder, options, from_the_third_update(tmp_path))
    assert_equal_state(resumed["model"], whole["model"])
    assert_equal_state(resumed["last_optimizer_state"], whole["last_optimizer_state"])

    model = LazyFormerModel.from_pretrained(tmp_path / "whole")
    inner = model.model.encoder.sentence_encoder.sublayers[0].inner
    assert isinstance(inner, LocalMean) and inner.width == 5
    run("export", tmp_path / "whole", tmp_path / "exported")
    config = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert config["model"]["sublayer_pattern"] == "m[width=5] f s m l"
    exported = LazyFormerModel.from_pretrained(tmp_path / "exported")
    text = "Anna sees the house."
    torch.testing.assert_close(exported.extract_features(text), model.extract_features(text))


@pytest.mark.slow
def test_a_causal_model_trains_and_resumes(lm_data, tmp_path, fairseq_train):
    task = "stream_language_modeling --tgt-len 8"
    options = (
        "--arch transformer_xl_tiny --sublayer-pattern 'm[width=4] f s f l' --criterion causal_lm --batch-size 4 "
        "--adaptive-softmax-cutoff '' --mem-len 8 --attention-backend fused --max-update 6 --save-interval-updates 3"
    )
    whole = fairseq_train(lm_data, options, tmp_path / "whole", task)
    resumed = fairseq_train(lm_data, options, from_the_third_update(tmp_path), task)
    assert_equal_state(resumed["model"], whole["model"])


@pytest.mark.slow
def test_it_is_benched(tmp_path):
    options = (
        "--baseline-arch bert_tiny --arch bert_tiny --lengths 8 --tokens 8 --rounds 2 --what encoder --backend eager "
        "--relative-position-buckets 0 --baseline-backend eager --pattern 'mine=(m[width=5]f)x2 sflf'"
    )
    run("bench", *shlex.split(options), "--output", tmp_path)
    rows = json.loads((tmp_path / "results.json").read_text())["cells"][0]["rows"]
    mine = next(row for row in rows if row["model"] == "mine")
    assert mine["pattern"] == "(m[width=5]f)x2 sflf" and mine["flops"] > 0 and mine["seconds"]["median"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("task", ["masked-lm", "language-model"])
def test_it_is_a_candidate_of_a_search(task, data_folder, lm_data, tmp_path):
    data, sizes = {
        "masked-lm": (data_folder, "bert_tiny --tokens-per-sample 16 --max-positions 16"),
        "language-model": (lm_data, "transformer_xl_tiny --tgt-len 8 --mem-len 8 --adaptive-softmax-cutoff ''"),
    }[task]
    options = shlex.split(
        f"--task {task} --candidates s,m[width=5],l,f,identity,m --sublayers 4 --batch-size 16 --constant-updates 1 "
        f"--max-updates 60 --device cpu --latency-price 0.1 --arch {sizes}"
    )
    run("search", data, tmp_path / "found", *options)
    found = json.loads((tmp_path / "found" / "result.json").read_text())
    assert found["settings"]["candidates"] == ["s", "l", "f", "identity", "m[width=5]", "m"]
    prices = json.loads((tmp_path / "found" / "latencies.json").read_text())
    assert {"s", "s_read", "l", "f", "m", "m[width=5]", "rest"} == prices.keys()
    assert (tmp_path / "found" / "probabilities.png").stat().st_size > 1000


@pytest.mark.slow
def test_it_is_compared(lm_data, tmp_path):
    options = (
        "--task language-model --presets 16 --embed-dim 8 --ffn-embed-dim 8 --heads 2 --updates 1 --seeds 1 --tgt-len "
        "8 --mem-len 8 --batch-size 4 --device cpu --adaptive-softmax-cutoff '' --model 'mean=(m[width=5]f)x8'"
    )
    run("compare", lm_data, tmp_path, *shlex.split(options))
    with (tmp_path / "table.csv").open() as file:
        rows = {row["model"]: row for row in csv.DictReader(file)}
    assert (rows["mean"]["m"], rows["mean"]["s"], rows["transformer_xl"]["m"]) == ("8", "0", "0")
    assert int(rows["mean"]["flops"]) > 0
