"""Run by other interpreters, without lazyformer_fairseq: python in_other_environments.py WHAT FOLDER."""

import json
import sys
from pathlib import Path

import torch

TRUST = {"trust_remote_code": True}


def load(folder: Path) -> None:
    """Prints the version of transformers; every class, saving and loading again, against the logits beside."""
    import transformers
    from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer, pipeline

    wanted = torch.load(folder / "wanted.pt", weights_only=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, **TRUST)
    inputs = tokenizer(wanted["texts"], padding=True, return_tensors="pt")
    assert torch.equal(inputs["input_ids"], wanted["ids"]), "the same ids"
    text = inputs["attention_mask"].bool()
    again = folder / f"again_{transformers.__version__}"
    for attention in ("eager", "sdpa"):
        model = AutoModelForMaskedLM.from_pretrained(folder, attn_implementation=attention, **TRUST)
        close(model(**inputs).logits[text], wanted["logits"][text])
    model.save_pretrained(again)
    close(AutoModelForMaskedLM.from_pretrained(again, **TRUST)(**inputs).logits[text], wanted["logits"][text])
    close(AutoModel.from_pretrained(folder, **TRUST)(**inputs).last_hidden_state[text], wanted["features"][text])
    classifier = transformers.AutoModelForSequenceClassification.from_pretrained(folder, **TRUST)
    close(classifier(**inputs).logits, wanted["classes"])
    tokenizer.save_pretrained(again)
    assert len(pipeline("fill-mask", model=str(again), **TRUST)(f"the {tokenizer.mask_token} of anna", top_k=3)) == 3
    print(json.dumps({"transformers": transformers.__version__}))


def encode_sentences(folder: Path) -> None:
    """sentence-transformers, with mean pooling."""
    from sentence_transformers import SentenceTransformer, models

    wanted = torch.load(folder / "wanted.pt", weights_only=True)
    arguments = {"model_kwargs": TRUST, "config_kwargs": TRUST, "processor_kwargs": TRUST}
    encoder = models.Transformer(str(folder), **arguments)
    vectors = SentenceTransformer(modules=[encoder, models.Pooling(16, pooling_mode="mean")]).encode(wanted["texts"])
    text = wanted["ids"].ne(1)[..., None]
    close(torch.tensor(vectors), (wanted["features"] * text).sum(1) / text.sum(1))


def to_onnx(folder: Path) -> None:
    """ONNX by torch.export, for batches and lengths of any size."""
    import onnxruntime
    from transformers import AutoModelForMaskedLM

    model = AutoModelForMaskedLM.from_pretrained(folder, **TRUST).eval()

    class Logits(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, input_ids, attention_mask):
            return self.model(input_ids, attention_mask=attention_mask).logits

    def example(batch: int, time: int):
        ids = torch.randint(4, model.config.vocab_size, (batch, time))
        return ids, torch.ones_like(ids).index_fill(1, torch.arange(time - 2, time), 0)

    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("time", max=model.config.max_position_embeddings)}
    program = torch.onnx.export(Logits(), example(2, 9), dynamo=True, dynamic_shapes=(sizes, sizes))
    program.save(str(folder / "model.onnx"))
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"))
    for batch, time in ((2, 9), (3, 14), (4, 5)):
        ids, mask = example(batch, time)
        names = [each.name for each in session.get_inputs()]
        (found,) = session.run(None, dict(zip(names, (ids.numpy(), mask.numpy()), strict=True)))
        close(torch.tensor(found)[mask.bool()], model(ids, attention_mask=mask).logits[mask.bool()], 1e-4)


def close(one: torch.Tensor, other: torch.Tensor, within: float = 1e-5) -> None:
    torch.testing.assert_close(one, other, atol=within, rtol=within)


if __name__ == "__main__":
    assert "lazyformer_fairseq" not in sys.modules
    with torch.no_grad():
        {"load": load, "sentences": encode_sentences, "onnx": to_onnx}[sys.argv[1]](Path(sys.argv[2]))
