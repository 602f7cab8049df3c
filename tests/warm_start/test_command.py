"""`lazyformer import` of a checkpoint of ours: a folder that loads and trains, with its record, or nothing."""

import json
import shlex
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from helpers import toy_texts
from trained_encoders import HEADS, WIDTH

from lazyformer_fairseq import LazyFormerModel
from lazyformer_fairseq.cli import main
from lazyformer_fairseq.data.text.tokenizer import Tokenizer
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.models.config import LazyFormerConfig
from lazyformer_fairseq.fairseq_plugin.models.export import write_model
from lazyformer_fairseq.fairseq_plugin.models.hub import LazyFormerHub

TEXTS = ("Anna sees Ben near the house.", "The garden.")


@pytest.fixture(scope="module")
def model(tmp_path_factory, data_folder) -> Path:
    """A folder with an (sf)x4, as `lazyformer export` writes it."""
    tokenizer = Tokenizer.load(data_folder / "tokenizer")
    torch.manual_seed(1)
    sizes = {"encoder_embed_dim": WIDTH, "encoder_ffn_embed_dim": 24, "encoder_attention_heads": HEADS}
    network = LazyFormerModel(
        LazyFormerConfig(sublayer_pattern="(sf)x4", max_positions=32, **sizes), tokenizer.dictionary
    )
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    network.register_classification_head("cola", 2)
    folder = tmp_path_factory.mktemp("model")
    write_model(LazyFormerHub(network, tokenizer), folder)
    return folder


def import_(*words: object) -> str:
    done = CliRunner().invoke(main, ["import", *map(str, words)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_a_report(model, data_folder, tmp_path, fairseq_train):
    out = tmp_path / "out"
    import_(model, out, "--sublayer-pattern", "M2x2", "--text", data_folder)
    assert {path.name for path in out.iterdir()} == {
        *("config.json", "model.safetensors", "tokenizer", "warm_start.json", "warm_start.md"),
    }
    record = json.loads((out / "warm_start.json").read_text())
    assert (record["old_pattern"], record["new_pattern"]) == ("sfsfsfsf", "sflfsflf")
    assert record["source"] == model.name
    assert [change["change"] for change in record["losses"]["changes"]] == ["s becomes l", "s becomes l"]
    page = (out / "warm_start.md").read_text()
    assert "| 2: s becomes l |" in page and f"{record['losses']['before']:.3f} bits before" in page
    hub = LazyFormerModel.from_pretrained(out)
    assert hub.model.cfg.sublayer_pattern == "M2x2" and hub.predict("cola", TEXTS[0]).shape == (1, 2)
    saved = fairseq_train(
        data_folder,
        f"--arch bert_tiny --sublayer-pattern M2x2 --encoder-embed-dim {WIDTH} --encoder-ffn-embed-dim 24 "
        f"--encoder-attention-heads {HEADS} --max-positions 32 --relative-position-buckets 32 --batch-size 8 "
        f"--criterion masked_lm_accuracy --max-update 2 --disable-validation "
        f"--finetune-from-model {shlex.quote(str(out / 'model.safetensors'))}",
        tmp_path / "run",
    )
    assert saved["last_optimizer_state"] is not None


def test_without_text_a_wider_model_computes_the_same(model, tmp_path):
    out = tmp_path / "out"
    import_(model, out, "--encoder-ffn-embed-dim", 40, "--max-positions", 50)
    before, after = (LazyFormerModel.from_pretrained(folder).extract_features(*TEXTS) for folder in (model, out))
    torch.testing.assert_close(before, after, atol=1e-5, rtol=1e-5)
    record = json.loads((out / "warm_start.json").read_text())
    assert record["changed_options"] == {"encoder_ffn_embed_dim": [24, 40], "max_positions": [32, 50]}
    assert record["losses"] is None


def test_raw_text_and_an_alignment_of_the_users_own(model, tmp_path):
    (tmp_path / "text.txt").write_text("\n".join(toy_texts(30)))
    out = tmp_path / "out"
    words = ("--sublayer-pattern", "sf", "--from-sublayers", "2, 3", "--text", tmp_path / "text.txt")
    import_(model, out, *words)
    record = json.loads((out / "warm_start.json").read_text())
    assert record["left_out"] == [0, 1, 4, 5, 6, 7] and record["losses"]["after"] > 0
    assert "Left out: the old sublayers 0, 1, 4, 5, 6, 7." in (out / "warm_start.md").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--heads matched --sublayer-pattern M4", "--heads: went, for it gained nothing"),
        ("--from-sublayers 0,1", "--from-sublayers and --text are for a model that changes"),
        ("--sublayer-pattern lf", "character 1: this l has no s below it"),
        ("--sublayer-pattern M4 --text missing.txt", "missing.txt: no such file or folder"),
        ("--sublayer-pattern M4 --from-sublayers 0", "--from-sublayers: 1 given, but the new pattern has 8 sublayers"),
        ("--encoder-ffn-embed-dim 8", "--encoder-ffn-embed-dim 8: the old model's is 24"),
    ],
)
def test_what_is_refused_leaves_nothing_behind(model, tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        import_(model, tmp_path / "out", *options.split())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["BertForMaskedLM", "RobertaForMaskedLM", "DistilBertForMaskedLM"])
def test_a_model_of_the_hub_starts_another_pattern_with_its_own_tokenizer(tmp_path, kind):
    pytest.importorskip("transformers")
    from tiny_berts import save_tiny

    save_tiny(tmp_path / "in", kind, **{"n_layers" if kind.startswith("Distil") else "num_hidden_layers": 4})
    (tmp_path / "text.txt").write_text("The cat sat on the mat, a dog ran.\n" * 30)
    words = ("--sublayer-pattern", "M2x2", "--encoder-ffn-embed-dim", 60, "--text", tmp_path / "text.txt")
    import_(tmp_path / "in", tmp_path / "out", *words)
    record = json.loads((tmp_path / "out" / "warm_start.json").read_text())
    assert [each["from"] for each in record["sublayers"]] == list(range(8))
    assert len(record["losses"]["changes"]) == 2
    hub = LazyFormerModel.from_pretrained(tmp_path / "out")
    mask = hub.tokenizer.mask_word
    assert len(hub.fill_mask(f"the cat {mask} on the mat", topk=3)) == 3
