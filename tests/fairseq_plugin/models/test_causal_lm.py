from types import SimpleNamespace

import pytest
import torch
from fairseq import options, tasks, trainer
from fairseq.data import Dictionary

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.criterions.language_modeling import CausalLMCriterion
from lazyformer_fairseq.fairseq_plugin.models.config import CausalLMConfig
from lazyformer_fairseq.fairseq_plugin.models.lazyformer import CausalLanguageModel
from lazyformer_fairseq.modules.networks.stack import StreamMemory
from lazyformer_fairseq.patterns.architectures import ARCHITECTURES, CAUSAL_ARCHITECTURES

TINY = [name for name in CAUSAL_ARCHITECTURES if name.endswith("_tiny")]
SMALL = dict(decoder_embed_dim=16, decoder_ffn_embed_dim=24, decoder_attention_heads=2, adaptive_softmax_cutoff="9,30")


def make_dictionary(words: int = 46, first: str = "w") -> Dictionary:
    dictionary = Dictionary()
    for number in range(words):
        dictionary.add_symbol(f"{first}{number}")
    return dictionary


def make_model(pattern: str = "sflf", dictionary=None, **options) -> CausalLanguageModel:
    torch.manual_seed(1)
    cfg = CausalLMConfig(
        sublayer_pattern=pattern, **{**SMALL, "mem_len": 8, "dropout": 0.0, "activation_dropout": 0.0, **options}
    )
    model = CausalLanguageModel(cfg, dictionary or make_dictionary())
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def random_stream(batch: int, time: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens (B, T) and what follows each of them."""
    stream = torch.randint(4, 50, (batch, time + 1), generator=torch.Generator().manual_seed(2))
    return stream[:, :-1], stream[:, 1:]


@pytest.mark.parametrize(
    "name, parameters", [("transformer_xl_base", 191_950_298), ("par_transformer_base", 199_840_218)]
)
def test_parameters_at_the_papers_vocabulary_are_exactly_the_formulas(name, parameters):
    with torch.device("meta"):
        model = CausalLanguageModel(
            CausalLMConfig(**CAUSAL_ARCHITECTURES[name].options()), make_dictionary(267_735 - 4)
        )
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert sum(weight.numel() for weight in model.state_dict().values()) == parameters + 32  # nothing is saved twice


def test_likelihoods_of_targets_are_the_log_probabilities_at_them():
    model, (tokens, target) = make_model(), random_stream(2, 7)
    log_probabilities, _ = model(tokens)
    assert log_probabilities.shape == (2, 7, 50)
    torch.testing.assert_close(log_probabilities.exp().sum(-1), torch.ones(2, 7))
    nll, _ = model(tokens, target=target)
    torch.testing.assert_close(nll, -log_probabilities.gather(-1, target[..., None]).squeeze(-1))


def test_padding_in_the_target_costs_nothing():
    model, (tokens, target) = make_model(), random_stream(2, 7)
    whole, _ = model(tokens, target=target)
    tokens, target = tokens.clone(), target.clone()
    tokens[1, 5:] = target[1, 4:] = 1
    nll, _ = model(tokens, target=target)
    assert not nll[1, 4:].any()
    torch.testing.assert_close(nll[:, :4], whole[:, :4])


@pytest.mark.parametrize("normalize_before", [False, True])
def test_a_later_token_leaves_earlier_losses_as_they_were(normalize_before):
    model = make_model(decoder_normalize_before=normalize_before).double()
    tokens, target = random_stream(2, 12)
    changed = tokens.clone()
    changed[:, 9] = 49 - tokens[:, 9] + 4

    def losses(tokens):
        memory = StreamMemory()
        return torch.cat([model(*part)[0] for part in parts(tokens, memory)], dim=1)

    def parts(tokens, memory):
        return [(t, memory, g) for t, g in zip(tokens.split(4, 1), target.split(4, 1), strict=True)]

    before, after = losses(tokens), losses(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert (before[:, 9:] != after[:, 9:]).all()


def test_losses_over_segments_are_those_of_one_long_segment():
    model, (tokens, target), memory = make_model(mem_len=30).double(), random_stream(2, 12), StreamMemory()
    whole, _ = model(tokens, target=target)
    parts = [model(*part)[0] for part in zip(tokens.split(5, 1), [memory] * 3, target.split(5, 1), strict=True)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-10, rtol=0)


@pytest.mark.parametrize("name", TINY)
def test_every_tiny_twin_learns(name):
    torch.manual_seed(1)
    dictionary, row = make_dictionary(), CAUSAL_ARCHITECTURES[name]
    task = SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary)
    cfg = CausalLMConfig(**{**row.options(), "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0})
    model, memory = CausalLanguageModel.build_model(cfg, task), StreamMemory()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    tokens, target = random_stream(4, 8)
    sample = {"net_input": {"src_tokens": tokens, "memory": memory}, "target": target, "ntokens": 32, "nsentences": 4}
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


# --- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other, message",
    [
        (dict(dictionary=make_dictionary(47)), "a dictionary of 51 symbols, this run's has 50"),
        (dict(dictionary=make_dictionary(first="x")), "another dictionary, of the same size"),
        (dict(pattern="sfff"), "sublayers.2.*give the --arch, --sublayer-pattern and sizes"),
        (dict(decoder_ffn_embed_dim=32), r"fc1.weight is \(32, 16\), the model's \(24, 16\)"),
        (dict(adaptive_softmax_cutoff="9"), "band"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_in_words(other, message):
    weights = make_model(**other).state_dict()
    with pytest.raises(UserError, match=message):
        make_model().load_state_dict(weights)


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


# --- bad options ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, message",
    [
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
    ],
)
def test_bad_sizes_are_the_users_mistakes_and_are_named(options, message):
    task = SimpleNamespace(source_dictionary=make_dictionary())
    with pytest.raises(UserError, match=message):
        CausalLanguageModel.build_model(CausalLMConfig(**{**SMALL, **options}), task)
