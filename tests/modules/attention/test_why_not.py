"""What a back end says about a call is what it does on this machine: it agrees with ``eager``, or refuses."""

import re

import pytest
import torch
from masked_attention import Case

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.modules.attention import BACK_ENDS, AttentionCall, AttentionInputs
from lazyformer_fairseq.modules.attention.masks import AttentionMask, Band, Columns

WINDOW = AttentionMask(((2, (Band(3, 3),)),))
FIXED = AttentionMask(((1, (Band(None, None, block=4),)), (1, (Columns(0, 4, 1), Band(1, 0)))))
CASES = {
    "plain": {},
    "padding": {"parts": {"right"}},
    "bias": {"parts": {"bias", "right"}},
    "causal": {"is_causal": True, "memory": 5},
    "positions": {"is_causal": True, "parts": {"positions"}},
    "positions and bias": {"is_causal": True, "mask": WINDOW, "parts": {"positions", "bias"}, "memory": 3},
    "persistent": {"extra": 2, "parts": {"bias"}},
    "entmax": {"parts": {"entmax"}},
    "window": {"mask": WINDOW, "parts": {"right"}},
    "window with given tokens": {"mask": WINDOW, "parts": {"given", "bias"}},
    "window of a causal model": {"mask": WINDOW, "is_causal": True, "parts": {"positions"}, "memory": 3},
    "blocks": {"mask": FIXED, "extra": 1},
    "dense": {"parts": {"dense"}},
    "dense for all sequences": {"parts": {"dense for all"}},
    "dense alone": {"parts": {"dense", "alone"}},
    "dense with a window": {"mask": WINDOW, "parts": {"dense"}},
    "dense with persistent keys": {"extra": 2, "parts": {"dense"}},
    "other keys than queries": {"memory": 7},
    "wide queries": {"parts": {"wide"}},
}


@pytest.mark.parametrize("dropout", [0.0, 0.25])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_the_answer_is_what_the_device_does(back_end, name, dropout):
    case = Case(time=11, consumers=2, **CASES[name])
    call = AttentionCall.of(AttentionInputs(case.q, case.k, case.values[0], case.scores, dropout, 2))
    why = BACK_ENDS[back_end].why_not(call, "cpu", torch.float64)
    if why is not None:
        with pytest.raises(UserError, match=re.escape(f"--attention-backend {back_end}: {why}; choose from auto, ")):
            case.by(back_end, dropout=dropout)
        return
    found = case.by(back_end, dropout=dropout)
    if dropout:  # masks are drawn in an order of each one's own
        assert all(part.isfinite().all() for part in found)
        assert not torch.allclose(found[0], case.by(back_end)[0])
        return
    torch.testing.assert_close(found, case.by("eager"), atol=1e-12, rtol=1e-9)
