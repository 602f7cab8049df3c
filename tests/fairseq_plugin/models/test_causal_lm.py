from types import SimpleNamespace

import pytest
import torch
from fairseq import options, tasks, trainer
from fairseq.data import Dictionary
from helpers import dictionary_of

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.criterions.language_modeling import CausalLMCriterion
from lazyformer_fairseq.fairseq_plugin.models.config import CausalLMConfig
from lazyformer_fairseq.fairseq_plugin.models.lazyformer import CausalLanguageModel
from lazyformer_fairseq.modules.networks.stack import StreamMemory
from lazyformer_fairseq.patterns.architectures import ARCHITECTURES, CAUSAL_ARCHITECTURES

DICTIONARIES = ("source_dictionary", "target_dictionary")
SMALL = dict(decoder_embed_dim=16, decoder_ffn_embed_dim=24, decoder_attention_heads=2, adaptive_softmax_cutoff="9,30")


def make_model(pattern: str = "sflf", dictionary=None, **options) -> CausalLanguageModel:
    torch.manual_seed(1)
    cfg = CausalLMConfig(
        sublayer_pattern=pattern, **{**SMALL, "mem_len": 8, "dropout": 0.0, "activation_dropout": 0.0, **options}
    )
    model = CausalLanguageModel(cfg, dictionary or dictionary_of(50))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


@pytest.mark.parametrize(
    "name, parameters", [("transformer_xl_base", 191_950_298), ("par_transformer_base", 199_840_218)]
)
def test_parameters_at_the_papers_vocabulary_are_exactly_the_formulas(name, parameters):
    with torch.device("meta"):
        model = CausalLanguageModel(CausalLMConfig(**CAUSAL_ARCHITECTURES[name].options()), dictionary_of(267_735))
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert sum(weight.numel() for weight in model.state_dict().values()) == parameters + 32  # nothing is saved twice


@pytest.mark.parametrize("name", [name for name in CAUSAL_ARCHITECTURES if name.endswith("_tiny")])
def test_every_tiny_twin_learns(name):
    torch.manual_seed(1)
    row, task = CAUSAL_ARCHITECTURES[name], SimpleNamespace(**dict.fromkeys(DICTIONARIES, dictionary_of(50)))
    cfg = CausalLMConfig(**{**row.options(), "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0})
    model, memory = CausalLanguageModel.build_model(cfg, task), StreamMemory()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    stream = torch.randint(4, 50, (4, 9), generator=torch.Generator().manual_seed(2))
    net_input = {"src_tokens": stream[:, :-1], "memory": memory}
    sample = {"net_input": net_input, "target": stream[:, 1:], "ntokens": 32, "nsentences": 4}
    losses = []
    for _ in range(4):
        memory.clear()
        loss, sample_size, _ = CausalLMCriterion(task)(model, sample)
        optimizer.zero_grad()
        (loss / sample_size).backward()
        without = [name for name, parameter in model.named_parameters() if parameter.grad is None]
        assert without == [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
        assert without == ([] if "s" in row.sublayer_pattern else ["decoder.content_bias", "decoder.position_bias"])
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert memory.length == (8 if "s" in row.sublayer_pattern else 0)


def test_a_checkpoint_of_another_model_is_refused_in_words():
    other_words = Dictionary()
    for number in range(46):
        other_words.add_symbol(f"x{number}")
    for other, message in (
        (dict(dictionary=dictionary_of(51)), "a dictionary of 51 symbols, this run's has 50"),
        (dict(dictionary=other_words), "another dictionary, of the same size"),
        (dict(pattern="sfff"), "sublayers.2.*give the --arch, --sublayer-pattern and sizes"),
        (dict(decoder_ffn_embed_dim=32), r"fc1.weight is \(32, 16\), the model's \(24, 16\)"),
        (dict(adaptive_softmax_cutoff="9"), "band"),
    ):
        with pytest.raises(UserError, match=message):
            make_model().load_state_dict(make_model(**other).state_dict())


@pytest.mark.parametrize(
    ("task", "arch"),
    [("full_sentences_masked_lm", "bert_tiny"), ("stream_language_modeling", "lazy_par_transformer_tiny")],
)
def test_fairseqs_get_args_is_enough_to_build_a_model(tmp_path, task, arch):
    """It leaves out every option that was not given: all have their defaults, or what the arch says."""
    (tmp_path / "dict.txt").write_text("".join(f"w{number} 9\n" for number in range(30)))
    args = options.get_args(tmp_path, task=task, arch=arch, dropout=0.3)
    model = tasks.setup_task(args).build_model(args)
    assert (model.cfg.dropout, str(model.cfg.attention_backend)) == (0.3, "auto")
    assert model.cfg.sublayer_pattern == {**ARCHITECTURES, **CAUSAL_ARCHITECTURES}[arch].sublayer_pattern


def test_fairseq_sees_no_shared_parameter():
    """It would take the biases that attention lacks for one that all share."""
    assert trainer._catalog_shared_params(make_model()) == []
    tied = torch.nn.ModuleDict({"one": torch.nn.Linear(2, 2, bias=False), "other": torch.nn.Linear(2, 2, bias=False)})
    tied["other"].weight = tied["one"].weight
    assert trainer._catalog_shared_params(tied) == [["one.weight", "other.weight"]]


def test_bad_sizes_are_the_users_mistakes_and_are_named():
    for given, message in (
        (dict(sublayer_pattern="lf"), "no s below it"),
        (dict(decoder_attention_heads=3), "3 attention heads do not divide .* 16"),
        (dict(decoder_embed_dim=0), "embedding dimension of 0"),
        (dict(decoder_ffn_embed_dim=0), "feed-forward sublayers 0 wide"),
        (dict(mem_len=-5), "--mem-len -5"),
        (dict(clamp_len=-5), "--clamp-len -5"),
        (dict(adaptive_softmax_cutoff="19997,39997,199997"), "19997 is not below the vocabulary's 50 words"),
        (dict(adaptive_softmax_cutoff="30,9"), "9 is not above 30"),
        (dict(adaptive_softmax_cutoff="9;30"), "--adaptive-softmax-cutoff '9;30': must be whole numbers with commas"),
        (dict(adaptive_softmax_cutoff="9,"), "--adaptive-softmax-cutoff '9,'"),
        (dict(adaptive_softmax_factor=0), "--adaptive-softmax-factor 0"),
    ):
        task = SimpleNamespace(source_dictionary=dictionary_of(50))
        with pytest.raises(UserError, match=message):
            CausalLanguageModel.build_model(CausalLMConfig(**{**SMALL, **given}), task)
