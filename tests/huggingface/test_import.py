"""Imported models compute what transformers compute, of all variants, and what is done with them."""

import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import ROOT, assert_equal_state, head_logits, mostly_slow, toy_texts, write_toy_glue
from in_process import invoke, refusal
from safetensors.torch import load_file, save_file
from tiny_berts import ROWS, save_tiny
from torch import Tensor
from torch.testing import assert_close
from transformers import AutoModelForMaskedLM, AutoTokenizer, BertTokenizerFast

import lazyformer_fairseq.huggingface  # noqa: F401 (registers what is exported)
from lazyformer_fairseq.corpus.build import build_corpus
from lazyformer_fairseq.corpus.settings import CorpusSettings
from lazyformer_fairseq.data.datasets.labelled_texts import token_types_of
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation.export import write_model
from lazyformer_fairseq.evaluation.inference import TrainedModel
from lazyformer_fairseq.evaluation.loading import load
from lazyformer_fairseq.huggingface.export import export_to_huggingface
from lazyformer_fairseq.huggingface.importing import import_to
from lazyformer_fairseq.modules.networks.masked_lm import MaskedLM

SAFE = "model.safetensors"
EXACT = {"rtol": 0, "atol": 1e-5}
VARIANTS = [
    ("BertForMaskedLM", {}),
    ("BertForMaskedLM", {"hidden_act": "gelu_new", "layer_norm_eps": 1e-3}),
    ("BertForMaskedLM", {"hidden_act": "gelu_pytorch_tanh"}),
    ("BertForMaskedLM", {"hidden_act": "gelu_fast", "type_vocab_size": 1}),
    ("BertForMaskedLM", {"hidden_act": "relu", "num_hidden_layers": 1}),
    ("RobertaForMaskedLM", {"type_vocab_size": 1, "layer_norm_eps": 1e-5}),
    ("RobertaForMaskedLM", {"hidden_act": "gelu_new"}),
    ("DistilBertForMaskedLM", {}),
    ("ModernBertForMaskedLM", {}),
    ("ModernBertForMaskedLM", {"hidden_activation": "silu", "norm_bias": True, "global_attn_every_n_layers": 2}),
    ("ModernBertForMaskedLM", {"classifier_activation": "relu", "norm_eps": 1e-3, "num_hidden_layers": 1}),
    ("ModernBertForMaskedLM", dict.fromkeys(("attention_bias", "mlp_bias", "classifier_bias"), True)),
    ("DistilBertForMaskedLM", {"activation": "relu", "sinusoidal_pos_embds": True}),
    # Models with RoBERTa's layers are read as one.
    ("RobertaForMaskedLM", {"model_type": "xlm-roberta"}),
    ("RobertaForMaskedLM", {"model_type": "camembert"}),
]


def imported(source: Path, **named: Any) -> TrainedModel:
    out = source.with_name("out")
    import_to(source, out, **named)
    return load(out)


def padded_batch(pad: int, separator: int) -> tuple[Tensor, Tensor]:
    """Three texts of other lengths, and which of their ids are text."""
    torch.manual_seed(3)
    ids = torch.randint(6, ROWS, (3, 14))
    lengths = torch.tensor([14, 9, 5])
    ids[torch.arange(3), lengths - 1] = separator
    is_text = torch.arange(14) < lengths[:, None]
    return ids.masked_fill(~is_text, pad), is_text


@pytest.mark.parametrize(("class_name", "options"), VARIANTS, ids=str)
def test_hidden_states_and_logits_are_those_of_transformers(tmp_path, class_name, options):
    named = options.get("model_type", class_name.partition("For")[0].lower())
    theirs = save_tiny(tmp_path / "in", class_name, **{name: options[name] for name in options if name != "model_type"})
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    (tmp_path / "in" / "config.json").write_text(json.dumps({**config, "model_type": named}))
    hub = imported(tmp_path / "in")
    dictionary = hub.tokenizer.dictionary
    ids, is_text = padded_batch(dictionary.pad(), dictionary.eos())
    with torch.no_grad():
        expected = theirs(ids, attention_mask=is_text.long(), output_hidden_states=True)
        logits, extra = hub.model(ids, return_all_hiddens=True)
    assert_close(logits[is_text], expected.logits[is_text], **EXACT)
    states = extra["inner_states"][::2]  # after each f
    if class_name.startswith("Modern"):  # whose last one is behind the last LayerNorm
        states[-1] = hub.model(ids, features_only=True)[0]
    for ours, hidden in zip(states, expected.hidden_states, strict=True):
        assert_close(ours[is_text], hidden[is_text], **EXACT)
    assert expected.logits.abs().max() > 1  # so that 1e-5 says something


def test_pairs_of_bert_are_exact_by_their_token_types(tmp_path):
    theirs = save_tiny(tmp_path / "in")
    kept = imported(tmp_path / "in")
    pairs = [("the cat sat", "a dog ran"), ("a cat", "on"), ("big dog", "a red house, a mat")]
    batch = BertTokenizerFast.from_pretrained(tmp_path / "in")(pairs, padding=True, return_tensors="pt")
    ids, types, is_text = batch["input_ids"], batch["token_type_ids"], batch["attention_mask"].bool()
    for pair, row, keep in zip(pairs, ids, is_text, strict=True):
        assert kept.tokenizer.build_input(*pair) == row[keep].tolist()
    assert torch.equal(token_types_of(ids, kept.tokenizer.dictionary.eos(), kept.tokenizer.dictionary.pad()), types)
    with torch.no_grad():
        of_pair = theirs(**batch).logits[is_text]
        of_single = theirs(ids, attention_mask=is_text.long()).logits[is_text]
        assert_close(kept.model(ids, token_types=types)[0][is_text], of_pair, **EXACT)
        assert_close(kept.model(ids)[0][is_text], of_single, **EXACT)
    assert (of_pair - of_single).abs().max() > 0.1


@pytest.mark.parametrize(
    ("class_name", "head", "output"),
    [
        ("BertForSequenceClassification", "mnli", "logits"),
        ("RobertaForSequenceClassification", "mnli", "logits"),
        ("BertForTokenClassification", "mnli", "logits"),
        ("RobertaForTokenClassification", "mnli", "logits"),
        ("DistilBertForTokenClassification", "mnli", "logits"),
        ("BertForPreTraining", "next_sentence", "seq_relationship_logits"),
        ("BertModel", "pooler", "pooler_output"),
    ],
)
@torch.no_grad()
def test_a_head_of_theirs_is_one_of_ours(tmp_path, class_name, head, output):
    theirs = save_tiny(tmp_path / "in", class_name, **({"num_labels": 3} if head == "mnli" else {}))
    hub = imported(tmp_path / "in", head_name="mnli")
    special = hub.tokenizer.special
    ids, is_text = padded_batch(special.pad, special.eos)
    types = token_types_of(ids, special.eos, special.pad) if class_name.startswith("Bert") else None
    given = {} if types is None else {"token_type_ids": types}
    expected = theirs(ids, attention_mask=is_text.long(), **given)[output]
    found = hub.model(ids, classification_head_name=head, token_types=types)[0]
    if "Token" in class_name:  # at padding they say nothing
        found = found[is_text]
        expected = expected[is_text]
    assert_close(found, expected, **EXACT)
    assert head_logits(hub, head, "the cat sat").size(-1) == expected.size(-1)


@torch.no_grad()
def test_tags_keep_their_names_and_texts_are_tagged_as_there(tmp_path):
    called = {0: "O", 1: "B-PER", 2: "I-PER"}
    theirs = save_tiny(tmp_path / "in", "BertForTokenClassification", id2label=called)
    tokenizer = BertTokenizerFast.from_pretrained(tmp_path / "in")
    words = "the cat sat on a dogcat .".split()
    batch = tokenizer([words], is_split_into_words=True, return_tensors="pt")
    theirs.classifier.bias -= theirs(**batch).logits[0].mean(0)  # so that words differ in their tags
    theirs.save_pretrained(tmp_path / "in")
    hub = imported(tmp_path / "in")
    expected = theirs(**batch).logits[0].argmax(-1).tolist()
    firsts = [batch.word_to_tokens(0, number).start for number in range(len(words))]
    (answer,) = hub.predict([" ".join(words)])
    assert answer.label == [called[expected[place]] for place in firsts]
    assert len(set(answer.label)) > 1

    # A head with a map between is none of ours.
    save_tiny(tmp_path / "modern", "ModernBertForTokenClassification")
    (note,) = [note for note in import_to(tmp_path / "modern", tmp_path / "modern_out") if "not imported" in note]
    assert "classifier.weight" in note


@torch.no_grad()
def test_classes_keep_their_names_or_come_into_the_order_of_glues_task(tmp_path):
    called = {0: "ENTAILMENT", 1: "NEUTRAL", 2: "CONTRADICTION"}
    theirs = save_tiny(tmp_path / "in", "BertForSequenceClassification", id2label=called)
    theirs.classifier.bias.copy_(torch.tensor([9.0, 4.0, 0.0]))
    theirs.save_pretrained(tmp_path / "in")
    found = {}
    for name in ("mnli", "mood-3"):
        import_to(tmp_path / "in", tmp_path / name, head_name=name)
        (found[name],) = load(tmp_path / name).predict([("the cat sat", "a dog")])
    assert found["mood-3"].label == "ENTAILMENT" and found["mnli"].label == "entailment"
    assert found["mnli"].probability == pytest.approx(found["mood-3"].probability, abs=1e-6)
    assert list(found["mnli"].probabilities) == ["contradiction", "entailment", "neutral"]


def test_a_model_without_masked_lm_head_gets_a_fresh_one_and_says_so(tmp_path):
    save_tiny(tmp_path / "in", "BertModel")
    for name in ("out", "again"):
        notes = import_to(tmp_path / "in", tmp_path / name)
    assert any("no masked-LM head" in note for note in notes) and any("pooler" in note for note in notes)
    ours, again = (load_file(tmp_path / name / SAFE) for name in ("out", "again"))
    assert all(torch.equal(ours[name], again[name]) for name in ours)  # the fresh head too
    assert 0.01 < ours["encoder.lm_head.dense.weight"].std() < 0.03


UNTRAINED = [
    ("BertModel", "bert", "BertModel"),
    ("BertForSequenceClassification", "custom", "LazyFormerForSequenceClassification"),
    ("BertModel", "custom", "LazyFormerModel"),
    ("BertForNextSentencePrediction", "bert", "BertForNextSentencePrediction"),
    ("BertForSequenceClassification", "bert", "BertForSequenceClassification"),
]


@pytest.mark.parametrize("case", mostly_slow(UNTRAINED, *UNTRAINED[:2]), ids=str)
def test_a_masked_lm_head_that_never_trained_is_left_out_and_the_card_says_so(case, tmp_path):
    """An export has no masked-LM head that nobody trained, and neither card nor fill_mask offers one."""
    class_name, form, exported = case
    save_tiny(tmp_path / "in", class_name)
    invoke("import", tmp_path / "in", tmp_path / "out")
    invoke("export", tmp_path / "out", tmp_path / "back", "--to", "huggingface", "--as", form)
    card = (tmp_path / "back" / "README.md").read_text()
    assert "fill-mask" not in card and "MaskedLM" not in card and "cannot fill masks" in card
    ending = "" if class_name != "BertForSequenceClassification" else "ForSequenceClassification"
    assert f"model = AutoModel{ending}.from_pretrained" in card
    assert json.loads((tmp_path / "back" / "config.json").read_text())["architectures"] == [exported]
    assert not any(name.startswith(("cls.predictions", "lm_head")) for name in load_file(tmp_path / "back" / SAFE))
    with pytest.raises(UserError, match="fill_mask: this model's masked-LM head was never trained"):
        load(tmp_path / "out").fill_mask("The cat [MASK].")
    if form == "bert":
        (tmp_path / "text.txt").write_text("the cat sat on the big red mat\n" * 40)
        words = (tmp_path / "out", tmp_path / "new", "--sublayer-pattern", "sflf", "--text", tmp_path / "text.txt")
        assert "never trained, so its losses are meaningless" in refusal("import", *words)


@pytest.mark.parametrize("form", ["old names", "half", "without prefix"])
@torch.no_grad()
def test_every_form_of_weights_is_read(tmp_path, form):
    folder, is_bare = tmp_path / "in", form == "without prefix"
    theirs = save_tiny(folder, "BertModel" if is_bare else "BertForMaskedLM")
    weights = load_file(folder / SAFE)
    weights["bert.embeddings.position_ids"] = torch.arange(16)[None]
    for name in [name for name in weights if form == "old names" and "LayerNorm" in name]:
        weights[name.replace("weight", "gamma").replace("bias", "beta")] = weights.pop(name)
    if form == "half":
        weights = {name: weight.half() for name, weight in weights.items() if weight.is_floating_point()}
    save_file(weights, folder / SAFE)
    ids = torch.randint(6, ROWS, (2, 9))
    found, expected = imported(folder).model(ids, features_only=is_bare)[0], theirs(ids)[0]
    assert_close(found, expected, rtol=0, atol=0.1 if form == "half" else 1e-5)


def test_fill_mask_speaks_its_own_tokenizer(tmp_path):
    theirs = save_tiny(tmp_path / "blobs")
    (tmp_path / "in").mkdir()
    for file in (tmp_path / "blobs").iterdir():  # links, as the Hub's cache has them
        (tmp_path / "in" / file.name).symlink_to(Path("..", "blobs", file.name))
    hub = imported(tmp_path / "in")
    text = "The cat [MASK] on the mat."
    ids = torch.tensor([BertTokenizerFast.from_pretrained(tmp_path / "in")(text)["input_ids"]])
    assert torch.equal(hub.encode(text), ids)
    with torch.no_grad():
        probabilities = theirs(ids).logits[0, 3].softmax(-1)
    answers = hub.fill_mask(text, topk=4)
    assert [answer.probability for answer in answers] == pytest.approx(probabilities.topk(4).values.tolist(), abs=1e-5)
    for answer, row in zip(answers, probabilities.topk(4).indices.tolist(), strict=True):
        assert answer.word == hub.tokenizer.decode([row])


# Fine-tuned on pairs, pre-trained on, given another pattern, exported again


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
    given = {
        name: "" if value is True else shlex.quote(str(value)) for name, value in model.items() if value is not False
    }
    words = [f"--{name.replace('_', '-')} {value}" for name, value in given.items()]
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
    loaded = load(tmp_path / "RTE")
    assert head_logits(loaded, "rte", "the cat sat").shape == (1, 2)


@pytest.mark.parametrize("is_fresh", [False, True])
def test_masked_lm_goes_on_with_its_own_tokenizer(is_fresh, bert, tmp_path, fairseq_train):
    if is_fresh:  # its head learns, and is no longer called one that never trained
        save_tiny(tmp_path / "in", "BertModel")
        import_to(tmp_path / "in", (bert := tmp_path) / "out")
    (tmp_path / "text.txt").write_text("\n\n".join(toy_texts(40)))
    settings = CorpusSettings(valid_share=0.1, tokenizer=str(bert / "out" / "tokenizer"))
    build_corpus([str(tmp_path / "text.txt")], tmp_path / "data", settings)
    task = "full_sentences_masked_lm --tokens-per-sample 16"
    options = f"{options_of(bert / 'out')} --criterion masked_lm_accuracy"
    state = fairseq_train(tmp_path / "data", options, tmp_path / "run", task=task)["model"]
    start = load_file(bert / "out" / "model.safetensors")
    assert not torch.equal(state[MaskedLM.per_word], start["encoder.lm_head.weight"])  # one weight, stored once
    assert not torch.equal(state[TYPES][0], start[TYPES][0])  # all text is of type 0
    text = load(tmp_path / "run").fill_mask("Anna [MASK] Ben.", topk=1)[0].text
    assert "[MASK]" not in text


def test_exported_as_bert_it_has_the_same_tensors(bert, tmp_path):
    assert export_to_huggingface(bert / "out", tmp_path / "back") == "bert"
    folders = (bert / "in", tmp_path / "back")
    # With what tells whether a text follows another one.
    assert_equal_state(*(load_file(folder / "model.safetensors") for folder in folders))
    before, after = (json.loads((folder / "config.json").read_text()) for folder in folders)
    for name in ("hidden_act", "layer_norm_eps", "type_vocab_size", "max_position_embeddings", "vocab_size"):
        assert before[name] == after[name]


@pytest.fixture(scope="module")
def modern(tmp_path_factory) -> Path:
    """A folder in which ModernBERT's is `in` and the imported one's `out`."""
    folder = tmp_path_factory.mktemp("modern")
    save_tiny(folder / "in", "ModernBertForMaskedLM")
    invoke("import", folder / "in", folder / "out")
    return folder


def test_a_modernbert_goes_there_and_back_bit_for_bit_and_both_speak_its_tokenizer(modern, tmp_path):
    printed = invoke("export", modern / "out", tmp_path / "back", "--to", "huggingface", "--as", "modernbert")
    assert "back, a transformers ModernBERT" in printed
    assert "plain ModernBERT" in (tmp_path / "back" / "README.md").read_text()
    folders = modern / "in", tmp_path / "back"
    assert_equal_state(*(load_file(folder / SAFE) for folder in folders))
    before, after = (json.loads((folder / "config.json").read_text()) for folder in folders)
    names = before.keys() - {"transformers_version", "initializer_range", "dtype"}
    assert {name: before[name] for name in names} == {name: after.get(name) for name in names}
    assert export_to_huggingface(modern / "out", tmp_path / "auto") == "modernbert"
    invoke("import", tmp_path / "back", tmp_path / "again")
    ours, again = (json.loads((folder / "config.json").read_text()) for folder in (modern / "out", tmp_path / "again"))
    assert ours == again
    windowed = "s[window=3,rope=10000]f[gate=gelu]"
    assert (
        ours["model"]["sublayer_pattern"]
        == f"(s[rope=160000]f[gate=gelu]{windowed}{windowed})x1 s[rope=160000]f[gate=gelu]"
    )
    hub = load(tmp_path / "again")
    for text in ("The cat [MASK]  on   the mat.", "a cafe\u0301\tdog", "x = [unused0] y"):
        ids = [AutoTokenizer.from_pretrained(folder)(text)["input_ids"] for folder in folders]
        assert ids[0] == ids[1] == hub.encode(text)[0].tolist()
    assert AutoTokenizer.from_pretrained(modern / "in")("a", "b")["input_ids"] == hub.tokenizer.build_input("a", "b")
    text = "the cat [MASK] on the mat"
    with torch.no_grad():
        theirs = AutoModelForMaskedLM.from_pretrained(modern / "in")(hub.encode(text)).logits
    place = hub.encode(text)[0].tolist().index(hub.tokenizer.special.mask)
    probabilities = [answer.probability for answer in hub.fill_mask(text, topk=3)]
    assert probabilities == pytest.approx(theirs[0, place].softmax(-1).topk(3).values.tolist(), abs=1e-5)


def test_a_modernbert_as_the_hub_has_it_is_the_same(modern, tmp_path):
    """Its config.json has the names of an older transformers, its tokenizer stands for itself."""
    shutil.copytree(modern / "in", tmp_path / "in")
    path = tmp_path / "in" / "config.json"
    config = json.loads(path.read_text())
    for name in ("layer_types", "rope_parameters"):
        del config[name]
    config |= {"global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "local_rope_theta": 10000.0}
    path.write_text(json.dumps(config))
    import_to(tmp_path / "in", tmp_path / "out")
    folders = (tmp_path / "out", modern / "out")
    assert_equal_state(*(load_file(folder / SAFE) for folder in folders))
    assert len({(folder / "config.json").read_text() for folder in folders}) == 1
    config |= {"global_rope_theta": 5000.0, "global_attn_every_n_layers": 4}
    path.write_text(json.dumps(config))
    import_to(tmp_path / "in", tmp_path / "other")
    model = json.loads((tmp_path / "other" / "config.json").read_text())["model"]
    assert model["sublayer_pattern"].startswith("(s[rope=5000]f[gate=gelu]s[window=3,rope=10000]f[gate=gelu]s[win")


def test_a_modernbert_is_fine_tuned_and_gives_its_head_away_where_that_is_a_classifiers(
    modern, tmp_path, fairseq_train
):
    data = write_toy_glue(tmp_path / "glue", train=24, valid=4)
    options = f"{options_of(modern / 'out')} --criterion glue --max-positions 16"
    state = fairseq_train(data / "RTE", options, tmp_path / "RTE", task="glue")["model"]
    assert not any("bias" in name for name in state if "sublayers" in name or "norm" in name)
    assert head_logits(load(tmp_path / "RTE"), "rte", "the cat sat").shape == (1, 2)
    assert "ModernBERT has no counterpart to its head" in refusal(
        "export", tmp_path / "RTE", tmp_path / "back", "--to", "huggingface", "--as", "modernbert"
    )
    save_tiny(tmp_path / "in", "ModernBertForSequenceClassification")
    notes = "\n".join(import_to(tmp_path / "in", tmp_path / "out"))
    assert "no masked-LM head" in notes and "not imported: classifier.bias" in notes and "head.dense.weight" in notes


def test_the_command_says_what_became_of_what(bert, tmp_path):
    output = invoke("import", bert / "in", tmp_path / "out")
    assert "the model's 2 token types are kept" in output
    assert "the model's pooler is kept as the head 'pooler'" in output
    assert "the model's cls.seq_relationship became the head 'next_sentence'" in output and "not imported" not in output
    assert output.endswith(f"written: {tmp_path / 'out'}\n")


def test_a_bert_starts_a_model_of_another_pattern_and_pairs_keep_their_types_on_the_way_back(bert, tmp_path):
    invoke("import", bert / "in", tmp_path / "warm", "--sublayer-pattern", "M2")
    hub, before = (load(folder) for folder in (tmp_path / "warm", bert / "out"))
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
    fixture = ROOT / "tests/fixtures/checkpoints/encoder"
    for source, folder in ((fixture, fixture), (bert / "out" / "model.safetensors", bert / "out")):
        invoke("import", source, tmp_path / folder.name)
        models = (load(each).model for each in (tmp_path / folder.name, folder))
        assert_equal_state(*(model.state_dict() for model in models))


def test_heads_of_this_package_keep_what_they_were_trained_on(tmp_path):
    hub = load(ROOT / "tests/fixtures/checkpoints/fine_tuned")
    hub.tasks = {"cola": replace(hub.tasks["cola"], labels=("odd", "fine"), longest=20)}
    (tmp_path / "in").mkdir()
    write_model(hub, tmp_path / "in")
    assert imported(tmp_path / "in").tasks == hub.tasks
