"""Checkpoints of models with another number of positions: what is repeated, and what is refused in words."""

import pytest
import torch
from fairseq.data import Dictionary

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.models.checkpoint_match import PER_POSITION, has_pooler
from lazyformer_fairseq.fairseq_plugin.models.config import LazyFormerConfig
from lazyformer_fairseq.fairseq_plugin.models.lazyformer import LazyFormerModel


def model(pattern: str, positions: int, copies: bool = False) -> LazyFormerModel:
    sizes = {"encoder_embed_dim": 32, "encoder_ffn_embed_dim": 8, "encoder_attention_heads": 2}
    cfg = LazyFormerConfig(
        sublayer_pattern=pattern, max_positions=positions, copy_positions=copies, relative_position_buckets=0, **sizes
    )
    return LazyFormerModel(cfg, Dictionary())


def test_positions_are_repeated():
    short, long = model("s[window=2]f", 16), model("s[window=2]f", 40, copies=True)
    long.load_state_dict(short.state_dict())
    expected = torch.cat([short.state_dict()[PER_POSITION]] * 3)[:40]
    assert torch.equal(long.state_dict()[PER_POSITION], expected)


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize(
    ("pattern", "weight"),
    [
        ("s[synthesizer=random]", "random_NLL"),
        ("s[synthesizer=dense+dot]", "dense.weight"),  # heads are as large as there are positions
        ("s[synthesizer=factorised_random]", "key_factors_NLE"),
        ("s[linformer=3]", "key_projection"),
        ("f s[linformer=3,share=layers] s[linformer=3,share=layers]", "key_projection"),
    ],
)
def test_weights_that_belong_to_positions_are_not_repeated(pattern, weight, copies):
    with pytest.raises(UserError, match=f"{weight} has a part for each, which .* give --max-positions 16"):
        model(pattern, 24, copies).load_state_dict(model(pattern, 16).state_dict())


@pytest.mark.parametrize("pattern", ["s", "s[linformer=3]"])
def test_fewer_positions_are_refused(pattern):
    with pytest.raises(UserError, match="has 16 positions, --max-positions is 8: give --max-positions 16"):
        model(pattern, 8).load_state_dict(model(pattern, 16).state_dict())


def heads_of(*poolers: str, **kinds: str) -> LazyFormerModel:
    found = model("f", 16)
    for name, kind in kinds.items():
        found.register_classification_head(name, 3, kind)
    if poolers:
        found.register_pooler()
    return found


def weight_of(model: LazyFormerModel, head: str) -> torch.Tensor:
    return model.classification_heads[head].dense.weight


def test_a_dense_head_that_is_new_starts_as_the_checkpoints_pooler(caplog):
    checkpoint, ours = heads_of("pooler", rte="dense"), heads_of(rte="dense", cola="dense", sst2="linear")
    with caplog.at_level("INFO"):
        ours.load_state_dict(checkpoint.state_dict())
    assert torch.equal(weight_of(ours, "cola"), weight_of(checkpoint, "pooler"))
    assert torch.equal(weight_of(ours, "rte"), weight_of(checkpoint, "rte"))
    assert "classification_heads.cola.dense.weight starts as the checkpoint's pooler" in caplog.text
    assert "pooler of the checkpoint is left out" not in caplog.text


def test_a_pooler_is_kept_where_there_is_one_and_its_loss_is_said(caplog):
    checkpoint, ours = heads_of("pooler"), heads_of("pooler")
    ours.load_state_dict(checkpoint.state_dict())
    assert torch.equal(weight_of(ours, "pooler"), weight_of(checkpoint, "pooler"))
    heads_of().load_state_dict(checkpoint.state_dict())
    assert "classification head pooler of the checkpoint is left out" in caplog.text


def test_what_next_sentences_are_told_by_is_a_pooler_too(caplog):
    checkpoint = model("f", 16)
    checkpoint.register_next_sentence_head()
    ours = heads_of(cola="dense", sst2="linear")
    fresh = ours.classification_heads["cola"].out_proj.weight.clone()
    ours.load_state_dict(checkpoint.state_dict())
    assert torch.equal(weight_of(ours, "cola"), weight_of(checkpoint, "next_sentence"))
    assert torch.equal(ours.classification_heads["cola"].out_proj.weight, fresh)
    assert "left out" not in caplog.text
    imported = heads_of("pooler")  # from which pre-training goes on with next sentences
    checkpoint.load_state_dict(imported.state_dict())
    assert torch.equal(weight_of(checkpoint, "next_sentence"), weight_of(imported, "pooler"))


def test_a_tasks_head_that_is_called_pooler_is_none():
    checkpoint, ours = heads_of(pooler="dense"), heads_of(cola="dense")
    before = weight_of(ours, "cola").clone()
    ours.load_state_dict(dict(checkpoint.state_dict()))
    assert torch.equal(weight_of(ours, "cola"), before)
    assert not has_pooler(checkpoint.state_dict()) and has_pooler(heads_of("pooler").state_dict())
