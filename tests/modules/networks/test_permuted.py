"""Permuted tokens: who sees whom, by the paper's example and by brute force; their places; what cannot stand with them.

MPNet: Song et al., 2020, 2004.09297.
"""

from typing import Optional

import numpy as np
import pytest
import torch
from tiny_networks import WORDS, make_encoder, random_tokens
from torch import Tensor

from lazyformer_fairseq import build
from lazyformer_fairseq.data.batches import pad_right
from lazyformer_fairseq.data.datasets.permuted_blocks import permute
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.modules.networks.encoder import TokenInfo
from lazyformer_fairseq.modules.networks.permuted import check_takes_permuted, visibility_mask

MASK, PAD = 16, 1
BACK_ENDS = ("eager", "materialize", "recompute", "fused")
OPTIONS = {"vocab_size": WORDS, "relative_position_buckets": 8, "relative_position_max_distance": 6}


def text(order: list[int], predicted: int, permuted_only: bool = False, first: int = 2) -> dict[str, Tensor]:
    """Of tokens `first`, `first` + 1, ... in their places."""
    tokens = np.arange(first, first + len(order))
    inputs = np.full_like(tokens, MASK)
    found = permute(tokens, inputs, np.array(order), predicted, MASK if permuted_only else None)
    return {name: torch.from_numpy(array) for name, array in found.items()}


def batch_of(*texts: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    turns = [pad_right([each["turns"][row] for each in texts], 0) for row in range(3)]
    rows = (pad_right([each[name] for each in texts], pad) for name, pad in (("source", PAD), ("positions", 0)))
    return *rows, torch.stack(turns, 1)


def shown(sample: dict[str, Tensor], number: int, predicted: int) -> list[str]:
    """What a prediction sees in each place of the text, from the first on: a token, a mask (M), both or nothing."""
    of_row = visibility_mask(sample["turns"][None])[0, number - predicted]
    found = [""] * (int(sample["positions"].max()) + 1)
    for token, place, is_seen in zip(sample["source"].tolist(), sample["positions"].tolist(), of_row, strict=True):
        found[place] += ("M" if token == MASK else str(token)) * bool(is_seen)
    return found


def test_predictions_see_what_figure_2_and_the_table_of_inputs_show():
    """x1 to x6 in the order (1, 3, 5, 4, 6, 2), of which (4, 6, 2) are predicted; the slides' five words in theirs."""
    order = [0, 2, 4, 3, 5, 1]
    sample = text(order, 3, first=1)
    assert sample["source"].tolist() == [1, 3, 5, 4, 6, 2, *[MASK] * 6]
    assert sample["positions"].tolist() == [0, 2, 4, 3, 5, 1, 3, 5, 1, 3, 5, 1]
    by_number = [["1", "M", "3", "M", "5", "M"], ["1", "M", "3", "4", "5", "M"], ["1", "M", "3", "4", "5", "6"]]
    assert [shown(sample, number, 3) for number in range(3)] == by_number
    # Content: what is not predicted sees itself and masks; what is, itself and what came before, and masks of the rest.
    content = visibility_mask(sample["turns"][None])[0, :9].int().tolist()
    whole = [1, 1, 1, 0, 0, 0, 1, 1, 1, 0, 0, 0]
    late = [[1, 1, 1, 1, 0, 0, 0, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 0, 0, 0, 1, 0, 0, 0], [1] * 6 + [0] * 6]
    assert content == [*[whole] * 3, *late, *[whole] * 3]
    words = text([0, 1, 2, 3, 4], 2, first=1)  # the task is sentence classification
    assert [shown(words, number, 2) for number in (0, 1)] == [["1", "2", "3", "M", "M"], ["1", "2", "3", "4", "M"]]
    only = text([0, 1, 2, 3, 4], 2, permuted_only=True, first=1)
    assert only["source"].tolist() == [1, 2, 3, 4, 5, MASK, MASK]
    assert [shown(only, number, 2) for number in (0, 1)] == [["1", "2", "3", "", ""], ["1", "2", "3", "4", ""]]


@pytest.mark.parametrize("permuted_only", [False, True])
@pytest.mark.parametrize("back_end", BACK_ENDS)
@pytest.mark.parametrize("pattern", ["sflf sf", "s[qk_norm,rope=100]lf k", "s[persistent=2]l s[entmax=1.5]l"])
def test_a_state_changes_with_a_token_just_where_it_may(pattern, back_end, permuted_only):
    """For every sublayer, row and token of two texts of different lengths: by what sees what, sublayer by sublayer."""
    encoder = make_encoder(pattern, attention_backend=back_end if "persistent" not in pattern else "eager", **OPTIONS)
    texts = text([0, 4, 2, 5, 3, 1], 3, permuted_only), text([1, 3, 2, 0], 1, permuted_only, first=9)
    tokens, positions, turns = batch_of(*texts)
    assert torch.equal(tokens.eq(PAD).any(-1), torch.tensor([False, True]))
    visible = visibility_mask(turns)
    _, states = encoder(tokens, None, True, info=TokenInfo(positions_BT=positions, turns_B3T=turns))
    for changed in range(tokens.size(1)):
        others = tokens.clone()
        others[:, changed] = WORDS - 2
        _, found = encoder(others, None, True, info=TokenInfo(positions_BT=positions, turns_B3T=turns))
        reached = torch.arange(tokens.size(1)).eq(changed).expand(2, -1).clone()
        for number, (before, after) in enumerate(zip(states, found, strict=True)):
            if number and encoder.plan[number - 1].kind.letter != "f":
                reached |= (visible & reached[:, None]).any(-1)
            assert torch.equal((before - after).abs().amax(-1) > 1e-9, reached), (number, changed)


@pytest.mark.parametrize("back_end", BACK_ENDS)
@pytest.mark.parametrize("options", [{}, {"relative_position_buckets": 0}, {"no_token_positional_embeddings": True}])
def test_places_come_along_in_any_order(back_end, options):
    """Biases of pairs, learned positions and turns of queries and keys: all tokens see all, as in their own order."""
    pattern = "s[rope=100]f lf s l k"
    given = {**OPTIONS, **options}
    encoder, plain = (make_encoder(pattern, attention_backend=name, **given) for name in (back_end, "eager"))
    tokens, order = random_tokens(2, 7), torch.stack([torch.randperm(7), torch.randperm(7)])
    turns = torch.tensor([0, 0, 1])[:, None].expand(2, 3, 7)
    found, _ = encoder(tokens.gather(1, order), info=TokenInfo(positions_BT=order, turns_B3T=turns))
    expected, _ = plain(tokens)
    torch.testing.assert_close(found, expected.gather(1, order[..., None].expand_as(found)))
    found.square().sum().backward()
    expected.square().sum().backward()
    for (name, one), other in zip(encoder.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, msg=lambda text, name=name: f"{name}: {text}")


def test_one_prediction_alone_is_the_masked_lms():
    """It sees the rest of the text and a mask in its own place; nothing else that is predicted."""
    encoder = make_encoder("(sflf)x2", **OPTIONS)
    sample = text([0, 4, 2, 5, 3, 1], 1)
    tokens, positions, turns = batch_of(sample)
    found, _ = encoder(tokens, info=TokenInfo(positions_BT=positions, turns_B3T=turns))
    plain = torch.arange(2, 8)[None]
    plain[0, 1] = MASK
    torch.testing.assert_close(found[0, -1], encoder(plain)[0][0, 1])


@pytest.mark.parametrize(
    ("pattern", "options", "words"),
    [
        ("sf s[window=2]f", {}, r"--task x: tokens are permuted, but s\[window=2\] depends on their order"),
        ("s[linformer=4]f", {}, "s.linformer=4. depends on their order"),
        ("s[synthesizer=dense]f", {}, "depends on their order"),
        ("s[buckets=2]f", {"attention_backend": "eager"}, "depends on their order"),
        ("sfcf", {}, "but c depends on their order"),
    ],
)
def test_what_cannot_stand_with_it_is_refused(pattern, options, words):
    model = build("bert_tiny", WORDS, sublayer_pattern=pattern, relative_position_buckets=0, **options)
    with pytest.raises(UserError, match=words):
        check_takes_permuted(model, "--task x")
    tokens, positions, turns = batch_of(text([0, 2, 1], 1))
    with pytest.raises(UserError, match=words.replace("--task x", "turns")):
        model(tokens, positions=positions, turns=turns)


@pytest.mark.parametrize(
    ("positions", "turns", "words"),
    [
        (None, torch.zeros(1, 3, 5, dtype=torch.long), r"not None and \(1, 3, 5\)"),
        (torch.zeros(1, 5).long(), torch.zeros(1, 5, 3).long(), r"must have the shapes \(1, 5\) and \(1, 3, 5\)"),
        (torch.full((1, 5), 8), torch.zeros(1, 3, 5).long(), "position 8 is out of range; the model has 8 positions"),
    ],
)
def test_turns_and_positions_are_checked(positions: Optional[Tensor], turns, words):
    with pytest.raises(UserError, match=words):
        make_encoder("sf", max_positions=8, **OPTIONS)(
            random_tokens(1, 5), info=TokenInfo(positions_BT=positions, turns_B3T=turns)
        )
    with pytest.raises(UserError, match="works only with this package's encoders"):
        check_takes_permuted(torch.nn.Linear(1, 1), "--task x")
