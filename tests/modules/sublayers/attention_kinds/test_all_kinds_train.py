"""Every kind of attention is kept whole, resumes to the bit, is exported and compiled."""

import copy
import json
import shutil

import pytest
import torch
import torch._inductor.config
from click.testing import CliRunner
from every_kind import build, examples, of_each_kind, rows, run, tokens
from helpers import assert_equal_state
from torch._dynamo.utils import counters

from lazyformer_fairseq.cli import main
from lazyformer_fairseq.fairseq_plugin.models import LazyFormerModel
from lazyformer_fairseq.modules.compiled import compiled
from lazyformer_fairseq.patterns.kinds import CAUSAL, ENCODER


@of_each_kind
def test_a_state_is_loaded_whole(direction, s):
    network = build(direction, f"{s} l")
    torch.manual_seed(5)
    fresh = copy.deepcopy(network)
    with torch.no_grad():
        for weight in fresh.parameters():
            weight.add_(torch.randn_like(weight))
    fresh.load_state_dict(network.state_dict())
    assert torch.equal(run(fresh, tokens()), run(network, tokens()))


def all_in_one(direction: str) -> str:
    return " ".join(f"s[{examples(row, direction)[0]}] l f" for row in rows(direction))


def assert_resumes_to_the_bit(data, folder, fairseq_train, options: str, *task: str) -> None:
    """Trains four updates at once, and again from the checkpoint of the second; all is the same to the bit."""
    options += " --max-update 4 --save-interval-updates 2"
    whole = fairseq_train(data, options, folder / "whole", *task)
    (folder / "resumed").mkdir()
    shutil.copy(folder / "whole" / "checkpoint_1_2.pt", folder / "resumed" / "checkpoint_last.pt")
    resumed = fairseq_train(data, options, folder / "resumed", *task)
    assert_equal_state(resumed["model"], whole["model"])
    assert_equal_state(resumed["last_optimizer_state"], whole["last_optimizer_state"])


@pytest.mark.slow
def test_an_encoder_of_all_kinds_trains_resumes_and_is_exported(data_folder, tmp_path, fairseq_train):
    projected = "s[linformer=3,share=layers] f"  # one projection for both
    pattern = f"{all_in_one(ENCODER)} s[synthesizer=fixed] f {projected} {projected}"
    options = (
        f"--arch bert_tiny --sublayer-pattern '{pattern}' --relative-position-buckets 0 --attention-dropout 0 "
        "--criterion masked_lm_accuracy --batch-size 4 --max-positions 32"
    )
    assert_resumes_to_the_bit(data_folder, tmp_path, fairseq_train, options)
    model = LazyFormerModel.from_pretrained(tmp_path / "whole")
    done = CliRunner().invoke(main, ["export", str(tmp_path / "whole"), str(tmp_path / "exported")])
    assert done.exit_code == 0, done.output
    config = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert config["model"]["sublayer_pattern"] == pattern
    exported, text = LazyFormerModel.from_pretrained(tmp_path / "exported"), "Anna sees the house."
    features = []
    for each in (model, exported):
        torch.manual_seed(1)
        features.append(each.extract_features(text))
    torch.testing.assert_close(*features)


def test_a_causal_model_of_all_kinds_trains_and_resumes(lm_data, tmp_path, fairseq_train):
    options = (
        f"--arch transformer_xl_tiny --sublayer-pattern '{all_in_one(CAUSAL)}' --criterion causal_lm --batch-size 4 "
        "--adaptive-softmax-cutoff '' --mem-len 0"
    )
    assert_resumes_to_the_bit(lm_data, tmp_path, fairseq_train, options, "stream_language_modeling --tgt-len 8")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("direction", "s"),
    [(direction, f"s[{examples(row, direction)[0]}]") for direction in (ENCODER, CAUSAL) for row in rows(direction)],
)
@torch._inductor.config.patch(fallback_random=True)  # hashes are drawn anew in training, here as without a compiler
def test_compiled_it_computes_the_same(direction, s):
    compiled.cache_clear()
    torch._dynamo.reset()
    counters.clear()
    results = []
    for compiles in (False, True):
        network = build(direction, f"{s} f l").train()
        network.compiles = compiles
        features = run(network, tokens())
        features.sin().sum().backward()
        results.append([features, *(weight.grad for weight in network.parameters() if weight.grad is not None)])
    for one, same in zip(*results, strict=True):
        torch.testing.assert_close(same, one, atol=1e-8, rtol=1e-6)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"], counters
