import gc
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from lazyformer_fairseq.modules.attention import pieces


@pytest.fixture(autouse=True)
def nothing_kept():
    pieces.give_back()
    yield
    pieces.give_back()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_memory_is_used_again_when_nothing_refers_to_it(dtype):
    like = torch.empty(0, dtype=dtype)
    first, second = pieces.empty((2, 3, 4), like), pieces.empty((2, 3, 4), like)
    assert first.shape == (2, 3, 4) and first.dtype == dtype and first.is_contiguous()
    addresses = {first.data_ptr(), second.data_ptr()}
    assert len(addresses) == 2
    part_of_it = first[1:]
    del first
    gc.collect()
    third = pieces.empty((2, 3, 4), like)
    assert third.data_ptr() not in addresses  # a view still refers to the first
    del part_of_it
    fourth = pieces.empty((4, 3, 2), like)
    assert fourth.data_ptr() in addresses
    assert pieces.empty((0, 3), like).shape == (0, 3)


def test_a_graph_that_is_kept_keeps_it():
    leaf = torch.ones(4, requires_grad=True)
    factor = pieces.empty((4,), leaf.detach()).fill_(3.0)
    product = leaf * factor
    del factor
    other = pieces.empty((4,), leaf.detach()).fill_(7.0)
    product.sum().backward()
    assert leaf.grad.tolist() == [3.0] * 4 and other.tolist() == [7.0] * 4


def test_scratch_memory_is_the_same_for_each_request_of_a_name_and_thread_and_grows():
    like = torch.empty(0, dtype=torch.float64)
    first = pieces.scratch("one", (3, 4), like)
    assert first.shape == (3, 4) and first.dtype == torch.float64
    assert pieces.scratch("one", (2, 2), like.float()).data_ptr() == first.data_ptr()
    with ThreadPoolExecutor(1) as pool:
        theirs = pool.submit(pieces.scratch, "one", (3, 4), like).result()
    assert first.data_ptr() not in {theirs.data_ptr(), pieces.scratch("other", (3, 4), like).data_ptr()}
    for rows in (30, 0):
        assert pieces.scratch("one", (rows, 4), like).shape == (rows, 4)


@pytest.mark.parametrize("request_memory", [pieces.empty, partial(pieces.scratch, "one")])
def test_memory_of_inference_serves_training(request_memory):
    like = torch.empty(0)
    with torch.inference_mode():
        request_memory((4,), like).fill_(1.0)
    in_training = request_memory((4,), like)
    assert not in_training.is_inference() and in_training.fill_(2.0).tolist() == [2.0] * 4
