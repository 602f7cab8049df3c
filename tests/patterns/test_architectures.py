from argparse import Namespace

import pytest
import torch
from helpers import count_parameters

from lazyformer_fairseq.evaluation.costs.flops import count_flops
from lazyformer_fairseq.patterns.architectures import ARCHITECTURES, CAUSAL_ARCHITECTURES
from lazyformer_fairseq.patterns.grammar import plan
from lazyformer_fairseq.patterns.kinds import EncoderSizes

PAPER = {name: row for name, row in ARCHITECTURES.items() if row.parameters_in_millions}


@pytest.mark.parametrize("name", PAPER)
def test_parameters_are_within_one_percent_of_the_paper(name):
    assert count_parameters(name) == pytest.approx(PAPER[name].parameters_in_millions * 1e6, rel=0.01)


@pytest.mark.parametrize(
    ("name", "family", "without_head"),
    [("bert_base_absolute", "Bert", 109_482_240), ("distilbert_base", "DistilBert", 66_362_880)],
)
def test_rows_of_pars_table_4_count_what_the_published_models_count(name, family, without_head):
    """At their 30,522 pieces. BERT has a pooler and two token types besides, DistilBERT neither."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    with torch.device("meta"):
        theirs = [getattr(transformers, f"{family}{ending}") for ending in ("Model", "ForMaskedLM")]
        counts = [sum(weight.numel() for weight in each(each.config_class()).parameters()) for each in theirs]
    d, of_bert = 768, family == "Bert"
    token_types, pooler, head = of_bert * 2 * d, of_bert * (d * d + d), d * d + 3 * d + 30_522
    ours = count_parameters(name, 30_522)
    assert counts == [without_head, ours + token_types]
    assert ours - head + token_types + pooler == without_head


def test_mpnet_has_the_papers_110_million_at_its_pieces():
    assert count_parameters("mpnet_base", 30_527) == pytest.approx(110e6, rel=0.01)


def test_the_small_models_lie_between_tiny_and_base_and_are_equally_large():
    bert, lazy = (count_parameters(name) for name in ("bert_small", "lazyformer_small"))
    assert bert == 42_556_160 and lazy == pytest.approx(bert, rel=1e-4)
    assert count_parameters("bert_tiny") < bert < count_parameters("bert_base")


def test_modern_encoders_count_what_the_published_models_count_or_what_ours_does():
    """ModernBERT's 149,014,272 and its head, at its 50,368 pieces; NeoBERT's 245M at BERT's 30,522."""
    modernbert = 149_014_272 + 768**2 + 768 + 50_368
    assert count_parameters("modernbert_base", 50_368) == modernbert == 149_655_232
    assert count_parameters("lazy_modernbert_base", 50_368) == pytest.approx(modernbert, rel=0.002)
    assert count_parameters("neobert", 30_522) == pytest.approx(245e6, rel=0.001)
    assert count_parameters("bert_modern_base") == pytest.approx(count_parameters("bert_base"), rel=0.005)


def test_modernberts_layers_are_where_transformers_has_them():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.ModernBertConfig()
    for number, layer_type in enumerate(config.layer_types):
        of_all = layer_type == "full_attention"
        base = config.rope_parameters[layer_type]["rope_theta"]
        reach = {} if of_all else {"window": config.local_attention // 2}
        assert dict(plan(ARCHITECTURES["modernbert_base"].sublayer_pattern)[2 * number].settings) == {
            **reach,
            "rope": base,
        }
    lazy = [each for each in plan(ARCHITECTURES["lazy_modernbert_base"].sublayer_pattern) if each.kind.letter != "f"]
    assert "".join(each.kind.letter for each in lazy) == "ssl" * 7 + "s" and len(lazy) == config.num_hidden_layers
    assert all("window" in dict(each.producer.settings) for each in lazy if each.producer)


@pytest.mark.parametrize(("suffix", "matrices"), [("", 24), ("_kv", 12), ("_layers", 1)])
@pytest.mark.parametrize(("name", "projected"), [("linformer", 256), ("linformer_128", 128)])
def test_linformer_adds_as_many_projections_as_its_section_4_counts(name, projected, suffix, matrices):
    bert = count_parameters("bert_base") - 32 * 12  # which has a relative bias
    assert count_parameters(f"{name}{suffix}_base") - bert == matrices * projected * 512


def test_falling_linformer_costs_what_its_mean_of_128_positions_costs():
    falling, even = (ARCHITECTURES[f"{name}_base"].sublayer_pattern for name in ("linformer_falling", "linformer_128"))
    projected = [planned.values["linformer"] for planned in plan(falling) if planned.kind.letter == "s"]
    assert projected == sorted(projected, reverse=True) and sum(projected) == 12 * 128 and len(set(projected)) > 1
    assert count_parameters("linformer_falling_base") == count_parameters("linformer_128_base") == 112_812_800
    sizes = EncoderSizes(32_768, 768, 3072, 12, 512, 0)
    assert count_flops(falling, sizes, 512) == count_flops(even, sizes, 512)


@pytest.mark.parametrize("rows", [ARCHITECTURES, CAUSAL_ARCHITECTURES], ids=["encoders", "language models"])
def test_every_row_has_a_tiny_twin_of_the_same_pattern(rows):
    tiny = {name for name in rows if name.endswith("_tiny")}
    patterns, others = ({rows[name].sublayer_pattern for name in names} for names in (tiny, rows.keys() - tiny))
    assert patterns == others and len(tiny) * 2 == len(rows)
    assert not ARCHITECTURES.keys() & CAUSAL_ARCHITECTURES.keys()


@pytest.mark.parametrize("name", [name for name, row in CAUSAL_ARCHITECTURES.items() if row.parameters_in_millions])
def test_parameters_of_language_models_are_within_one_percent_of_the_paper(name):
    expected = CAUSAL_ARCHITECTURES[name].parameters_in_millions * 1e6
    assert count_parameters(name) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(("name", "sublayers"), [("adaptive_span_small", 12), ("all_attention_small", 18)])
def test_sukhbaatars_small_models_differ_from_the_papers_by_what_we_say(name, sublayers):
    """38M to 39M in the published tables, at the 204 or so characters of enwik8."""
    d, vocabulary = 512, 204
    positions_and_biases, table, output = sublayers * d * d + 2 * d, 8192 * 64, vocabulary * d
    theirs = count_parameters(name, vocabulary) - positions_and_biases + table + output
    assert theirs == pytest.approx(38.5e6, rel=0.002)


def test_the_sparse_transformer_differs_from_the_papers_by_what_we_say():
    """95M in Table 1. There: biases, places in two tables of 96 rows and 128 columns, an output matrix. 256 bytes."""
    d, layers = 512, 30
    ours = count_parameters("sparse_transformer_base", 256)
    distances = layers * d * d + 2 * d
    theirs = ours - distances + layers * 4 * d + (96 + 128) * d + 256 * d
    assert theirs == pytest.approx(95e6, rel=0.005)


@pytest.mark.parametrize(("name", "millions"), [("igpt_s", 76), ("igpt_m", 455), ("igpt_l", 1362)])
def test_image_gpt_counts_what_the_paper_and_the_published_code_count(name, millions):
    """Of 512 colours and the start; ours has u and v, which nothing reads, a bias a symbol, three symbols more."""
    row = CAUSAL_ARCHITECTURES[name]
    d, layers, vocabulary = row.decoder_embed_dim, len(plan(row.sublayer_pattern)) // 2, 512
    theirs = 12 * layers * d * d + (2 * layers + 1) * d + 1024 * d + 2 * vocabulary * d + d
    assert int(theirs / 1e6) == int(count_parameters(name, vocabulary + 4) / 1e6) == millions
    assert count_parameters(name, vocabulary + 4) - theirs == (4 * 2 - 1) * d + 2 * d + vocabulary + 4


@pytest.mark.parametrize(("rows", "model"), [(ARCHITECTURES, "lazyformer"), (CAUSAL_ARCHITECTURES, "lazyformer_lm")])
def test_every_arch_is_registered_with_its_row(rows, model):
    """Fairseq finds each arch by its name, with the options of its row."""
    from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_NAME_REGISTRY

    for name, row in rows.items():
        chosen = Namespace()
        ARCH_CONFIG_REGISTRY[name](chosen)
        assert vars(chosen) == row.options(), name
        assert ARCH_MODEL_NAME_REGISTRY[name] == model
