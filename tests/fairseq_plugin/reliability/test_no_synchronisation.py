"""An update waits for a GPU once, where it is judged: nothing else asks for a number that is on the device.

Without a GPU the operations that would wait are counted instead. What the guard has copied to the host is marked: to
read that is free.
"""

import traceback
from collections.abc import Iterator

import pytest
import torch
from helpers import mostly_slow
from torch.utils._python_dispatch import TorchDispatchMode

from lazyformer_fairseq.fairseq_plugin.reliability import bad_updates
from lazyformer_fairseq.fairseq_plugin.trainer import SafeTrainer

# Their result, or its size, is read by the host.
WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "bincount", "_unique2", "unique_dim"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}


class OnHost(torch.Tensor):
    """Of the CPU even where the rest of the update is on a GPU; what is computed from it is, too."""


class Waits(TorchDispatchMode):
    """Notes the operations for which a GPU would be waited, and the line of Python that asked."""

    def __init__(self):
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        by_mask = name in INDEXING and any(index is not None and index.dtype == torch.bool for index in args[1])
        if (name in WAITING or by_mask) and not isinstance(args[0], OnHost):
            asked = [frame for frame in traceback.extract_stack() if "/torch/" not in frame.filename][-2]
            self.found.append(f"{name}: {asked.filename}:{asked.lineno} {asked.line}")
        return function(*args, **(kwargs or {}))


@pytest.fixture
def waits_of_updates(monkeypatch) -> Iterator[list[list[str]]]:
    """One list of what :class:`Waits` found for each call of ``SafeTrainer.train_step``."""
    found, train_step, on_host = [], SafeTrainer.train_step, bad_updates._on_host

    def watched(self, *args, **kwargs):
        with Waits() as waits:
            output = train_step(self, *args, **kwargs)
        found.append(waits.found)
        return output

    monkeypatch.setattr(SafeTrainer, "train_step", watched)
    monkeypatch.setattr(bad_updates, "_on_host", lambda *numbers: on_host(*numbers).as_subclass(OnHost))
    with torch.serialization.safe_globals([OnHost]):  # meters are saved with a checkpoint
        yield found


@pytest.mark.parametrize("precision", mostly_slow(["--bf16", ""], "--bf16"))
def test_an_update_waits_only_where_it_is_judged(precision, fairseq_train, data_folder, tmp_path, waits_of_updates):
    options = "--arch lazyformer_m2x6_s_tiny --criterion masked_lm_accuracy --batch-size 2 --update-freq 2"
    fairseq_train(data_folder, f"{options} --max-update 3 --clip-norm 0.5 --disable-validation {precision}", tmp_path)
    assert waits_of_updates == [[], [], []]
