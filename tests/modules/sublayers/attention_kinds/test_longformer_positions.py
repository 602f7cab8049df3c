"""Global tokens that the caller marks, and what networks with them refuse."""

import pytest
import torch
from fairseq.data import Dictionary
from longformers import inputs, make_decoder, make_encoder

from lazyformer_fairseq.data.text.interface import SpecialIds
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.models.config import LazyFormerConfig
from lazyformer_fairseq.fairseq_plugin.models.hub import LazyFormerHub
from lazyformer_fairseq.fairseq_plugin.models.lazyformer import LazyFormerModel
from lazyformer_fairseq.modules.networks.stack import StreamMemory
from lazyformer_fairseq.patterns.architectures import ARCHITECTURES


def test_what_the_network_refuses():
    with pytest.raises(UserError, match="dilated_heads=4, but there are 3 heads"):
        make_encoder("s[window=2,dilation=2,dilated_heads=4]")
    with pytest.raises(UserError, match="--mem-len 5 is not for s\\[window=2,global=1\\].*--mem-len 0"):
        make_decoder("s[window=2,global=1]", mem_len=5)
    decoder = make_decoder("s[window=2,global=1]")
    with pytest.raises(UserError, match="--mem-len 3"):
        decoder.mem_len = 3
    memory = StreamMemory()
    memory.remember([inputs(1, 3)], 3)
    with pytest.raises(UserError, match="give --mem-len 0"):
        decoder(torch.zeros(1, 2, dtype=torch.long), memory)


def test_positions_that_nobody_asks_for_or_that_nobody_gives():
    mask = torch.zeros(2, 9, dtype=torch.bool)
    with pytest.raises(UserError, match="no sublayer of the pattern has global=given"):
        make_encoder("s[window=2,global=1]")(inputs(2, 9), global_positions_BT=mask)
    encoder = make_encoder("s[window=2,global=given]")
    with pytest.raises(UserError, match="pass global_positions"):
        encoder(inputs(2, 9))
    for wrong in (mask[:1], mask.long()):
        with pytest.raises(UserError, match=r"must be torch.bool \(2, 9\)"):
            encoder(inputs(2, 9), global_positions_BT=wrong)


def model_of_letters(pattern: str) -> LazyFormerModel:
    dictionary = Dictionary()
    for letter in "abcdefgh":
        dictionary.add_symbol(letter)
    row = ARCHITECTURES["longformer_tiny"].options()
    cfg = LazyFormerConfig(**{**row, "sublayer_pattern": pattern, "max_positions": 12})
    return LazyFormerModel(cfg, dictionary)


def test_a_model_hands_positions_down():
    model = model_of_letters("(s[window=1,global=given]lf)x2").double().eval()
    tokens = torch.randint(4, 12, (2, 9), generator=torch.Generator().manual_seed(3))
    none, last = (torch.zeros(2, 9, dtype=torch.bool) for _ in range(2))
    last[:, 8] = True
    other = tokens.clone()
    other[:, 8] = 4 + (tokens[:, 8] - 3) % 8
    changed = [
        (model(tokens, global_positions=mask)[0] - model(other, global_positions=mask)[0]).abs().amax((0, 2)) > 1e-13
        for mask in (none, last)
    ]
    # Each of four attending sublayers looks one token further, unless the last one is seen by all.
    assert changed[0].tolist() == [False] * 4 + [True] * 5
    assert changed[1].all()
    with pytest.raises(UserError, match="pass global_positions"):
        model(tokens)


class Letters:
    """A tokenizer of letters, for the hub."""

    def __init__(self, dictionary: Dictionary):
        self.dictionary = dictionary
        self.special = SpecialIds(*(getattr(dictionary, name)() for name in ("bos", "pad", "eos", "unk")), mask=0)

    def build_input(self, text: str, max_length: int) -> list[int]:
        return [self.dictionary.index(letter) for letter in text]


def test_texts_come_with_positions():
    model = model_of_letters("s[window=1,global=given]f")
    dictionary = model.encoder.dictionary
    model.register_classification_head("choice", 3)
    hub = LazyFormerHub(model, Letters(dictionary))
    ids = hub.encode("abcdefgh", "hag")
    is_a = ids.eq(dictionary.index("a"))
    expected, _ = model(ids, features_only=True, global_positions=is_a)
    assert torch.equal(hub.extract_features("abcdefgh", "hag", global_positions=is_a), expected)
    logits = hub.predict("choice", "abcdefgh", "hag", global_positions=is_a)
    assert torch.equal(logits, model.classification_heads["choice"](expected))
    with pytest.raises(UserError, match="pass global_positions"):
        hub.extract_features("abcdefgh")
