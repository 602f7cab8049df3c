"""Models as fairseq has them: sizes, training, and weights of checkpoints that fit in part or not at all."""

from types import SimpleNamespace

import pytest
import torch
from fairseq import options, tasks
from fairseq.data import Dictionary
from helpers import dictionary_of

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation.match import POSITION_EMBEDDINGS, has_pooler
from lazyformer_fairseq.fairseq_plugin.models.config import CausalLMConfig, MaskedLMConfig
from lazyformer_fairseq.fairseq_plugin.models.lazyformer import CausalLanguageModel, LazyFormerModel
from lazyformer_fairseq.patterns.architectures import ARCHITECTURES, CAUSAL_ARCHITECTURES

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


def test_a_checkpoint_of_another_model_is_refused_in_words():
    other_words = Dictionary()
    for number in range(46):
        other_words.add_symbol(f"x{number}")
    for other, message in (
        (dict(dictionary=dictionary_of(51)), "a dictionary of 51 symbols, but this run's dictionary has 50"),
        (dict(dictionary=other_words), "a different dictionary of the same size"),
        (dict(pattern="sfff"), "sublayers.2.*pass the --arch, --sublayer-pattern and sizes"),
        (dict(decoder_ffn_embed_dim=32), r"fc1.weight has the shape \(32, 16\), but the model's has \(24, 16\)"),
        (dict(adaptive_softmax_cutoff="9"), "band"),
    ):
        with pytest.raises(UserError, match=message):
            make_model().load_state_dict(make_model(**other).state_dict())


def test_fairseqs_get_args_is_enough_to_build_a_model(tmp_path):
    """It leaves out every option that was not given: all have their defaults, or what the arch says."""
    (tmp_path / "dict.txt").write_text("".join(f"w{number} 9\n" for number in range(30)))
    archs = {"full_sentences_masked_lm": "bert_tiny", "stream_language_modeling": "lazy_par_transformer_tiny"}
    for task, arch in archs.items():
        args = options.get_args(tmp_path, task=task, arch=arch, dropout=0.3)
        cfg = tasks.setup_task(args).build_model(args).cfg
        assert (cfg.dropout, str(cfg.attention_backend)) == (0.3, "auto")
        assert cfg.sublayer_pattern == {**ARCHITECTURES, **CAUSAL_ARCHITECTURES}[arch].sublayer_pattern


def test_bad_sizes_are_the_users_mistakes_and_are_named():
    for given, message in (
        (dict(sublayer_pattern="lf"), "no s below it"),
        (dict(decoder_embed_dim=0), "embedding dimension must be even .* not 0"),
        (dict(adaptive_softmax_cutoff="19997,39997,199997"), "19997 is not below the vocabulary size, 50"),
        (dict(adaptive_softmax_cutoff="9;30"), "--adaptive-softmax-cutoff '9;30' must be comma-separated integers"),
    ):
        task = SimpleNamespace(source_dictionary=dictionary_of(50))
        with pytest.raises(UserError, match=message):
            CausalLanguageModel.build_model(CausalLMConfig(**{**SMALL, **given}), task)


def model(pattern: str, positions: int, copies: bool = False) -> LazyFormerModel:
    sizes = {"encoder_embed_dim": 32, "encoder_ffn_embed_dim": 8, "encoder_attention_heads": 2}
    cfg = MaskedLMConfig(
        sublayer_pattern=pattern, max_positions=positions, copy_positions=copies, relative_position_buckets=0, **sizes
    )
    return LazyFormerModel(cfg, Dictionary())


def test_positions_are_repeated_but_no_weights_that_belong_to_them_and_none_are_left_out():
    short, long = model("s[window=2]f", 16), model("s[window=2]f", 40, copies=True)
    long.load_state_dict(short.state_dict())
    assert torch.equal(
        long.state_dict()[POSITION_EMBEDDINGS], torch.cat([short.state_dict()[POSITION_EMBEDDINGS]] * 3)[:40]
    )
    for pattern, weight in (
        ("s[synthesizer=random]", "random_NLL"),
        ("s[synthesizer=dense+dot]", "dense.weight"),  # heads are as large as there are positions
        ("s[synthesizer=factorised_random]", "key_factors_NLE"),
        ("s[linformer=3]", "key_projection"),
        ("f s[linformer=3,share=layers] s[linformer=3,share=layers]", "key_projection"),
    ):
        for copies in (False, True):
            with pytest.raises(UserError, match=f"{weight} depends on this number .* use --max-positions 16"):
                model(pattern, 24, copies).load_state_dict(model(pattern, 16).state_dict())
    for pattern in ("s", "s[linformer=3]"):
        with pytest.raises(UserError, match="has 16 positions, but --max-positions is 8; use --max-positions 16"):
            model(pattern, 8).load_state_dict(model(pattern, 16).state_dict())


def heads_of(*poolers: str, **head_types: str) -> LazyFormerModel:
    found = model("f", 16)
    for name, head_type in head_types.items():
        found.register_classification_head(name, 2 if "two" in head_type else 3, head_type.removesuffix(" of two"))
    if poolers:
        found.register_pooler()
    return found


def weight_of(model: LazyFormerModel, head: str) -> torch.Tensor:
    return model.classification_heads[head].dense.weight


def test_a_dense_head_that_is_new_starts_as_the_checkpoints_pooler_whose_loss_is_said(caplog):
    checkpoint, ours = heads_of("pooler", rte="dense"), heads_of(rte="dense", cola="dense", sst2="linear")
    with caplog.at_level("INFO"):
        ours.load_state_dict(checkpoint.state_dict())
    assert torch.equal(weight_of(ours, "cola"), weight_of(checkpoint, "pooler"))
    assert torch.equal(weight_of(ours, "rte"), weight_of(checkpoint, "rte"))
    assert "classification_heads.cola.dense.weight is initialized from the checkpoint's pooler" in caplog.text
    assert "head pooler is dropped" not in caplog.text
    with_pooler = heads_of("pooler")
    with_pooler.load_state_dict(heads_of("pooler").state_dict() | checkpoint.state_dict())
    assert torch.equal(weight_of(with_pooler, "pooler"), weight_of(checkpoint, "pooler"))
    heads_of().load_state_dict(checkpoint.state_dict())
    assert "checkpoint's classification head pooler is dropped" in caplog.text


def test_what_next_sentences_are_told_by_is_a_pooler_too_but_a_tasks_head_of_that_name_is_none(caplog):
    checkpoint = model("f", 16)
    checkpoint.register_next_sentence_head()
    ours = heads_of(cola="dense", sst2="linear")
    fresh = ours.classification_heads["cola"].out_proj.weight.clone()
    ours.load_state_dict(checkpoint.state_dict())
    assert torch.equal(weight_of(ours, "cola"), weight_of(checkpoint, "next_sentence"))
    assert torch.equal(ours.classification_heads["cola"].out_proj.weight, fresh)
    assert "is dropped" not in caplog.text
    imported, of_a_task = heads_of("pooler"), heads_of(pooler="dense").state_dict()
    checkpoint.load_state_dict(imported.state_dict())  # pre-training goes on with next sentences
    assert torch.equal(weight_of(checkpoint, "next_sentence"), weight_of(imported, "pooler"))
    assert not has_pooler(of_a_task) and has_pooler(imported.state_dict())
    before = weight_of(ours, "cola").clone()
    ours.load_state_dict(dict(of_a_task))
    assert torch.equal(weight_of(ours, "cola"), before)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("linear", "dense"), ("dense", "linear"), ("span", "linear"), ("dense", "span"), ("linear", "linear of two")],
)
def test_missing_extra_and_other_heads_are_said_and_start_anew_as_a_whole(theirs, ours, caplog):
    checkpoint = heads_of(rte=theirs, cola="dense", mnli="linear").state_dict()
    model = heads_of(rte=ours, cola="dense", sst2="linear")
    before = {name: weight.clone() for name, weight in model.classification_heads.state_dict().items()}
    with caplog.at_level("INFO"):
        model.load_state_dict(dict(checkpoint))
    for name, weight in model.classification_heads.state_dict().items():
        is_theirs = name.startswith("cola")
        assert torch.equal(weight, checkpoint[f"classification_heads.{name}"] if is_theirs else before[name]), name
    for said in (
        "rte is dropped: it differs from the model's head in",
        "mnli is dropped: it does not belong to this task",
        "sst2 is not in the checkpoint and is newly initialized",
    ):
        assert f"classification head {said}" in caplog.text
