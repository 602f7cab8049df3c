import pytest
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from helpers import ROOT, count_parameters
from omegaconf import OmegaConf

from lazyformer_fairseq.architectures import ARCHITECTURES

PAPER = {name: row for name, row in ARCHITECTURES.items() if row.parameters_in_millions}
CONFIGS = ROOT / "configs" / "pretraining"


@pytest.mark.parametrize("name", PAPER)
def test_parameters_are_within_one_percent_of_the_paper(name):
    assert count_parameters(name) == pytest.approx(PAPER[name].parameters_in_millions * 1e6, rel=0.01)


def test_bert_base_has_the_parameters_of_the_formula():
    d, w, vocabulary, positions = 768, 3072, 32_768, 512
    sublayers = 12 * (4 * d * d + 4 * d + 2 * d) + 12 * (2 * d * w + w + d + 2 * d)
    bias_table = 32 * 12
    head = d * d + 3 * d + vocabulary
    assert count_parameters("bert_base") == vocabulary * d + positions * d + 2 * d + sublayers + head + bias_table


def test_every_row_has_a_tiny_twin_of_the_same_pattern():
    tiny = {name for name in ARCHITECTURES if name.endswith("_tiny")}
    assert {ARCHITECTURES[name].sublayer_pattern for name in tiny} == {
        ARCHITECTURES[name].sublayer_pattern for name in ARCHITECTURES.keys() - tiny
    }
    assert len(tiny) * 2 == len(ARCHITECTURES)


def model_options(*arguments: str):
    """What `fairseq-train ARGUMENTS` would build the model from."""
    parser = options.get_training_parser()
    command = ["data", "--task", "full_sentences_masked_lm", "--criterion", "masked_lm_accuracy", *arguments]
    return convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, command)).model


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_arch_presets_are_the_rows(name):
    built_from = model_options("--arch", name)
    assert {key: built_from[key] for key in ARCHITECTURES[name].options()} == ARCHITECTURES[name].options()


def test_options_override_a_preset():
    built_from = model_options(
        *"--arch par_bert_base --sublayer-pattern (sff)x2(f)x2 --encoder-embed-dim 64 --dropout 0.2".split(),
        *"--max-positions 1024 --encoder-normalize-before --relative-position-buckets 16".split(),
    )
    assert built_from.sublayer_pattern == "(sff)x2(f)x2"
    assert (built_from.encoder_embed_dim, built_from.dropout, built_from.max_positions) == (64, 0.2, 1024)
    assert (built_from.encoder_normalize_before, built_from.relative_position_buckets) == (True, 16)
    assert built_from.encoder_ffn_embed_dim == ARCHITECTURES["par_bert_base"].encoder_ffn_embed_dim


def test_there_is_one_config_for_every_row_of_the_papers_size():
    assert {path.stem for path in CONFIGS.glob("*.yaml")} - {"table5"} == {
        name for name in ARCHITECTURES if not name.endswith("_tiny")
    }


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_configs_are_the_rows(path):
    if path.stem == "table5":
        pytest.skip("what all of them share")
    model = OmegaConf.load(path).model
    assert model.pop("_name") == "lazyformer"
    assert dict(model) == ARCHITECTURES[path.stem].options()
