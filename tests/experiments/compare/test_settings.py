"""What --model names, the width that makes parameters equal, and the command's options and refusals."""

from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from helpers import dictionary_of
from in_process import invoke, refusal

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation.costs.flops import count_parameters
from lazyformer_fairseq.experiments.compare import report, results
from lazyformer_fairseq.experiments.compare import run as comparison_run
from lazyformer_fairseq.experiments.compare.models import read_models
from lazyformer_fairseq.experiments.compare.run import parameters_of_sublayers, with_equal_parameters
from lazyformer_fairseq.experiments.compare.settings import CompareSettings, find_task
from lazyformer_fairseq.patterns.architectures import ARCHITECTURES, PARTS
from lazyformer_fairseq.patterns.grammar import expand

SIZES = {"embed_dim": 32, "ffn_embed_dim": 64, "heads": 2}


def test_a_pattern_an_arch_and_models_from_elsewhere():
    specs = ("(sf)x4", "par_bert_base", "bert_base; sizes=own", "fairseq:roberta_base; ffn=96", "hf:bert; layers=3")
    specs += ("hf:modernbert",)
    models = read_models(dict(enumerate(specs)), find_task("masked-lm"), SIZES)
    pattern, arch, own, roberta, hugging, modern = models.values()
    assert (pattern.what, pattern.pattern, pattern.ffn_embed_dim) == ("pattern", "(sf)x4", 64)
    assert (arch.what, expand(arch.pattern), arch.embed_dim) == ("arch", "sff" * 5 + "f" * 9, 32)
    assert (own.embed_dim, own.ffn_embed_dim, own.heads) == (768, 3072, 12)
    assert (roberta.what, roberta.arch, roberta.layers, roberta.ffn_embed_dim) == ("fairseq", "roberta_base", 4, 96)
    assert (hugging.what, hugging.layers, hugging.is_external) == ("huggingface", 3, True)
    assert (modern.arch, modern.pattern, modern.layers) == ("modernbert", "(sf[gate=gelu])x4", 4)


def settings_of(models: dict[str, str], **changes) -> CompareSettings:
    row = find_task("masked-lm")
    given = {"data": "data", "baseline": next(iter(models)), "sizes": {**row.sizes, **SIZES}, "rates": (1e-3,)}
    given |= {"device": "cpu", "task": row.name, "models": models, "updates": 4}
    return CompareSettings(**{**given, **changes})


def test_an_archs_own_sizes_may_be_without_learned_positions(monkeypatch):
    row = replace(ARCHITECTURES["bert_tiny"], no_token_positional_embeddings=True)
    monkeypatch.setitem(ARCHITECTURES, "rotary", row)
    settings = settings_of({"bert": "bert_tiny; sizes=own", "mine": "rotary; sizes=own"})
    compared, (bert, mine) = settings.row.load(settings), settings.specs.values()
    one, other = (compared.network(spec).options for spec in (bert, mine))
    assert replace(one, no_token_positional_embeddings=True) == other != one
    tables = [count_parameters(each.pattern, compared.sizes(each, 100)) for each in (bert, mine)]
    assert tables[0] - tables[1] == compared.longest * bert.embed_dim


@pytest.mark.parametrize("name", ["modernbert_tiny", "neobert_tiny", "reformer_reversible_tiny"])
def test_an_archs_own_sizes_are_all_that_its_parameters_depend_on(name):
    """What a training is told builds what is counted: norms, biases, positions, head."""
    settings = settings_of({"bert": "bert_tiny", "modern": f"{name}; sizes=own"})
    compared, spec = settings.row.load(settings), settings.specs["modern"]
    network = compared.network(spec)
    built = sum(weight.numel() for weight in network.build(dictionary_of(100)).parameters())
    assert built == count_parameters(spec.pattern, compared.sizes(spec, 100))
    row, given = ARCHITECTURES[name].options(), vars(network.options)
    assert {part: given[part] for part in PARTS if part in row} == {part: row[part] for part in PARTS if part in row}


def test_equal_parameters_by_hand():
    """(sff)x2: two s of 4 C^2 + 4 C and norms of 2 C against three; W (2 C + 1) + C an f."""
    settings = settings_of({"bert": "(sf)x3", "par": "(sff)x2"}, equal_parameters=True)
    found = with_equal_parameters(settings.row.load(settings))
    c, width = 32, found["par"].ffn_embed_dim
    an_s, an_f = 4 * c * c + 4 * c + 2 * c, lambda w: w * (2 * c + 1) + c + 2 * c
    wanted = 3 * (an_s + an_f(64))
    differences = {w: abs(2 * an_s + 4 * an_f(w) - wanted) for w in range(8, 256, 8)}
    assert width == min(differences, key=differences.get)


def test_who_has_a_width_of_its_own_keeps_it_and_sublayers_of_externals_count_as_s_and_f():
    models = {"bert": "(sf)x3", "wide": "(sff)x2; ffn=200", "roberta": "fairseq:roberta_base"}
    settings = settings_of(models, equal_parameters=True)
    compared = settings.row.load(settings)
    found = with_equal_parameters(compared)
    assert [each.ffn_embed_dim for each in found.values()] == [64, 200, 64]
    assert len({parameters_of_sublayers(compared, settings.specs[name]) for name in ("bert", "roberta")}) == 1


@pytest.mark.parametrize(
    ("model", "more", "message"),
    [
        ("mine=ss", {"equal_parameters": True}, "no sublayer with a feed-forward width"),
        ("mine=(s)x9 f", {"equal_parameters": True}, "even at a feed-forward width of 8"),
        ("mine=sf", {"baseline": "nobody"}, "--baseline nobody: not one of the models; choose from bert"),
        ("a@b=sf", {}, "contain / or @"),
    ],
)
def test_names_and_widths_that_do_not_fit(model, more, message):
    with pytest.raises(UserError, match=message):
        settings = settings_of({"bert": "sf", **dict([model.split("=")])}, **more)
        with_equal_parameters(settings.row.load(settings))


# --- The command


@pytest.fixture
def asked(monkeypatch):
    """What the command would compare."""
    found = []
    monkeypatch.setattr(report, "write_report", lambda *_: "")
    monkeypatch.setattr(results, "comparison_of", lambda _: None)
    monkeypatch.setattr(comparison_run, "compare", lambda settings, *_: found.append(settings) or {})

    def ask(data: Path, *words: object) -> CompareSettings:
        invoke("compare", data, "--device", "cpu", *words)
        return found.pop()

    return ask


def test_defaults_of_the_tasks_and_presets_beside_models(asked, data_folder, lm_data, tmp_path):
    masked = asked(data_folder, tmp_path, "--task", "masked-lm")
    assert masked.models == {"bert": "(sf)x6", "lazyformer": "M2x3"} and masked.baseline == "bert"
    assert (masked.updates, masked.budget, masked.seeds) == (None, 75, (1, 2, 3)) and masked.in_turn
    causal = asked(lm_data, tmp_path, "--task", "language-model")
    assert next(iter(causal.models)) == "transformer_xl" and len(causal.models) == 4
    assert (causal.updates, causal.budget) == (2000, None)
    assert causal.sizes["adaptive_softmax_cutoff"] == (2000, 10_000)
    words = ("--task", "language-model", "--presets", "16", "--model", "found=(sff)x4 (f)x4")
    found = asked(lm_data, tmp_path, *words).models
    assert len(found) == 5 and found["found"] == "(sff)x4 (f)x4"


def test_options_reach_the_settings(asked, data_folder, tmp_path):
    words = "--task masked-lm --model bert=sf --model fast=sff;ffn=48 --baseline fast --budget 2min --lr 1e-3,2e-3"
    more = "--time-fractions 1,0.7 --alone --embed-dim 16 --post-norm --seeds 4 -- --weight-decay 0.01"
    found = asked(data_folder, tmp_path, *words.split(), *more.split())
    assert (found.baseline, found.budget, found.updates, found.seeds) == ("fast", 120, None, (4,))
    assert (found.rates, found.shares) == ((1e-3, 2e-3), (1, 0.7))
    assert not found.in_turn and not found.normalize_before and found.sizes["embed_dim"] == 16
    assert tuple(found.fairseq_options) == ("--weight-decay", "0.01")


def test_random_orders_stand_beside_the_baseline(asked, data_folder, tmp_path):
    words = "--task masked-lm --model bert=(sf)x3 --model lazy=M2x2 --random-orders 19".split()
    found = asked(data_folder, tmp_path, *words).models
    orders = {order for name, order in found.items() if name.startswith("random")}
    assert list(found)[:2] == ["bert", "lazy"] and len(found) == 21
    assert len(orders) == 19 and {"".join(sorted(order)) for order in orders} == {"fffsss"} and "sfsfsf" not in orders
    assert found == asked(data_folder, tmp_path, *words).models
    with pytest.raises(UserError, match=r"--random-orders 20: only 19 orders of \(sf\)x3 were found"):
        asked(data_folder, tmp_path, *words[:-1], "20")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--model m=lf", "no s below it"),
        ("--model m=sf;tokens-per-sample=64", "--tokens-per-sample of m: set it before `--`, for all models"),
        ("--model m=sf -- --encoder-embed-dim 8", "m: set --embed-dim before `--`, or embed=N in the model's SPEC"),
        ("--model m=sf -- --sublayer-pattern=ff", "--sublayer-pattern of m: specify the pattern as the model's SPEC"),
        ("--model m=sff --model random_1=sf --random-orders 1", "a model called random_1 already exists"),
        ("--seeds=", "--seeds: specify at least one value"),
        ("--model m=sf;ffn=", "'ffn=' is not of the form NAME=VALUE"),
        ("--model m=sf;lr=3", "lr=3 must be above 0 and at most 1"),
        ("--model m=sf;ffn=0", "ffn=0 is not a positive integer"),
        ("--model m=sf;sizes=own", "sizes=own works only with a named arch"),
        ("--model m=sf;layers=3", "layers=N works only with fairseq: and hf: models"),
        ("--model m=bert_huge", "Nor is there an arch of that name; did you mean bert_base?"),
        ("--model m=qq_qq", "Nor is there an arch of that name; docs/patterns.md lists"),
        ("--model m=fairseq:bart_base", "choose from fairseq:roberta_base"),
        ("--model m=hf:bert", "specify the number of layers"),
        ("--task language-model --model m=fairseq:roberta_base", "work only with --task masked-lm"),
        ("--model sfsf", "'sfsf' is not of the form NAME=SPEC"),
        ("--model a=sf --model a=sff", "a is specified twice"),
        ("--presets 12 --model bert=sf", "a model called bert already exists"),
        ("--presets 13", "masked-lm has presets with 12, 24"),
        ("--updates 3 --budget 1min", "--updates and --budget: specify only one"),
        ("--lr 3", "3.0 is not in the range"),
        ("--mem-len 3", "--mem-len: does not apply to --task masked-lm"),
    ],
)
def test_wrong_options_are_named(options, message, data_folder, tmp_path):
    given = ("compare", data_folder, tmp_path / "out", "--task", "masked-lm", *options.split())
    assert message in refusal(*given)
    assert not (tmp_path / "out").exists()


def test_an_interrupt_leaves_a_line(monkeypatch, data_folder, tmp_path):
    monkeypatch.setattr(comparison_run, "compare", Mock(side_effect=KeyboardInterrupt))
    printed = invoke("compare", data_folder, tmp_path, "--task", "masked-lm", "--device", "cpu", code=130)
    assert "stopped; rerun to resume" in printed
