import math

import pytest
import torch

from lazyformer_fairseq.modules.networks.encoder import RelativePositionBias, relative_position_bucket


def t5_bucket(distance: int, buckets: int = 32, max_distance: int = 128) -> int:
    """Raffel et al.'s rule, one distance at a time, written from the paper's words."""
    side = buckets // 2
    offset = side if distance > 0 else 0
    distance = abs(distance)
    if distance < side // 2:
        return offset + distance
    wide = side // 2 + int(math.log(distance / (side // 2)) / math.log(max_distance / (side // 2)) * (side - side // 2))
    return offset + min(wide, side - 1)


def exact_powers(buckets: int, max_distance: int) -> set[int]:
    """Distances where the logarithm hits an integer, so that float32 and float64 may round to either side."""
    side, exact = buckets // 2, buckets // 4
    edges = (exact * (max_distance / exact) ** (step / (side - exact)) for step in range(1, side - exact + 1))
    whole = {round(edge) for edge in edges if abs(edge - round(edge)) < 1e-6}
    return whole | {-edge for edge in whole}


@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (8, 20), (4, 2)])
def test_buckets_follow_t5(buckets, max_distance):
    distances = [distance for distance in range(-300, 301) if distance not in exact_powers(buckets, max_distance)]
    found = relative_position_bucket(torch.tensor(distances), buckets, max_distance).tolist()
    assert found == [t5_bucket(distance, buckets, max_distance) for distance in distances]
    for side, last in ((1, buckets - 1), (-1, buckets // 2 - 1)):  # all far distances share one
        far = side * torch.tensor([max_distance, max_distance + 1, 10_000])
        assert relative_position_bucket(far, buckets, max_distance).tolist() == [last] * 3


@pytest.mark.parametrize("time", [1, 2, 7, 40])
def test_bias_and_gradient_equal_a_lookup_by_pair(time):
    bias = RelativePositionBias(num_heads=3, num_buckets=8, max_distance=20).double()
    torch.nn.init.normal_(bias.table)
    pairs = torch.tensor([[t5_bucket(key - query, 8, 20) for key in range(time)] for query in range(time)])
    weight = torch.randn(1, 3, time, time, dtype=torch.double)
    found, naive = bias(time).dense(time, time, bias.table), bias.table[pairs].permute(2, 0, 1)[None]
    torch.testing.assert_close(found, naive)
    torch.testing.assert_close(*(torch.autograd.grad((each * weight).sum(), bias.table) for each in (found, naive)))


@pytest.mark.parametrize(("buckets", "max_distance"), [(31, 128), (-4, 128), (32, 8)])
def test_impossible_tables_are_refused(buckets, max_distance):
    with pytest.raises(ValueError, match=str(buckets)):
        RelativePositionBias(2, buckets, max_distance)
