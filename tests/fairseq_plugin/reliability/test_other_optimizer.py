"""A run that is resumed by another optimizer than its checkpoint's."""

from pathlib import Path

import pytest

from lazyformer_fairseq.errors import UserError

OPTIONS = (
    "--arch par_transformer_tiny --sublayer-pattern sf --mem-len 8 --criterion causal_lm --batch-size 16 "
    "--disable-validation --lr 1e-3"
)


def test_it_is_refused_in_words(lm_data: Path, tmp_path: Path, fairseq_train):
    task = "stream_language_modeling --tgt-len 8"
    fairseq_train(lm_data, f"{OPTIONS} --max-update 1 --optimizer fused_adam", tmp_path, task)
    with pytest.raises(UserError, match=r"trained with the optimizer FusedAdam, not NvLamb: .* or --reset-optimizer"):
        fairseq_train(lm_data, f"{OPTIONS} --max-update 2 --optimizer nvlamb", tmp_path, task)
