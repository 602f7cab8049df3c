"""Every kind of attention as a candidate of a search: mixed, or refused by name."""

import json
import re

import pytest
from click.testing import CliRunner
from every_kind import build, examples, of_each_kind, rows, run, tokens

from lazyformer_fairseq.cli import main
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.search.supernet.mixture import Choices, Supernet, supernet_pattern
from lazyformer_fairseq.modules.sublayers.attention_variant import variant_classes
from lazyformer_fairseq.patterns.grammar import read_sublayer
from lazyformer_fairseq.patterns.kinds import CAUSAL, ENCODER


def can_be_mixed(s: str) -> bool:
    values = read_sublayer(s).values
    return all(choice.has_probabilities for choice in variant_classes(values))


@of_each_kind
def test_a_supernet_mixes_it_or_refuses_it_by_name(direction, s):
    candidates = ("s", s, "l", "f")
    if not can_be_mixed(s):
        with pytest.raises(UserError, match=re.escape(f"l beside {s}")):
            supernet_pattern(candidates, 2)
        candidates = ("s", s, "f")
    network = build(direction, supernet_pattern(candidates, 3))
    supernet = Supernet(network, network, Choices(3, candidates).double())
    features = run(supernet, tokens())
    features.sin().sum().backward()
    assert features.isfinite().all()
    assert supernet.choices.logits.grad[:, 1].abs().min() > 0


def mixable(direction: str) -> list[str]:
    last = (f"s[{examples(row, direction)[-1]}]" for row in rows(direction))
    return [read_sublayer(s).text for s in last if can_be_mixed(s)]


@pytest.mark.parametrize(
    ("direction", "mixed"),
    [
        (ENCODER, ["s[window=2,global=1]", "s[linformer=3]"]),
        pytest.param(ENCODER, mixable(ENCODER), marks=pytest.mark.slow, id="all of encoders"),
        pytest.param(CAUSAL, mixable(CAUSAL), marks=pytest.mark.slow, id="all of causal models"),
    ],
)
def test_they_are_candidates_of_one_search(direction, mixed, data_folder, lm_data, tmp_path):
    options = ["--candidates", ",".join(["s", *mixed, "l", "f", "identity"]), "--sublayers", "2"]
    options += "--batch-size 16 --constant-updates 1 --max-updates 60 --device cpu --latency-price 0.1".split()
    if direction == ENCODER:
        data, sizes = data_folder, "--task masked-lm --arch bert_tiny --tokens-per-sample 12 --max-positions 12"
        options += ["--relative-position-buckets", "0"]
    else:
        data, sizes = lm_data, "--task language-model --arch transformer_xl_tiny --tgt-len 12 --mem-len 0"
    done = CliRunner().invoke(main, ["search", str(data), str(tmp_path / "found"), *sizes.split(), *options])
    assert done.exit_code == 0, (done.output, done.exception)
    prices = json.loads((tmp_path / "found" / "latencies.json").read_text())
    assert {name for s in mixed for name in (s, f"{s}_read")} <= prices.keys()
    assert (tmp_path / "found" / "history.png").stat().st_size > 1000
