"""A BERT that was imported goes back to transformers: the same model, the same tokenizer."""

import pytest
import torch
import transformers
from tiny_berts import save_tiny

from lazyformer_fairseq.huggingface.export import BERT, CUSTOM, export_to_huggingface
from lazyformer_fairseq.huggingface.exported import heads
from lazyformer_fairseq.huggingface.importing import import_to

TEXTS = ["the cat sat on the mat .", "the big dog"]


@pytest.mark.parametrize("form", [BERT, CUSTOM])
@torch.no_grad()
def test_a_bert_comes_back_as_it_was(form, tmp_path):
    original = save_tiny(tmp_path / "hub")
    import_to(tmp_path / "hub", tmp_path / "ours")
    assert export_to_huggingface(tmp_path / "ours", tmp_path / "back", form=form) == form
    model_class = transformers.BertForMaskedLM if form == BERT else heads.LazyFormerForMaskedLM
    model = model_class.from_pretrained(tmp_path / "back")
    before, after = (transformers.AutoTokenizer.from_pretrained(tmp_path / name) for name in ("hub", "back"))
    inputs = before(TEXTS, TEXTS[::-1], padding=True, return_tensors="pt")
    found = after(TEXTS, TEXTS[::-1], padding=True, return_tensors="pt")
    assert {name: ids.tolist() for name, ids in inputs.items()} == {name: ids.tolist() for name, ids in found.items()}
    text = inputs["attention_mask"].bool()
    torch.testing.assert_close(model(**found).logits[text], original(**inputs).logits[text], atol=1e-5, rtol=1e-5)
