"""``lazyformer pattern spans``: what is in a checkpoint."""

from pathlib import Path

import torch
from click.testing import CliRunner
from fairseq.data import Dictionary

from lazyformer_fairseq.cli import main
from lazyformer_fairseq.fairseq_plugin.models.config import CausalLMConfig
from lazyformer_fairseq.fairseq_plugin.models.lazyformer import CausalLanguageModel


def save(pattern: str, path: Path) -> CausalLanguageModel:
    sizes = dict(decoder_embed_dim=8, decoder_ffn_embed_dim=8, decoder_attention_heads=2, adaptive_softmax_cutoff="")
    cfg = CausalLMConfig(sublayer_pattern=pattern, **sizes)
    model = CausalLanguageModel(cfg, Dictionary())
    shares = [weight for name, weight in model.named_parameters() if name.endswith("shares")]
    for number, weight in enumerate(shares):
        weight.data.copy_(torch.tensor([0.5, 0.25 * number]))
    history = [{"num_updates": 1, "best_loss": None, "optimizer_name": "", "criterion_name": ""}]
    rest = {"args": None, "extra_state": {"train_iterator": {"epoch": 1}}, "optimizer_history": history}
    cfg = {"model": vars(cfg), "task": {"_name": None}, "common": {}, "checkpoint": {}}
    torch.save({"model": model.state_dict(), "cfg": cfg, **rest}, path)
    return model


def spans(*arguments: object):
    return CliRunner().invoke(main, ["pattern", "spans", *map(str, arguments)])


def test_each_sublayers_spans_are_printed_and_drawn(tmp_path):
    save("s[span=100] f s s[span=40,ramp=5]", tmp_path / "model.pt")
    done = spans(tmp_path / "model.pt", tmp_path / "spans.png")
    assert done.exit_code == 0, done.output
    _, first, second, _ = done.output.splitlines()
    assert (first.split(), second.split()) == (["1", "32", "25.0", "0", "50"], ["4", "5", "15.0", "10", "20"])
    assert (tmp_path / "spans.png").read_bytes().startswith(b"\x89PNG")


def test_a_model_without_spans_and_a_missing_file_are_named(tmp_path):
    save("sf", tmp_path / "model.pt")
    for name, why in (("model.pt", "learn no spans"), ("none.pt", "none.pt")):
        done = spans(tmp_path / name)
        assert done.exit_code and why in str(done.exception)
