"""What --model names, and the width that makes parameters equal."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.compare.lengths import parameters_of_sublayers, with_equal_parameters
from lazyformer_fairseq.experiments.compare.models import read_models
from lazyformer_fairseq.experiments.compare.settings import TASKS, CompareSettings, find_task
from lazyformer_fairseq.experiments.compare.task import points
from lazyformer_fairseq.patterns.grammar import expand, plan, split_sublayers
from lazyformer_fairseq.patterns.kinds import CAUSAL, ENCODER

SIZES = {"embed_dim": 32, "ffn_embed_dim": 64, "heads": 2}


def read(*specs: str, direction: str = ENCODER, takes_externals: bool = True) -> list:
    by_name = {f"model{number}": spec for number, spec in enumerate(specs)}
    return list(read_models(by_name, direction, SIZES, takes_externals).values())


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
    ],
)
def test_a_wrong_spec_is_named(spec, message):
    with pytest.raises(UserError, match=message):
        read(spec)


def test_models_from_elsewhere_are_for_masked_words():
    with pytest.raises(UserError, match="for --task masked-lm alone"):
        read("sf", "fairseq:roberta_base", direction=CAUSAL, takes_externals=False)


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


def test_entries_are_a_model_and_a_share():
    settings = settings_of({"bert": "sf", "mine": "sff"}, shares=(1, 0.7))
    assert settings.entries() == {"bert": ("bert", 1.0), "mine": ("mine", 1.0), "mine@0.7": ("mine", 0.7)}
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
