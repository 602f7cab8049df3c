"""What is done with an imported model: fine-tuned on pairs, pre-trained on, given another pattern, exported again."""

import json
from pathlib import Path

import pytest
import torch
from helpers import ROOT, assert_equal_state, toy_texts, write_toy_glue
from in_process import invoke
from safetensors.torch import load_file
from tiny_berts import save_tiny
from torch.testing import assert_close
from transformers import AutoModelForMaskedLM, AutoTokenizer

import lazyformer_fairseq.huggingface  # noqa: F401 (registers what is exported)
from lazyformer_fairseq.corpus.build import build_corpus
from lazyformer_fairseq.corpus.settings import CorpusSettings
from lazyformer_fairseq.fairseq_plugin.models.checkpoint_match import PER_POSITION, PER_WORD
from lazyformer_fairseq.fairseq_plugin.models.lazyformer import LazyFormerModel
from lazyformer_fairseq.huggingface.export import export_to_huggingface
from lazyformer_fairseq.huggingface.importing import import_to

TYPES = "encoder.sentence_encoder.embed_token_types.weight"


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> Path:
    """A folder in which BERT's is `in` and the imported one's `out`."""
    folder = tmp_path_factory.mktemp("bert")
    save_tiny(folder / "in", "BertForPreTraining")
    import_to(folder / "in", folder / "out")
    return folder


def options_of(folder: Path) -> str:
    """Of fairseq-train, for a model in a folder."""
    model = json.loads((folder / "config.json").read_text())["model"]
    words = [f"--{name.replace('_', '-')} {value}" for name, value in model.items() if not isinstance(value, bool)]
    start = f"--finetune-from-model {folder / 'model.safetensors'}"
    return f"--arch lazyformer {' '.join(words)} {start} --max-update 2 --batch-size 8 --disable-validation"


def test_pairs_are_fine_tuned_with_their_token_types_and_heads_start_as_the_pooler(bert, tmp_path, fairseq_train):
    data = write_toy_glue(tmp_path / "glue", train=24, valid=4)
    start = load_file(bert / "out" / "model.safetensors")
    pooler = load_file(bert / "in" / "model.safetensors")["bert.pooler.dense.weight"]
    for task, rate, changes in ("RTE", 1e-3, [True, True]), ("SST-2", 1e-3, [True, False]), ("CoLA", 0, [False, False]):
        options = f"{options_of(bert / 'out')} --criterion glue --weight-decay 0 --dropout 0 --attention-dropout 0"
        state = fairseq_train(data / task, f"{options} --lr {rate}", tmp_path / task, task="glue")["model"]
        assert [not torch.equal(*rows) for rows in zip(state[TYPES], start[TYPES], strict=True)] == changes
        head = state[f"classification_heads.{task.lower()}.dense.weight"]
        assert torch.equal(head, pooler) == (rate == 0) and not any("pooler" in name for name in state)
    loaded = LazyFormerModel.from_pretrained(tmp_path / "RTE")
    assert loaded.predict("rte", "the cat sat").shape == (1, 2)


def test_masked_lm_goes_on_with_its_own_tokenizer(bert, tmp_path, fairseq_train):
    (tmp_path / "text.txt").write_text("\n\n".join(toy_texts(40)))
    settings = CorpusSettings(valid_share=0.1, tokenizer=str(bert / "out" / "tokenizer"))
    build_corpus([str(tmp_path / "text.txt")], tmp_path / "data", settings)
    task = "full_sentences_masked_lm --tokens-per-sample 16"
    options = f"{options_of(bert / 'out')} --criterion masked_lm_accuracy"
    state = fairseq_train(tmp_path / "data", options, tmp_path / "run", task=task)["model"]
    start = load_file(bert / "out" / "model.safetensors")
    assert not torch.equal(state[PER_WORD], start["encoder.lm_head.weight"])  # one weight, stored once
    assert not torch.equal(state[TYPES][0], start[TYPES][0])  # all text is of type 0
    text = LazyFormerModel.from_pretrained(tmp_path / "run").fill_mask("Anna [MASK] Ben.", topk=1)[0].text
    assert "[MASK]" not in text


def test_exported_as_bert_it_has_the_same_tensors(bert, tmp_path):
    assert export_to_huggingface(bert / "out", tmp_path / "back") == "bert"
    folders = (bert / "in", tmp_path / "back")
    # With what tells whether a text follows another one.
    assert_equal_state(*(load_file(folder / "model.safetensors") for folder in folders))
    before, after = (json.loads((folder / "config.json").read_text()) for folder in folders)
    for name in ("hidden_act", "layer_norm_eps", "type_vocab_size", "max_position_embeddings", "vocab_size"):
        assert before[name] == after[name]


def test_the_command_says_what_became_of_what(bert, tmp_path):
    output = invoke("import", bert / "in", tmp_path / "out", "--token-types", "fold")
    assert "folded into the positions" in output and "its pooler is kept as the head 'pooler'" in output
    assert "its cls.seq_relationship is the head 'next_sentence'" in output and "left out" not in output
    assert output.endswith(f"written: {tmp_path / 'out'}\n")
    folded = LazyFormerModel.from_pretrained(tmp_path / "out").model.state_dict()
    theirs = load_file(bert / "in" / "model.safetensors")
    first = theirs["bert.embeddings.token_type_embeddings.weight"][0]
    assert torch.equal(folded[PER_POSITION], theirs["bert.embeddings.position_embeddings.weight"] + first)


def test_a_bert_starts_a_model_of_another_pattern_and_pairs_keep_their_types_on_the_way_back(bert, tmp_path):
    invoke("import", bert / "in", tmp_path / "warm", "--sublayer-pattern", "M2")
    hub, before = (LazyFormerModel.from_pretrained(folder) for folder in (tmp_path / "warm", bert / "out"))
    assert hub.model.cfg.sublayer_pattern == "M2" and hub.model.cfg.token_types == 2
    ours, theirs = hub.model.state_dict(), before.model.state_dict()
    place = "encoder.sentence_encoder.sublayers.2.inner"
    assert torch.equal(ours[f"{place}.v_proj.weight"], theirs[f"{place}.qkv_proj.weight"].chunk(3)[2])
    assert torch.equal(ours["classification_heads.pooler.dense.bias"], theirs["classification_heads.pooler.dense.bias"])
    assert export_to_huggingface(tmp_path / "warm", tmp_path / "back") == "custom"
    batch = AutoTokenizer.from_pretrained(tmp_path / "back")([("the cat", "a dog")], return_tensors="pt")
    assert batch["token_type_ids"].tolist() == [[0] * 4 + [1] * 3]
    with torch.no_grad():
        expected, _ = hub.model(batch["input_ids"], token_types=batch["token_type_ids"])
        found = AutoModelForMaskedLM.from_pretrained(tmp_path / "back")(**batch).logits
        assert_close(found, expected, rtol=0, atol=1e-5)
        assert not torch.allclose(hub.model(batch["input_ids"])[0], expected, atol=1e-2)


def test_checkpoints_of_this_package_are_read_too(bert, tmp_path):
    fixture = ROOT / "tests/fixtures/checkpoints_of_2026_11/encoder"
    for source, folder in ((fixture, fixture), (bert / "out" / "model.safetensors", bert / "out")):
        invoke("import", source, tmp_path / folder.name)
        models = (LazyFormerModel.from_pretrained(each).model for each in (tmp_path / folder.name, folder))
        assert_equal_state(*(model.state_dict() for model in models))
