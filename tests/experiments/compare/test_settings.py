"""What --model names, the width that makes parameters equal, and the command's options and refusals."""

import json

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from lazyformer_fairseq.cli import main
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.compare import report
from lazyformer_fairseq.experiments.compare import run as comparison_run
from lazyformer_fairseq.experiments.compare.models import read_models
from lazyformer_fairseq.experiments.compare.run import parameters_of_sublayers, with_equal_parameters
from lazyformer_fairseq.experiments.compare.settings import TASKS, CompareSettings, find_task
from lazyformer_fairseq.experiments.compare.task import points
from lazyformer_fairseq.patterns.grammar import expand, plan, split_sublayers

SIZES = {"embed_dim": 32, "ffn_embed_dim": 64, "heads": 2}


def read(*specs: str, task: str = "masked-lm") -> list:
    by_name = {f"model{number}": spec for number, spec in enumerate(specs)}
    return list(read_models(by_name, find_task(task), SIZES).values())


def test_a_pattern_an_arch_and_models_from_elsewhere():
    pattern, arch, own, roberta, hugging = read(
        "(sf)x4", "par_bert_base", "bert_base; sizes=own", "fairseq:roberta_base; ffn=96", "hf:bert; layers=3"
    )
    assert (pattern.what, pattern.pattern, pattern.ffn_embed_dim) == ("pattern", "(sf)x4", 64)
    assert (arch.what, expand(arch.pattern), arch.embed_dim) == ("arch", "sff" * 5 + "f" * 9, 32)
    assert (own.embed_dim, own.ffn_embed_dim, own.heads) == (768, 3072, 12)
    assert (roberta.what, roberta.arch, roberta.layers, roberta.ffn_embed_dim) == ("fairseq", "roberta_base", 4, 96)
    assert (hugging.what, hugging.layers, hugging.is_external) == ("huggingface", 3, True)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("lf", "no s below it"),
        ("sf; width=3", "'width=3' is none of embed=, ffn="),
        ("sf; ffn=0", "ffn=0 is no whole number above 0"),
        ("sf; sizes=own", "sizes=own is for a named arch"),
        ("sf; layers=3", "layers is for fairseq: and hf: alone"),
        ("bert_huge", "docs/architectures.md lists"),
        ("fairseq:bart_base", "choose from fairseq:roberta_base"),
        ("hf:bert", "say how many layers"),
        ("sf; pretrain=3", "pretrain= is for --task listops and pairs"),
    ],
)
def test_a_wrong_spec_is_named(spec, message):
    with pytest.raises(UserError, match=message):
        read(spec)


def test_models_from_elsewhere_are_for_masked_words():
    with pytest.raises(UserError, match="for --task masked-lm alone"):
        read("sf", "fairseq:roberta_base", task="language-model")


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_presets_are_patterns_of_equal_length(task):
    for sublayers, models in task.presets.items():
        for pattern in models.values():
            assert len(plan(pattern, task.direction)) == sublayers


def settings_of(models: dict[str, str], **changes) -> CompareSettings:
    row = find_task("masked-lm")
    given = {
        "data": "data",
        "baseline": next(iter(models)),
        "sizes": {**row.sizes, **SIZES},
        "rates": (1e-3,),
        "device": "cpu",
    }
    return CompareSettings(**{"task": row.name, "models": models, "updates": 4, **given, **changes})


def test_equal_parameters_by_hand():
    """(sff)x2: two s of 4 C^2 + 4 C and norms of 2 C against three; W (2 C + 1) + C an f."""
    settings = settings_of({"bert": "(sf)x3", "par": "(sff)x2"}, equal_parameters=True)
    found = with_equal_parameters(settings.row.load(settings))
    c, width = 32, found["par"].ffn_embed_dim
    an_s, an_f = 4 * c * c + 4 * c + 2 * c, lambda w: w * (2 * c + 1) + c + 2 * c
    wanted = 3 * (an_s + an_f(64))
    differences = {w: abs(2 * an_s + 4 * an_f(w) - wanted) for w in range(8, 256, 8)}
    assert width == min(differences, key=differences.get)


def test_who_has_a_width_of_its_own_keeps_it():
    models = {"bert": "(sf)x3", "wide": "(sff)x2; ffn=200", "roberta": "fairseq:roberta_base"}
    settings = settings_of(models, equal_parameters=True)
    found = with_equal_parameters(settings.row.load(settings))
    assert [each.ffn_embed_dim for each in found.values()] == [64, 200, 64]


@pytest.mark.parametrize(
    ("pattern", "message"), [("ss", "no sublayer with a width"), ("(s)x9 f", "even at a width of 8")]
)
def test_parameters_that_cannot_be_equal(pattern, message):
    settings = settings_of({"bert": "sf", "mine": pattern}, equal_parameters=True)
    with pytest.raises(UserError, match=message):
        with_equal_parameters(settings.row.load(settings))


def test_sublayers_of_externals_count_as_s_and_f():
    settings = settings_of({"bert": "(sf)x3", "roberta": "fairseq:roberta_base"})
    compared = settings.row.load(settings)
    assert len({parameters_of_sublayers(compared, each) for each in settings.specs.values()}) == 1


def test_what_is_trained_is_a_model_and_a_share():
    settings = settings_of({"bert": "sf", "mine": "sff"}, shares=(1, 0.7))
    assert settings.trained() == {"bert": ("bert", 1.0), "mine": ("mine", 1.0), "mine@0.7": ("mine", 0.7)}
    assert split_sublayers(expand(settings.specs["mine"].pattern)) == ["s", "f", "f"]


def test_names_that_do_not_fit():
    with pytest.raises(UserError, match="--baseline nobody: the models are bert"):
        settings_of({"bert": "sf"}, baseline="nobody")
    with pytest.raises(UserError, match="neither / nor @"):
        settings_of({"a@b": "sf"})


@given(st.integers(1, 5000), st.integers(1, 40))
def test_points_rise_to_the_end_and_most_are_early(total, count):
    found = points(total, count)
    assert found == sorted(set(found)) and found[0] >= 1 and found[-1] == total
    assert len(found) <= count
    if total > 10 * count:
        assert len(found) == count and sum(point <= total / 2 for point in found) >= count // 2


# --- The command


def call(*words: str):
    return CliRunner().invoke(main, ["compare", *words])


@pytest.fixture
def asked(monkeypatch):
    """What the command would compare."""
    found = []
    monkeypatch.setattr(report, "write_report", lambda *_: "")
    monkeypatch.setattr(comparison_run, "compare", lambda settings, *_: found.append(settings) or {})

    def ask(*words: str) -> CompareSettings:
        result = call(*words)
        assert result.exit_code == 0, result.output + str(result.exception)
        return found.pop()

    return ask


def test_defaults_of_the_tasks(asked, data_folder, lm_data, tmp_path):
    masked = asked(str(data_folder), str(tmp_path), "--task", "masked-lm", "--device", "cpu")
    assert masked.models == {"bert": "(sf)x6", "lazyformer": "M2x3"} and masked.baseline == "bert"
    assert (masked.updates, masked.budget, masked.seeds) == (None, 75, (1, 2, 3)) and masked.in_turn
    causal = asked(str(lm_data), str(tmp_path), "--task", "language-model", "--device", "cpu")
    assert next(iter(causal.models)) == "transformer_xl" and len(causal.models) == 4
    assert (causal.updates, causal.budget, causal.rates) == (2000, None, (3e-3,))
    assert causal.sizes["adaptive_softmax_cutoff"] == (2000, 10_000)


def test_options_reach_the_settings(asked, data_folder, tmp_path):
    words = "--task masked-lm --device cpu --model bert=sf --model fast=sff;ffn=48 --baseline fast --budget 2min"
    more = "--lr 1e-3,2e-3 --time-fractions 1,0.7 --alone --embed-dim 16 --post-norm --seeds 4 -- --weight-decay 0.01"
    found = asked(str(data_folder), str(tmp_path), *words.split(), *more.split())
    assert (found.baseline, found.budget, found.updates, found.seeds) == ("fast", 120, None, (4,))
    assert (found.rates, found.shares) == ((1e-3, 2e-3), (1, 0.7))
    assert not found.in_turn and not found.normalize_before and found.sizes["embed_dim"] == 16
    assert tuple(found.fairseq_options) == ("--weight-decay", "0.01")


def test_presets_stand_beside_models(asked, lm_data, tmp_path):
    words = ["--task", "language-model", "--presets", "16", "--model", "found=(sff)x4 (f)x4", "--device", "cpu"]
    found = asked(str(lm_data), str(tmp_path), *words)
    assert len(found.models) == 5 and found.models["found"] == "(sff)x4 (f)x4"


def test_random_orders_stand_beside_the_baseline(asked, data_folder, tmp_path):
    words = "--task masked-lm --device cpu --model bert=(sf)x3 --model lazy=M2x2 --random-orders 19".split()
    found = asked(str(data_folder), str(tmp_path), *words).models
    orders = {order for name, order in found.items() if name.startswith("random")}
    assert list(found)[:2] == ["bert", "lazy"] and len(found) == 21
    assert len(orders) == 19 and {"".join(sorted(order)) for order in orders} == {"fffsss"} and "sfsfsf" not in orders
    assert found == asked(str(data_folder), str(tmp_path), *words).models
    with pytest.raises(UserError, match=r"--random-orders 20: of \(sf\)x3 only 19 were found"):
        raise call(str(data_folder), str(tmp_path), *words[:-1], "20").exception


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--model sfsf", "'sfsf' is no NAME=SPEC"),
        ("--model mine=lf", "no s below it"),
        ("--model a=sf --model a=sff", "a is there twice"),
        ("--presets 12 --model bert=sf", "bert is a model already"),
        ("--presets 13", "masked-lm has 12, 24"),
        ("--updates 3 --budget 1min", "--updates or --budget, not both"),
        ("--budget soon", "'soon' is no time"),
        ("--seeds 1,1", "1 is there twice"),
        ("--time-fractions 0.5,x", "'x' is not a valid float"),
        ("--time-fractions 0.5,0.5", "there twice"),
        ("--lr 3", "3.0 is not in the range"),
        ("--mem-len 3", "--mem-len: means nothing for --task masked-lm"),
    ],
)
def test_wrong_options_are_named(options, message, data_folder, tmp_path):
    result = call(str(data_folder), str(tmp_path / "out"), "--task", "masked-lm", *options.split())
    assert result.exit_code in (1, 2) and message in f"{result.output} {result.exception}"
    assert not (tmp_path / "out").exists()


def test_an_interrupt_leaves_a_line(monkeypatch, data_folder, tmp_path):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(comparison_run, "compare", interrupted)
    result = call(str(data_folder), str(tmp_path), "--task", "masked-lm", "--device", "cpu")
    assert result.exit_code == 130 and "stopped; rerun to resume" in result.output


def test_the_whole_command(data_folder, tmp_path):
    out = tmp_path / "out"
    sizes = "--embed-dim 8 --ffn-embed-dim 8 --heads 2 --tokens-per-sample 16 --batch-size 2 --validation-tokens 32"
    words = ["--task", "masked-lm", "--updates", "1", "--seeds", "1", "--device", "cpu"]
    result = call(str(data_folder), str(out), *words, "--model", "bert=sf", *sizes.split())
    assert result.exit_code == 0, result.exception
    assert json.loads((out / "results.json").read_text())["models"].keys() == {"bert"}
    assert "bert" in result.output and (out / "table.md").exists()
