"""A kind of sublayer that tests alone have goes through every command."""

import csv
import json
import shlex
import shutil

import pytest
import torch
from helpers import assert_equal_state
from local_mean import LocalMean, registered_local_mean, run  # noqa: F401 (a fixture)

from lazyformer_fairseq.fairseq_plugin.models import LazyFormerModel

TINY_ENCODER = (
    "--arch bert_tiny --sublayer-pattern 'm[width=5] f s m l' --dropout 0.1 --criterion masked_lm_accuracy "
    "--batch-size 4"
)


def test_an_encoder_trains_resumes_and_is_exported(data_folder, tmp_path, fairseq_train):
    options = f"{TINY_ENCODER} --max-update 6 --save-interval-updates 3"
    whole = fairseq_train(data_folder, options, tmp_path / "whole")
    (tmp_path / "killed").mkdir()  # after its third update
    shutil.copy(tmp_path / "whole" / "checkpoint_1_3.pt", tmp_path / "killed" / "checkpoint_last.pt")
    resumed = fairseq_train(data_folder, options, tmp_path / "killed")
    for part in ("model", "last_optimizer_state"):
        assert_equal_state(resumed[part], whole[part], part)

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
